"""The command `index-store`, run in the tests' own process."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from index_store.__main__ import main
from index_store.store.catalog import Store
from tests.support.store import SyntheticContext, synthetic_context


class Command:
    """Runs the command in this process, over one store."""

    def __init__(self, store: Store, capture: pytest.CaptureFixture[str]) -> None:
        self.store = store
        self._capture = capture

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--store", str(self.store.path)])
        out, err = self._capture.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out, err

    def ok(self, *arguments: str) -> str:
        """Standard output of a run that must succeed and say nothing on standard error."""
        code, out, err = self.run(*arguments)
        assert (code, err) == (0, "")
        return out

    def json(self, *arguments: str) -> dict[str, Any]:
        """The JSON object of a run that must succeed."""
        document: dict[str, Any] = json.loads(self.ok(*arguments, "--format", "json"))
        return document

    def json_beside_notes(self, *arguments: str) -> dict[str, Any]:
        """The JSON object of a run that says something on standard error, too."""
        document: dict[str, Any] = json.loads(self.run(*arguments, "--format", "json")[1])
        return document

    def fails(self, *arguments: str) -> str:
        """The one sentence of a run that must fail."""
        code, out, err = self.run(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def command(stored: Store, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(stored, capsys)


@pytest.fixture
def expired(command: Command) -> SyntheticContext:
    """A second context, which has expired."""
    context = synthetic_context(seed=1, name="old", ttl=timedelta(hours=1))
    context.write(command.store)
    return context
