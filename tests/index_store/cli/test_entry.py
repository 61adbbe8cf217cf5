"""Signals end a command wherever they find it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMMAND = """
import os, sys, time
from index_store.cli.entry import end_in_order

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0)  # the handler runs here, and Python drops what it raises

end_in_order()
Finalized()
print("dropped", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_that_finds_a_finalizer_ends_the_command(number: signal.Signals, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, str(int(number))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("dropped\n", code)
