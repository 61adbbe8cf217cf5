"""The examples of docs/examples run, against a server of the packaged reader with a gateway."""

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
from decode_engine.config import ServeConfig
from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.server import DecodeServer
from index_store.store.catalog import Store

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"


@dataclass(frozen=True)
class Desk:
    """Documents with facts in them, a server, and a gateway."""

    folder: Path
    server: str
    url: str

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
    with DecodeServer(config) as server, Gateway("127.0.0.1:0", server.address) as gateway:
        server.load()
        yield Desk(folder, server.address, f"{gateway.url}/v1")


@pytest.mark.slow
def test_the_examples_run(desk: Desk) -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "openai_client.py",
        "three_documents.py",
        "many_questions.py",
    }
    asked = desk.questions(1)[0]
    documents = [desk.document(number) for number in range(3)]
    lines = desk.run("three_documents.py", desk.server, asked["question"], *documents).splitlines()
    assert len(lines) == 3
    assert any(asked["answer"] in line for line in lines)
    answer = desk.run("openai_client.py", desk.url, desk.document(1), asked["question"])
    assert asked["answer"] in answer
    assert "prompt tokens were stored" in answer
    told = desk.run("many_questions.py", desk.server, "1", str(desk.folder / "1.jsonl"))
    assert told.endswith("of 2 answers are as expected\n")
    assert not told.startswith("0")
