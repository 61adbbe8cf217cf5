"""Work for callers, and how much of it there is at once: threads, places, turns, and streams that run side by side.

Threads are daemons: work that hangs, in a file system that does not answer, keeps nobody from ending the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.door.access import Sharing
from index_store.store.description.callers import crowds

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


class LoopThread:
    """An event loop on a thread of its own, from its making until `close`. Its methods are for other threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What work on the loop returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Ends the loop, what still waits there, and the thread. Idempotent."""
        if not self.loop.is_closed():
            self.do(_cancel_others())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


async def _cancel_others() -> None:
    """Ends what still waits for clients that are gone."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def forget_error(task: asyncio.Future[Any]) -> None:
    """Takes note of a task's error, so that asyncio does not report it as one that nobody saw."""
    if not task.cancelled():
        task.exception()


_LONGEST_DELAY_S = 60.0


class Appointments:
    """When to come again, for those who are refused: one after the other, as fast as places have become free lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval_s = 1.0
        self._freed = clock()
        self._given = 0.0

    def place_freed(self) -> None:
        now = self._clock()
        between = min(max(now - self._freed, 0.01), 10.0)
        self._freed = now
        self._interval_s += 0.2 * (between - self._interval_s)

    def next_s(self) -> float:
        """Seconds until the next free appointment, which is taken by this."""
        now = self._clock()
        self._given = min(max(now, self._given) + self._interval_s, now + _LONGEST_DELAY_S)
        return self._given - now


class Bound:
    """How many calls may do something at once. As many wait for their turn as there are places for requests.

    Of both a tenant has at most three times what is left (`crowds`), so that others find some, and need not wait behind
    it.
    """

    def __init__(self, most: int, what: str, sharing: Sharing) -> None:
        """most: at all doors. what: is being done, as a sentence goes on after a number."""
        self._most = sharing.part(most)
        self._longest = sharing.places
        self._what = what
        self._held: Counter[str] = Counter()
        self._line: list[tuple[str, asyncio.Future[None]]] = []  # of none of whom there is a place now

    @asynccontextmanager
    async def place(self, tenant: str = "") -> AsyncIterator[None]:
        """For one call, in turn. Raises TooManyRequestsError where too many wait."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    async def run(self, begin: Callable[[], Coroutine[Any, Any, ResultT]], tenant: str = "") -> ResultT:
        """The result of work that no caller's leaving ends once it has begun: it has its place until its own end.

        Raises TooManyRequestsError where too many wait.
        """
        await self._take(tenant)
        work = asyncio.ensure_future(begin())
        work.add_done_callback(partial(self._end, tenant))
        return await asyncio.shield(work)

    async def _take(self, tenant: str) -> None:
        if self._has_place(tenant):
            self._held[tenant] += 1
            return
        waiting = len(self._line)
        own = sum(each == tenant for each, _ in self._line)
        if waiting >= self._longest or crowds(tenant, own, self._longest - waiting):
            also = f" and {waiting} wait to" if waiting else ""
            raise TooManyRequestsError(
                f"{self._held.total()} {self._what}{also}, which is the limit; try again later",
                limit=self._most + self._longest,
            )
        turn = tenant, asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._line:
                self._line.remove(turn)
            else:  # its turn came just then
                self._give_back(tenant)
            raise

    def _has_place(self, tenant: str) -> bool:
        free = self._most - self._held.total()
        return free > 0 and not crowds(tenant, self._held[tenant], free)

    def _give_back(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        for turn in list(self._line):
            if not turn[1].cancelled() and self._has_place(turn[0]):
                self._line.remove(turn)
                self._held[turn[0]] += 1
                turn[1].set_result(None)

    def _end(self, tenant: str, work: asyncio.Future[Any]) -> None:
        self._give_back(tenant)
        forget_error(work)


ItemT = TypeVar("ItemT")

_AGAIN_S = 0.5
"""After which sources that still run are cancelled again."""


async def merged(
    sources: Sequence[Callable[[], AsyncGenerator[ItemT, None]]], at_once: int
) -> AsyncGenerator[tuple[int, ItemT | Exception], None]:
    """What the sources yield, as it comes, with their numbers; at most `at_once` of them run, in order.

    An error is the last item of the source that raised it; the others go on. Who reads slowly holds all back. Closing
    this closes them all.
    """
    items: asyncio.Queue[tuple[int, ItemT | Exception] | None] = asyncio.Queue(at_once)
    waiting = iter(enumerate(sources))

    async def work() -> None:
        for number, source in waiting:
            try:
                async with aclosing(source()) as stream:
                    async for item in stream:
                        await items.put((number, item))
            except Exception as error:
                await items.put((number, error))
        await items.put(None)

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(sources)))]
    try:
        left = len(workers)
        while left:
            found = await items.get()
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        # Again where a source has lost it: a library's wait may, and what it goes on with nobody reads.
        while left_over := [worker for worker in workers if not worker.done()]:
            for worker in left_over:
                worker.cancel()
            while not items.empty():
                items.get_nowait()
            await asyncio.wait(left_over, timeout=_AGAIN_S)
