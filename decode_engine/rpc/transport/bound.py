"""How many calls may do one thing at once, such as hold a thread; others wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.door.sharing import Sharing
from decode_engine.rpc.transport.stalled import forget_error

ResultT = TypeVar("ResultT")


class Bound:
    """How many calls may do something at once. As many wait for their turn as there are places for requests."""

    def __init__(self, most: int, what: str, sharing: Sharing) -> None:
        """most: at all doors. what: is being done, as a sentence goes on after a number."""
        self._most = sharing.part(most)
        self._free = asyncio.Semaphore(self._most)
        self._line = 0
        self._longest = sharing.places
        self._what = what

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """For one call, in turn. Raises TooManyRequestsError where too many wait."""
        await self._take()
        try:
            yield
        finally:
            self._free.release()

    async def run(self, begin: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """The result of work that no caller's leaving ends once it has begun: it has its place until its own end.

        Raises TooManyRequestsError where too many wait.
        """
        await self._take()
        work = asyncio.ensure_future(begin())
        work.add_done_callback(self._end)
        return await asyncio.shield(work)

    async def _take(self) -> None:
        if self._free.locked() and self._line >= self._longest:
            also = f" and {self._line} wait to" if self._line else ""
            raise TooManyRequestsError(
                f"{self._most} {self._what}{also}, which is the limit; try again later",
                limit=self._most + self._longest,
            )
        self._line += 1
        try:
            await self._free.acquire()
        finally:
            self._line -= 1

    def _end(self, work: asyncio.Future[Any]) -> None:
        self._free.release()
        forget_error(work)
