"""Blocking work, away from the event loop: short work on a few threads, long waits on threads of their own.

All of them are daemons: work that hangs, in a file system that does not answer, keeps nobody from ending the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from decode_engine.errors import TooManyRequestsError

ResultT = TypeVar("ResultT")

SPARE = 64
"""Calls that may wait for a thread beside as many as there are places for requests."""

_Job = tuple["Future[Any]", Callable[[], Any]]


class BlockingWork:
    """Runs functions for coroutines. `close` ends its threads once they have nothing to do."""

    def __init__(self, waiting: int, threads: int = 8, name: str = "rpc") -> None:
        """waiting: functions that may wait for one of the threads."""
        self._waiting = waiting
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-work-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """The function's result, from one of the threads; for what takes milliseconds.

        Who is cancelled before a thread is free takes the function with it. Raises as `submit` does.
        """
        return await asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """The same for who does not wait. Raises TooManyRequestsError when too many wait for a thread."""
        if self._jobs.qsize() >= self._waiting:
            raise TooManyRequestsError(
                f"{self._waiting} other calls wait for a thread, which is the limit; try again later",
                limit=self._waiting,
            )
        future: Future[ResultT] = Future()
        self._jobs.put((future, function))
        return future

    async def run_alone(self, function: Callable[[], ResultT]) -> ResultT:
        """The function's result, from a thread of its own; for what may wait long. The caller bounds how many."""
        return await asyncio.wrap_future(self.submit_alone(function))

    def submit_alone(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """The same for who does not wait. Raises RuntimeError where the system lets no thread begin."""
        future: Future[ResultT] = Future()
        thread = threading.Thread(target=_do, args=(future, function), name=f"{self._name}-wait", daemon=True)
        thread.start()
        return future

    def close(self) -> None:
        """Takes no more work; what is waiting is still done."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(*job)
            del job  # the result is the caller's alone while the thread waits for more


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
