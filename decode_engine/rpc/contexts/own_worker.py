"""A server's own worker: a process of the prefill worker beside it, which gives way to decoding.

It is a process and no thread, so that no decode step waits for one of its passes: it has half of the cores'
threads, the lowest priority, and memory of its own. It ends with the server, however that ends, since its standard
input does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from index_store.cli.settings_file import PREFIX
from index_store.compiled.places import CACHE_VARIABLE
from index_store.errors import StoreError

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19
"""Nice value: beside others that are busy, about a seventieth of a core."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_LEAST_S, _MOST_S = 1.0, 60.0  # between the end of one process and the start of the next
_STEADY_S = 60.0  # a process that lived so long was not ended by what it began with
_END_S = 10.0


class OwnWorker:
    """Keeps one worker process running until `stop`. Its jobs survive it."""

    def __init__(
        self,
        command: Sequence[str],
        threads: int,
        attending: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """command: starts a worker that ends with its standard input. threads: of its kernels. attending: shows that
        there is one, also while it starts."""
        self._attending = attending
        self._command = list(command)
        options = {
            name for name in os.environ if name.startswith(PREFIX) and name != CACHE_VARIABLE
        }  # the server's
        self._environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if name not in options},
            **{name: str(threads) for name in _THREAD_VARIABLES},
        }
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="own-worker", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Starts the process, and another one whenever it ends."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the process; what it worked on is gone on with by the next one. Idempotent."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # it keeps nothing that is not on the disk
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        pause_s = _LEAST_S
        while True:
            begun = time.monotonic()
            try:
                with self._attending():
                    with self._lock:
                        if self._stopping.is_set():
                            return
                        # In a session of its own, so that a Ctrl-C ends the server, which then ends it.
                        process = self._process = subprocess.Popen(
                            self._command,
                            stdin=subprocess.PIPE,
                            env=self._environment,
                            start_new_session=True,
                        )
                        os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
                    with process:
                        what = f"ended with {process.wait()}"
            except (OSError, StoreError) as error:  # no memory, files or space are left, which may pass
                what = f"could not be started: {error}"
            if self._stopping.is_set():
                return
            if time.monotonic() - begun >= _STEADY_S:
                pause_s = _LEAST_S
            logger.warning("the server's own prefill worker %s; starting another one in %g s", what, pause_s)
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _MOST_S)
