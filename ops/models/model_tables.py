"""The lists of docs/models.md, from the lines that `check_architectures.py` prints."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- tables -->", "<!-- end of the tables -->"


def write_tables(lines: Path, new_tokens: int) -> None:
    """Puts the lists into the page, in place of those between the marks. new_tokens: all that were compared."""
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    served = [each for each in results if "attention" in each]
    wrong = [
        each["kind"]
        for each in results
        if "failed" in each or each.get("differing") or set(each.get("equal", {}).values()) - {new_tokens}
    ]
    if wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")
    kinds: dict[str, list[str]] = defaultdict(list)
    for each in served:
        kinds[each["attention"] or "causal, full"].append(each["kind"])
    refused: dict[str, list[str]] = defaultdict(list)
    for each in results:
        if "refused" in each:
            refused[_pattern(each["refused"])].append(each["kind"])
    rows = [f"**Served** ({len(served)} of {len(results)}):", ""]
    rows += [f"- *{what}*: {', '.join(sorted(names))}" for what, names in sorted(kinds.items())]
    rows += ["", f"**Refused** ({len(results) - len(served)}):", ""]
    rows += [f"- *{why}*: {', '.join(sorted(names))}" for why, names in sorted(refused.items())]
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(rows)}\n{END}{after}")


def _pattern(sentence: str) -> str:
    """A refusal without the numbers of this model."""
    sentence = re.sub(r"\((?:\w+Error|AssertionError): .*\)$", "(the error of transformers)", sentence)
    sentence = re.sub(r"^\S+ is an encoder", "it is an encoder", sentence)
    sentence = re.sub(r"^its text part \(\w+\)", "its text part", sentence)
    return re.sub(r"\d+", "N", sentence)
