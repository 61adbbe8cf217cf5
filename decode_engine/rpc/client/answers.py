"""An answer as its client reads it: pieces, what was used, and another try where a busy server offers one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc

from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.client.attempts import Attempts
from decode_engine.rpc.client.replies import (
    Piece,
    Summary,
    TokenLogprob,
    Usage,
    Waiting,
    calls_of,
    read_logprobs,
    read_piece,
    read_reply,
    read_summary,
    texts_of,
)
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.models.conversation.messages import ToolCall
from sparsekv.v1 import generation_pb2


def ignore_waiting(waiting: Waiting) -> None:
    """For those who do not want to know what they wait for."""


class Answer:
    """What is known of a running generation, whichever way it is read."""

    def __init__(
        self,
        start: Callable[..., Any],
        translate: Callable[[grpc.RpcError], SparseKVError],
        *,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = ignore_waiting,
    ) -> None:
        """start: makes the call, with `timeout` in seconds; once more after every refusal while patience lasts, and a
        few times where no server takes it.

        The rest is as in `Client.generate`.
        """
        self._cancelled = threading.Event()
        self._start = start
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._call = start(timeout=timeout_s)
        self._translate = translate
        self._on_wait = on_wait
        self._patient_until = time.monotonic() + patience_s
        self._begun = False
        self._attempts = Attempts()
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

    def cancel(self) -> None:
        """Ends the work on the server. Harmless when it has ended."""
        self._cancelled.set()
        self._call.cancel()

    def _take(self, response: generation_pb2.GenerateResponse) -> Piece | None:
        """What a message brought; None where that is no part of the answer."""
        self._begun = True
        if response.HasField("usage"):
            self._usage = read_reply(Usage, response.usage)
        if response.HasField("waiting"):
            self._on_wait(read_reply(Waiting, response.waiting))
        if response.HasField("summary"):
            self._summaries[response.index] = read_summary(response.summary)
        if response.prompt_logprobs:
            self.prompt_logprobs = read_logprobs(response.prompt_logprobs)
        self._generated += len(response.token_ids)
        if not (response.token_ids or response.text or response.tool_calls):
            return None
        piece = read_piece(response)
        if piece.tool_calls and not piece.index:
            self._called.append(piece)
        return piece

    def _appointment_s(self, error: SparseKVError) -> float:
        """Seconds until a refused request may be sent again. Raises the error where that is not to be."""
        if self._begun and isinstance(error, ServerUnreachableError):
            raise ServerUnreachableError(
                "the server stopped before the answer was complete", **error.metadata
            ) from None
        if self._begun:
            raise error from None
        wait_s, delay = self._attempts.wait_s(error), error.retry_after_s
        if wait_s is not None:
            return wait_s
        if delay is None or time.monotonic() + delay >= self._patient_until:
            raise error from None
        return delay

    def _again(self) -> None:
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        self._call = self._start(timeout=left)
        if self._cancelled.is_set():  # meanwhile, which ended the call before only
            self._call.cancel()


class Generation(Answer):
    """A running generation: iterate for its pieces; `summary` is there after the last one.

    Leaving it as a context manager, or `cancel`, ends the work on the server.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Piece]:
        while True:
            try:
                for response in self._call:
                    if (piece := self._take(response)) is not None:
                        yield piece
                return
            except grpc.RpcError as error:
                translated = self._translate(error)
            if self._cancelled.wait(self._appointment_s(translated)):
                raise translated from None
            self._again()

    def read(self) -> str:
        """The rest of the text, all at once; of the first answer where there are several."""
        return "".join(piece.text for piece in self if not piece.index)

    def read_all(self) -> list[str]:
        """The rest of the texts of all answers."""
        return texts_of(list(self))


class AsyncGeneration(Answer):
    """The same for coroutines: `async with`, `async for`, and `await read()`. Cancelling the task that reads it ends
    the work on the server, too."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            try:
                async for response in self._call:
                    if (piece := self._take(response)) is not None:
                        yield piece
                return
            except grpc.RpcError as error:
                translated = self._translate(error)
            await asyncio.sleep(self._appointment_s(translated))
            if self._cancelled.is_set():
                raise translated from None
            self._again()

    async def read(self) -> str:
        """The rest of the text, all at once; of the first answer where there are several."""
        return "".join([piece.text async for piece in self if not piece.index])

    async def read_all(self) -> list[str]:
        """The rest of the texts of all answers."""
        return texts_of([piece async for piece in self])
