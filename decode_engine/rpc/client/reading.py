"""What one reads while it runs, by a thread or by a coroutine: the same messages, taken by the same hands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from decode_engine.rpc.client.repeats import Stream

ResponseT = TypeVar("ResponseT")
ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT")


def finish(coroutine: Coroutine[Any, Any, ReplyT]) -> ReplyT:
    """What a coroutine over a blocking wire returns, run in this thread: it has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        reply: ReplyT = end.value
        return reply
    coroutine.close()
    raise RuntimeError("a coroutine over a blocking wire waited for a loop")


class Running(ABC, Generic[ResponseT, ItemT]):
    """A stream, and what its messages mean."""

    def __init__(self, stream: Stream[ResponseT]) -> None:
        self._stream = stream

    def cancel(self) -> None:
        """Ends the work on the server. Harmless when it has ended."""
        self._stream.cancel()

    @abstractmethod
    def _take(self, response: ResponseT) -> ItemT | None:
        """What a message brought; None where that is nothing for the reader."""

    async def _next(self) -> ItemT | None:
        """What is read next, None at the end."""
        while (response := await self._stream.read()) is not None:
            if (item := self._take(response)) is not None:
                return item
        return None


class Reader(Running[ResponseT, ItemT]):
    """For threads. Leaving it as a context manager ends the work on the server."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[ItemT]:
        while True:
            try:
                item = finish(self._next())
            except KeyboardInterrupt:
                self.cancel()
                raise
            if item is None:
                return
            yield item


class AsyncReader(Running[ResponseT, ItemT]):
    """For coroutines. Cancelling the task that reads ends the work on the server, too."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[ItemT]:
        while (item := await self._next()) is not None:
            yield item
