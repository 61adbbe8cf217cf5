"""Rewrites the table of modules in docs/architecture.md from the first sentence of every module's docstring.

usage: python ops/module_table.py [--check]

With --check nothing is written; the exit code is 1 when the table is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = ("index_store", "prefill_worker", "decode_engine")
TABLE = re.compile(r"(?<=\| module \| what it does \|\n\|---\|---\|\n)(?:\| .* \|\n)*")


def first_sentence(path: Path) -> str:
    """The first sentence of the module's docstring, as words for a table cell."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z`)])\. (?=[A-Z])", paragraph)[0].rstrip(".:")
    return sentence.replace("|", "\\|")


def table() -> str:
    """One row per module; packages' own `__init__` files are described by the tree in the README."""
    modules = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return "".join(
        f"| `{path.relative_to(ROOT)}` | {first_sentence(path)} |\n"
        for path in modules
        if path.stem != "__init__"
    )


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = TABLE.sub(lambda _: table(), text)
    if "--check" in sys.argv[1:]:
        if wanted != text:
            sys.stderr.write(
                "docs/architecture.md: the table of modules is out of date; run ops/module_table.py\n"
            )
        return int(wanted != text)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
