"""An answer as its client reads it: pieces, what was used, and another try where a busy server offers one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc

from decode_engine.errors import ServerUnreachableError
from decode_engine.rpc.replies import Piece, Summary, Usage, Waiting, read_reply, read_summary
from index_store.errors import InvalidArgumentError, SparseKVError


class Generation:
    """A running generation: iterate for its pieces; `summary` is there after the last one.

    Leaving it as a context manager, or `cancel`, ends the work on the server.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        translate: Callable[[grpc.RpcError], SparseKVError],
        *,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = lambda waiting: None,
    ) -> None:
        """start: makes the call, with `timeout` in seconds, once more after every refusal while patience lasts.

        The rest is as in `Client.generate`.
        """
        self._start = start
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._call = start(timeout=timeout_s)
        self._translate = translate
        self._on_wait = on_wait
        self._patient_until = time.monotonic() + patience_s
        self._cancelled = threading.Event()
        self._begun = False
        self._usage: Usage | None = None
        self._generated = 0
        self._summary: Summary | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Piece]:
        while True:
            try:
                yield from self._pieces()
                return
            except grpc.RpcError as error:
                translated = self._translate(error)
            if not self._may_try_again(translated):
                raise translated from None
            left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
            self._call = self._start(timeout=left)

    def _pieces(self) -> Iterator[Piece]:
        for response in self._call:
            self._begun = True
            if response.HasField("usage"):
                self._usage = read_reply(Usage, response.usage)
            if response.HasField("waiting"):
                self._on_wait(read_reply(Waiting, response.waiting))
            if response.HasField("summary"):
                self._summary = read_summary(response.summary)
            self._generated += len(response.token_ids)
            if response.token_ids or response.text:
                yield Piece(tuple(response.token_ids), response.text)

    def _may_try_again(self, error: SparseKVError) -> bool:
        """Waits for the appointment of a refused request; False where there is none, or patience ends before it."""
        if self._begun and isinstance(error, ServerUnreachableError):
            raise ServerUnreachableError(
                "the server stopped before the answer was complete", **error.metadata
            ) from None
        if self._begun or error.retry_after_s is None:
            return False
        delay = error.retry_after_s
        return time.monotonic() + delay < self._patient_until and not self._cancelled.wait(delay)

    @property
    def summary(self) -> Summary:
        """Raises InvalidArgumentError before the generation has been read to its end."""
        if self._summary is None:
            raise InvalidArgumentError("the generation has no summary yet; read it to its end first")
        return self._summary

    @property
    def usage(self) -> Usage | None:
        """Tokens used so far, also where it was cancelled or failed; None before the server's first word."""
        return None if self._usage is None else replace(self._usage, completion_tokens=self._generated)

    def read(self) -> str:
        """The rest of the text, all at once."""
        return "".join(piece.text for piece in self)

    def cancel(self) -> None:
        """Ends the work on the server. Harmless when it has ended."""
        self._cancelled.set()
        self._call.cancel()
