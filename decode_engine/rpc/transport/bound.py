"""How many calls may do one thing at once, such as hold a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.door.sharing import Sharing
from decode_engine.rpc.transport.stalled import forget_error

ResultT = TypeVar("ResultT")


class Bound:
    """How many calls may do something at once."""

    def __init__(self, most: int, what: str, sharing: Sharing) -> None:
        """most: at all doors. what: is being done, as a sentence goes on after a number."""
        self._most = sharing.part(most)
        self._what = what
        self._now = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """For one call. Raises TooManyRequestsError."""
        self._take()
        try:
            yield
        finally:
            self._now -= 1

    async def run(self, begin: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """The result of work that no caller's leaving ends: it has its place until its own end.

        Raises TooManyRequestsError.
        """
        self._take()
        work = asyncio.ensure_future(begin())
        work.add_done_callback(self._end)
        return await asyncio.shield(work)

    def _take(self) -> None:
        if self._now >= self._most:
            raise TooManyRequestsError(
                f"{self._now} {self._what}, which is the limit; try again later", limit=self._most
            )
        self._now += 1

    def _end(self, work: asyncio.Future[Any]) -> None:
        self._now -= 1
        forget_error(work)
