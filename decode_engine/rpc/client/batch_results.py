"""Many requests on one context, as their client reads them: one after another as they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc.status_pb2 import Status

from decode_engine.rpc.client.attempts import Attempts
from decode_engine.rpc.client.replies import (
    BatchItem,
    Piece,
    Summary,
    TokenLogprob,
    calls_of,
    read_logprobs,
    read_piece,
    read_summary,
    texts_of,
)
from decode_engine.rpc.transport.status import error_of
from index_store.errors import SparseKVError
from sparsekv.v1 import generation_pb2


class Results:
    """What is known of a running batch, whichever way it is read."""

    def __init__(
        self,
        start: Callable[[], Any],
        request: generation_pb2.BatchGenerateRequest,
        translate: Callable[[grpc.RpcError], SparseKVError],
    ) -> None:
        """start: makes the call, and again where no server takes it."""
        self._cancelled = threading.Event()
        self._start = start
        self._call = start()
        self._translate = translate
        self._begun = False
        self._attempts = Attempts()
        self._answers = [each.n or 1 for each in request.requests]
        self._pieces: dict[int, list[Piece]] = {}
        self._summaries: dict[int, dict[int, Summary]] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    def cancel(self) -> None:
        """Ends the work on the server. Harmless when it has ended."""
        self._cancelled.set()
        self._call.cancel()

    def _take(self, response: generation_pb2.BatchGenerateResponse) -> BatchItem | None:
        """What became of a request with this message; None while it goes on."""
        self._begun = True
        index = response.index
        if response.HasField("error"):
            return self._item(index, response.error)
        answer = response.response
        if answer.prompt_logprobs:
            self._prompt_logprobs[index] = read_logprobs(answer.prompt_logprobs)
        if answer.token_ids or answer.text or answer.tool_calls:
            self._pieces.setdefault(index, []).append(read_piece(answer))
        if answer.HasField("summary"):
            summaries = self._summaries.setdefault(index, {})
            summaries[answer.index] = read_summary(answer.summary)
            if len(summaries) == self._answers[index]:
                return self._item(index, None)
        return None

    def _wait_s(self, error: grpc.RpcError) -> float:
        """Seconds until the call may be made again. Raises the error where that is not to be."""
        translated = self._translate(error)
        wait_s = None if self._begun else self._attempts.wait_s(translated)
        if wait_s is None:
            raise translated from None
        return wait_s

    def _again(self) -> None:
        self._call = self._start()
        if self._cancelled.is_set():  # meanwhile, which ended the call before only
            self._call.cancel()

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


class Batch(Results):
    """A running batch: iterate for its requests as they end, in any order; each comes once.

    Leaving it as a context manager, or `cancel`, ends the work on the server.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[BatchItem]:
        while True:
            try:
                for response in self._call:
                    if (item := self._take(response)) is not None:
                        yield item
                return
            except grpc.RpcError as error:
                failed, wait_s = error, self._wait_s(error)
            if self._cancelled.wait(wait_s):
                raise self._translate(failed) from None
            self._again()


class AsyncBatch(Results):
    """The same for coroutines: `async with` and `async for`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[BatchItem]:
        while True:
            try:
                async for response in self._call:
                    if (item := self._take(response)) is not None:
                        yield item
                return
            except grpc.RpcError as error:
                failed, wait_s = error, self._wait_s(error)
            await asyncio.sleep(wait_s)
            if self._cancelled.is_set():
                raise self._translate(failed) from None
            self._again()
