"""Processes that compile loops: what goes wrong is logged, and they end when nobody waits any more."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from index_store.compiled.beside import compile_beside

_TOP_K = "index_store.selection.top_k_numba:_top_k_rows"


def ignore(_: str) -> None:
    pass


def test_a_loop_that_fails_is_logged_and_the_others_are_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loops = ["index_store.selection.top_k_numba:no_such_loop", _TOP_K]
    with caplog.at_level(logging.WARNING):
        compile_beside(loops, processes=1, told=ignore, into=tmp_path).result(timeout=300)
    assert "no_such_loop is not compiled beforehand: error: AttributeError" in caplog.text
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*/*.nbi")] == ["top_k_numba._top_k_rows"]


def test_cancelling_ends_the_processes(tmp_path: Path) -> None:
    done = compile_beside([_TOP_K] * 50, processes=2, told=ignore, into=tmp_path)
    assert done.cancel()
    with pytest.raises(CancelledError):
        done.result(timeout=0)
    for thread in threading.enumerate():
        if thread.name.startswith("compiling-"):
            thread.join(timeout=300)
            assert not thread.is_alive()


def test_a_process_that_compiles_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "index_store.compiled.beside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(f"{_TOP_K}\n".encode())
        child.stdin.close()  # as when whoever started it dies
        assert child.wait(timeout=300) == 0
        assert os.waitstatus_to_exitcode(child.returncode) == 0
