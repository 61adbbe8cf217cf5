"""A command of ours that a replica runs: started, started again whenever it ends, and ended in order."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

_FIRST = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))\n"  # PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or sys.exit('the parent has ended')\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
"""Has a process drain when the one that started it ends, whatever ends that."""
_LEAST_S, _MOST_S = 0.2, 30.0
_STEADY_S = 60.0

logger = logging.getLogger(__name__)


class Watched:
    """Runs until `stop`. told: what it said on standard output when it began to serve, None while it does not.

    serves: whether it says so; else it serves when it runs. cores: that it runs on; those of this process by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        serves: bool,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        self._command = [sys.executable, "-S", "-c", _FIRST, str(os.getpid()), sys.executable, *command]
        self._environment = {**os.environ, **(environment or {})}
        self._serves, self._cores = serves, cores
        self.told: dict[str, Any] | None = None
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        # The system sends the signal when this thread ends, not the process: it lives as long as that.
        self._thread = threading.Thread(target=self._keep, name="watched", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Ends it where it is; it is started again."""
        if self._process is not None:
            self._process.kill()

    def stop(self, seconds: float) -> None:
        """Tells it to end, and ends it where it is after so many seconds."""
        self._stopping.set()
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join()

    def _keep(self) -> None:
        pause_s = _LEAST_S
        while not self._stopping.is_set():
            begun = time.monotonic()
            with subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,  # whoever ends the parent's group leaves it time to drain
            ) as process:
                self._process = process
                if self._cores:
                    with suppress(ProcessLookupError):  # it has ended
                        os.sched_setaffinity(process.pid, self._cores)
                if self._stopping.is_set():
                    process.terminate()
                if not self._serves:
                    self.told = {}
                for line in process.stdout or ():
                    if line.startswith("{"):
                        self.told = json.loads(line)
            self.told = None
            pause_s = _LEAST_S if time.monotonic() - begun > _STEADY_S else min(2 * pause_s, _MOST_S)
            if not self._stopping.is_set():
                logger.warning("%s ended with %s; starting it again", self._command[6:9], process.returncode)
            self._stopping.wait(pause_s)
