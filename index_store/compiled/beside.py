"""Compiles loops in processes of their own, beside whatever the caller does, who finds them in the cache then."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)


def compile_beside(
    loops: Sequence[str], *, processes: int, told: Callable[[str], None], into: Path | None = None
) -> Future[None]:
    """Compiles what the cache lacks; the Future is done when all of it is there, or failed, which is logged.

    loops: `module:function`, those that take longest first: each process takes the next one when it has done one. told:
    called with a clause after every loop, in threads of this function. into: a folder for them instead of the cache.
    Cancelling the Future ends the processes; so does the end of this process.
    """
    from index_store.compiled.loop_cache import is_kept  # numba and llvmlite take a while to import

    done: Future[None] = Future()
    missing = [name for name in loops if into is not None or not is_kept(*name.split(":"))]
    if not missing or processes < 1:
        done.set_result(None)
        return done
    work = _Work(missing, told, into, done)
    threads = [
        threading.Thread(target=work.drive, name=f"compiling-{number}", daemon=True)
        for number in range(min(processes, len(missing)))
    ]
    work.left_processes = len(threads)
    done.add_done_callback(work.end)
    for thread in threads:
        thread.start()
    return done


class _Work:
    """Loops that are to be compiled, and the processes that do it."""

    def __init__(
        self, loops: Sequence[str], told: Callable[[str], None], into: Path | None, done: Future[None]
    ) -> None:
        self._loops: SimpleQueue[str] = SimpleQueue()
        for name in loops:
            self._loops.put(name)
        self._count, self._told, self._into, self._done = len(loops), told, into, done
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        self._compiled = 0
        self._children: list[subprocess.Popen[str]] = []
        self.left_processes = 0

    def drive(self) -> None:
        """Gives one process loops until there are none; the last of these threads completes the Future."""
        try:
            self._drive()
        except OSError as error:
            logger.warning("a process that compiles loops ended: %s", error)
        with self._lock:
            self.left_processes -= 1
            last = self.left_processes == 0
        if last and self._done.set_running_or_notify_cancel():
            self._done.set_result(None)

    def _drive(self) -> None:
        command = [sys.executable, "-m", "index_store.compiled.child"]
        command += [] if self._into is None else [str(self._into)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with child:
            self._children.append(child)
            if self._done.cancelled():  # meanwhile, when the child was not in the list yet
                child.kill()
            while not self._done.cancelled():
                try:
                    name = self._loops.get_nowait()
                except Empty:
                    break
                self._compile(child, name)
            child.kill()

    def _compile(self, child: subprocess.Popen[str], name: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(name + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        if self._done.cancelled():
            return
        if not answer or answer.startswith("error"):
            logger.warning("loop %s is not compiled beforehand: %s", name, answer or "its process ended")
            if not answer:
                raise BrokenPipeError(f"while it compiled {name}")
        with self._lock:
            self._compiled += 1
            seconds = time.perf_counter() - self._begin
            self._told(f"compiled {self._compiled} of {self._count} loops in {seconds:.0f} s")

    def end(self, _: Future[None]) -> None:
        """Ends the processes; they have nothing that could be lost."""
        for child in list(self._children):
            with suppress(ProcessLookupError):
                child.kill()
