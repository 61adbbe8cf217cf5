"""Answers and batches as their client reads them, by a thread or by a coroutine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

from google.rpc.status_pb2 import Status

from decode_engine.rpc.client.connection import Stream
from decode_engine.rpc.client.replies import BatchItem, calls_of, read_all, read_reply, texts_of
from decode_engine.rpc.transport.status import error_of
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import ToolCall
from sparsekv.v1.generation_pb2 import BatchGenerateRequest, BatchGenerateResponse, GenerateResponse
from sparsekv.v1.values import Piece, Summary, TokenLogprob, Usage, Waiting

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
    """A stream, and what its messages mean: read by a thread, or by a coroutine, as its client is.

    Leaving it as a context manager, `cancel`, or cancelling the task that reads it ends the work on the server.
    """

    def __init__(self, stream: Stream[ResponseT]) -> None:
        self._stream = stream

    def cancel(self) -> None:
        """Ends the work on the server. Harmless when it has ended."""
        self._stream.cancel()

    @abstractmethod
    def _take(self, response: ResponseT) -> ItemT | None:
        """What a message brought; None where that is nothing for the reader."""

    async def _next(self) -> ItemT | None:
        while (response := await self._stream.read()) is not None:
            if (item := self._take(response)) is not None:
                return item
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[ItemT]:
        while (item := await self._next()) is not None:
            yield item


def ignore_waiting(waiting: Waiting) -> None:
    """For those who do not want to know what they wait for."""


class Answer(Running[GenerateResponse, Piece]):
    """What is known of a running generation, whichever way it is read."""

    def __init__(self, stream: Stream[GenerateResponse], on_wait: Callable[[Waiting], None]) -> None:
        """on_wait: as in `AsyncClient.generate`."""
        super().__init__(stream)
        self._on_wait = on_wait
        self._usage: Usage | None = None
        self._generated = 0
        self._summaries: dict[int, Summary] = {}
        self._called: list[Piece] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        """Of the prompt's tokens but the first, where they are wanted, from the first piece on."""

    @property
    def summary(self) -> Summary:
        """Of the first answer. Raises InvalidArgumentError before the generation has been read to its end."""
        return self.summaries[0]

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """Of all answers, in order. Raises as `summary`."""
        if not self._summaries:
            raise InvalidArgumentError("the generation has no summary yet; read it to its end first")
        return tuple(self._summaries[index] for index in sorted(self._summaries))

    @property
    def usage(self) -> Usage | None:
        """Tokens used so far, also where it was cancelled or failed; None before the server's first word."""
        return None if self._usage is None else replace(self._usage, completion_tokens=self._generated)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that the first answer has made, as far as it has been read."""
        return calls_of(self._called)

    def _take(self, response: GenerateResponse) -> Piece | None:
        if response.HasField("usage"):
            self._usage = read_reply(Usage, response.usage)
        if response.HasField("waiting"):
            self._on_wait(read_reply(Waiting, response.waiting))
        if response.HasField("summary"):
            self._summaries[response.index] = read_reply(Summary, response.summary)
        if response.prompt_logprobs:
            self.prompt_logprobs = read_all(TokenLogprob, response.prompt_logprobs)
        self._generated += len(response.token_ids)
        if not (response.token_ids or response.text or response.tool_calls):
            return None
        piece = read_reply(Piece, response)
        if piece.tool_calls and not piece.index:
            self._called.append(piece)
        return piece


class Generation(Answer):
    """A running generation: iterate for its pieces; `summary` is there after the last one."""

    def read(self) -> str:
        """The rest of the text, all at once; of the first answer where there are several."""
        return "".join(piece.text for piece in self if not piece.index)

    def read_all(self) -> list[str]:
        """The rest of the texts of all answers."""
        return texts_of(list(self))


class AsyncGeneration(Answer):
    """The same for coroutines: `async with`, `async for`, and `await read()`."""

    async def read(self) -> str:
        """The rest of the text, all at once; of the first answer where there are several."""
        return "".join([piece.text async for piece in self if not piece.index])

    async def read_all(self) -> list[str]:
        """The rest of the texts of all answers."""
        return texts_of([piece async for piece in self])


class Batch(Running[BatchGenerateResponse, BatchItem]):
    """A running batch: iterate for its requests as they end, in any order; each comes once."""

    def __init__(self, stream: Stream[BatchGenerateResponse], request: BatchGenerateRequest) -> None:
        super().__init__(stream)
        self._answers = [each.n or 1 for each in request.requests]
        self._pieces: dict[int, list[Piece]] = {}
        self._summaries: dict[int, dict[int, Summary]] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    def _take(self, response: BatchGenerateResponse) -> BatchItem | None:
        index = response.index
        if response.HasField("error"):
            return self._item(index, response.error)
        answer = response.response
        if answer.prompt_logprobs:
            self._prompt_logprobs[index] = read_all(TokenLogprob, answer.prompt_logprobs)
        if answer.token_ids or answer.text or answer.tool_calls:
            self._pieces.setdefault(index, []).append(read_reply(Piece, answer))
        if answer.HasField("summary"):
            summaries = self._summaries.setdefault(index, {})
            summaries[answer.index] = read_reply(Summary, answer.summary)
            if len(summaries) == self._answers[index]:
                return self._item(index, None)
        return None

    def _item(self, index: int, error: Status | None) -> BatchItem:
        pieces, summaries = self._pieces.pop(index, []), self._summaries.pop(index, {})
        texts = texts_of(pieces)
        texts += [""] * (len(summaries) - len(texts))
        answers = [[piece for piece in pieces if piece.index == place] for place in range(len(texts))]
        return BatchItem(
            index,
            tuple(texts),
            tuple(tuple(id_ for piece in own for id_ in piece.token_ids) for own in answers),
            tuple(summaries[place] for place in sorted(summaries)),
            None if error is None else error_of(error),
            tuple(map(calls_of, answers)),
            tuple(tuple(each for piece in own for each in piece.logprobs) for own in answers),
            self._prompt_logprobs.pop(index, ()),
        )
