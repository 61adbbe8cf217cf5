"""The examples of docs/examples run, against a server of the packaged reader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decode_engine.__main__ import main
from decode_engine.settings.config import ServeConfig
from index_store.store.catalog import Store
from tests.support.serving.service import loaded

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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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
    """Those of gRPC; the others do in test_start."""
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
