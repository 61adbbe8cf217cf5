"""The pages that start with two terminals, and that operators read, work as they stand."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documents.test_readme import examples, run_blocks


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
