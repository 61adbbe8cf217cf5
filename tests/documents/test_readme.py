"""What the pages and the examples show works, and what the documents list is there."""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from decode_engine.__main__ import main
from decode_engine.settings.config import ServeConfig
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.presets import METHODS, get_method
from index_store.store.catalog import Store
from tests.installed.test_commands import all_commands
from tests.support.forking import ran
from tests.support.serving.service import loaded
from tests.test_layers import FLOORS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS, WEB = "127.0.0.1:50051", "127.0.0.1:8000"
BLOCK = re.compile(
    r"<!-- test: (?P<how>\w+)(?:, prints (?P<prints>[^>]+?))? -->\n```\w+\n(?P<code>.*?)```", re.DOTALL
)


@dataclass(frozen=True)
class Example:
    """A fenced block that is marked for the test.

    how: run (bash), serve (bash, in the background), python, langchain (bash, where that is installed).
    """

    how: str
    prints: str | None
    code: str


def examples(document: str = "README.md") -> list[Example]:
    text = (ROOT / document).read_text()
    return [Example(match["how"], match["prints"], match["code"]) for match in BLOCK.finditer(text)]


def tracked_files() -> list[Path]:
    """Files of the project, by git where there is a repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = ran(command)
    if listed.returncode == 0:
        return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]
    visible = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [
        path for path in visible if not any(part[0] == "." or "__pycache__" in part for part in path.parts)
    ]


def test_the_first_thirty_lines_say_what_it_is_and_how_to_install_and_run_it() -> None:
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    for needed in ("ops/demo", "ops/test", "pip install", "prefill-worker run", "decode-engine serve"):
        assert needed in head


def test_the_tree_is_the_repository() -> None:
    (block,) = re.findall(r"^```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in block.splitlines()]
    assert all(len(line) == 2 for line in lines), "every line needs a path and a description"
    folders = {path.parts[0] for path in tracked_files() if len(path.parts) > 1}
    assert {path for path, _ in lines} == {f"{folder}/" for folder in folders if not folder.startswith(".")}


def test_the_architecture_lists_the_floors() -> None:
    """Packages and their folders from top to bottom, each with the sentence that it says of itself."""
    text = (ROOT / "docs/architecture.md").read_text()
    (block,) = re.findall(r"## The tree\n.*?```text\n(.*?)```", text, re.DOTALL)
    listed = [folder for folder in FLOORS if folder.count("/") <= 1]
    expected = "".join(f"{folder:<30}{sentence(folder)}\n" for folder in listed)
    assert block == expected, f"the block should be:\n{expected}"


def sentence(folder: str) -> str:
    """The first sentence of a package's docstring."""
    path = ROOT / ("protos" if folder.startswith("sparsekv") else "") / folder / "__init__.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].split(". ")[0].rstrip(".")


def anchors(document: Path) -> set[str]:
    """Names of the headings, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []
    linked = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    assert [
        (page, anchor)
        for page, anchor in linked
        if anchor not in anchors(document.parent / page if page else document)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_the_documents_exist(document: Path) -> None:
    """Files that are named, and the three commands with their sub-commands, wherever they are shown."""
    text = document.read_text()
    paths = set(re.findall(r"\bops/[\w/.-]*\w", text)) | set(re.findall(r"`(\w+/[\w/]+\.\w+)`", text))
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    known = {"index-store": {"name"}}  # of which the log tells
    for command, *words in all_commands():
        known.setdefault(command, set()).update(words[:1])
    for command, subcommands in known.items():
        shown = set(re.findall(rf"^(?:\S*/)?{command} ([a-z-]+)", text, re.MULTILINE))
        shown |= set(re.findall(rf"`{command} ([a-z-]+)", text))
        assert shown <= subcommands


def test_the_table_of_methods_lists_all_of_them() -> None:
    table = (ROOT / "docs/methods.md").read_text().split("\n| method | ", 1)[1].split("\n\n")[0]
    names = [
        name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])
    ]
    assert names == list(METHODS), "docs/methods.md has a row for every method, in the order of _LISTED"
    (default,) = [row for row in table.splitlines() if "(default)" in row]
    assert f"`{DEFAULT_METHOD}`" in default.split("|")[1]
    for row in table.splitlines()[2:]:
        keeps = re.search(r"([\d.]+) % ?(of the attention weight)?", row)
        for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1]):
            budget = METHODS[name].budget
            stated = None if keeps is None else float(keeps[1]) / 100
            assert stated == (
                None if budget is None else getattr(budget, "mass" if keeps and keeps[2] else "keep")
            )


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != "log.md"], ids=lambda path: path.name
)
def test_expressions_in_the_documents_mean_something(document: Path) -> None:
    """Methods with another remainder or options, in text and in commands; the log tells of some that are gone."""
    presets = "|".join(sorted(METHODS, key=len, reverse=True))
    shown = re.findall(rf"(?<![\w-])(?:{presets})(?:[+@][a-z_]+(?:=[\w.]+)?)+", document.read_text())
    for expression in shown:
        assert get_method(expression).name == expression


def test_the_page_of_the_api_is_what_the_code_says() -> None:
    command = [sys.executable, str(ROOT / "ops/pages/api_page.py"), "--check"]
    done = ran(command)
    assert done.returncode == 0, done.stderr


def free_address() -> str:
    """Below the ports that systems give to whoever asks for any: no other test gets it until a server listens there."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


@contextmanager
def serving(code: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """The server of the README, from its first line of output on."""
    *before, last = code.strip().splitlines()
    server = subprocess.Popen(
        ["bash", "-c", "\n".join(["set -e", *before, f"exec {last}"])],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout.readline().startswith("Serving")
        yield
    finally:
        server.terminate()
        assert server.wait(timeout=120) == 0


@pytest.mark.slow
def test_the_readme_runs(tmp_path: Path) -> None:
    """Its blocks one after another; a server runs until the next one begins, or all are done."""
    blocks = examples()
    assert [block.how for block in blocks] == ["run", "serve", "run", "python", "serve", "python"]
    run_blocks(blocks, tmp_path)


def run_blocks(blocks: list[Example], tmp_path: Path) -> None:
    """Runs them on free ports, with the repository's examples where they are."""
    address, web = free_address(), free_address()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The ports in the README may be taken on this machine; everything else runs as it stands there.
    environment = os.environ | {"PATH": path, "SPARSEKV_SERVER": address}
    port = web.rpartition(":")[2]
    with ExitStack() as server:
        for block in blocks:
            code = (
                block.code.replace(ADDRESS, address)
                .replace(WEB, web)
                .replace("-port 8000", f"-port {port}")
                .replace("docs/examples", str(ROOT / "docs" / "examples"))
            )
            example = Example(block.how, block.prints, code)
            if example.how == "serve":
                server.close()
                server.enter_context(serving(example.code, tmp_path, environment))
            else:
                check(example, tmp_path, environment)


def check(example: Example, folder: Path, environment: dict[str, str]) -> None:
    shell = [sys.executable, "-c"] if example.how == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = ran([*shell, example.code], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert example.prints is None or example.prints in done.stdout


EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@dataclass(frozen=True)
class Desk:
    """Documents with facts in them, and a server."""

    folder: Path
    server: str

    def document(self, number: int) -> str:
        return str(self.folder / f"{number}.txt")

    def questions(self, number: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{number}.jsonl").read_text().splitlines()]

    def run(self, example: str, *arguments: str) -> str:
        """What an example prints."""
        command = [sys.executable, str(EXAMPLES / example), *arguments]
        done = ran(command)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    for number in range(3):
        files = ["--out", f"{folder}/{number}.txt", "--questions", f"{folder}/{number}.jsonl"]
        with pytest.raises(SystemExit):
            main(["make-document", "--tokens", "700", "--facts", "2", "--seed", str(number), *files])
    Store(folder / "store", create=True)
    config = ServeConfig(
        folder / "store", "reader", listen="127.0.0.1:0", device="cpu", warm_up=False, prefill=True
    )
    with loaded(config) as server:
        yield Desk(folder, server.address)


@pytest.mark.nightly
def test_the_examples_run(desk: Desk) -> None:
    """Those of gRPC; the start needs more."""
    page = (EXAMPLES.parent / "start.md").read_text()
    shown = {path.name for path in EXAMPLES.glob("*.py") if f"docs/examples/{path.name}" in page}
    assert {path.name for path in EXAMPLES.glob("*.py")} - shown == {
        "three_documents.py",
        "many_questions.py",
    }
    asked = desk.questions(1)[0]
    documents = [desk.document(number) for number in range(3)]
    lines = desk.run("three_documents.py", desk.server, asked["question"], *documents).splitlines()
    assert len(lines) == 3
    assert any(asked["answer"] in line for line in lines)
    told = desk.run("many_questions.py", desk.server, "1", str(desk.folder / "1.jsonl"))
    assert told.endswith("of 2 answers are as expected\n")
    assert not told.startswith("0")


@pytest.mark.nightly
def test_the_start_runs(tmp_path: Path) -> None:
    """LangChain's client among it where it is installed, as with the extra `dev`."""
    blocks = examples("docs/start.md")
    assert [block.how for block in blocks] == ["serve", *["run"] * 3, "langchain", *["run"] * 5]
    installed = find_spec("langchain_openai") is not None
    run_blocks([block for block in blocks if block.how != "langchain" or installed], tmp_path)


@pytest.mark.slow
def test_the_operations_run(tmp_path: Path) -> None:
    """A configuration, tokens, a drain, and a backup that is brought back."""
    blocks = examples("docs/operations.md")
    assert [block.how for block in blocks] == ["run", "serve", "run", "run", "run"]
    run_blocks(blocks, tmp_path)
