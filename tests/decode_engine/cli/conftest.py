"""The command line, run within the tests' own process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from decode_engine.__main__ import main


@dataclass(frozen=True)
class Result:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs the command line in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run_here(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["decode-engine", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Result(int(caught.value.code or 0), captured.out, captured.err)

    yield run_here
    for number, handler in before.items():
        signal.signal(number, handler)
