"""Contexts that a command has prefilled by another one, without the process that this takes."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest


def prefill_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has evaluations and benchmarks run the prefill worker's command line in this process, which imported it all."""
    from prefill_worker.__main__ import main

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "prefill_worker"]
        out, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main(command[3:])
        code = ended.value.code or 0
        assert isinstance(code, int)
        return subprocess.CompletedProcess(command, code, out.getvalue(), errors.getvalue())

    monkeypatch.setattr("decode_engine.evaluation.prefill_command.subprocess", SimpleNamespace(run=run))
