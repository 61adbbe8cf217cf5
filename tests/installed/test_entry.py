"""The three commands begin alike: an early interrupt and an output that cannot be written end without a stack trace."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {"index_store": "ls --store .", "prefill_worker": "--help", "decode_engine": "methods"}

# Sends the process the signal as soon as the first of these modules is looked for.
INTERRUPTED_AT = """
import os, runpy, sys
module, awaited, number, *sys.argv[1:] = sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Finder())
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", COMMANDS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_while_modules_are_imported(module: str, number: signal.Signals, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, module, "typer", str(int(number)), *COMMANDS[module].split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("module", COMMANDS)
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams(module: str, closed: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "contexts").mkdir()
    started = "import os, sys; [os.close(int(n)) for n in sys.argv[1].split(',')]; os.execv(sys.argv[2], sys.argv[2:])"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            started,
            ",".join(map(str, closed)),
            sys.executable,
            "-m",
            module,
            "--version",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    name = module.replace("_", "-")
    assert (1 in closed) if not done.stdout else done.stdout.startswith(f"{name} 0.1.0 (Python 3.")


@pytest.mark.parametrize("module", COMMANDS)
def test_an_output_that_cannot_be_written(module: str, tmp_path: Path) -> None:
    (tmp_path / "contexts").mkdir()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, *COMMANDS[module].split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: standard output")
