"""One call, made again where no server took it: before its first message, a few times, and while patience lasts.

gRPC would repeat by itself. But where a server dies while its retries have a stream in hand, that stream may never end,
not even at its deadline (grpcio 1.85: after one in 10 to 20 killed servers, six streams at a time).
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
from grpc import aio

from decode_engine.errors import CancelledError, ServerUnreachableError
from decode_engine.rpc.client.connection import CHANNEL_OPTIONS, translate
from decode_engine.rpc.transport.status import CALLERS_OWN, code_of
from index_store.errors import SparseKVError

MOST_ATTEMPTS = 4
_FIRST_S, _LONGEST_S = 0.1, 1.0
_NO_CONNECTION = "failed to connect"
"""How gRPC's words begin where nobody listens. It tries no other connection for a second, so all calls fail by then."""

ResponseT = TypeVar("ResponseT")


class Wire(Protocol):
    """What differs between threads and coroutines: how one waits. A blocking one never suspends its coroutines."""

    channel: Any
    """grpc.Channel or grpc.aio.Channel."""

    async def reply(self, send: Any, request: Any, **how: Any) -> tuple[Any, Any]:
        """The one response to a request, and the metadata behind it. Raises grpc.RpcError."""

    async def next(self, call: Any) -> Any:
        """The next response of a stream, None behind the last one. Raises grpc.RpcError, CancelledError."""

    async def sleep(self, seconds: float, cancelled: threading.Event) -> None:
        """Waits; a blocking one no longer than until that is set."""

    async def close(self) -> None:
        """Closes the channel."""


class BlockingWire:
    """Calls that block the thread which makes them: a coroutine over it never suspends, and `finish` runs it."""

    def __init__(self, address: str, encryption: grpc.ChannelCredentials | None) -> None:
        self.channel: grpc.Channel = (
            grpc.insecure_channel(address, CHANNEL_OPTIONS)
            if encryption is None
            else grpc.secure_channel(address, encryption, CHANNEL_OPTIONS)
        )

    async def reply(self, send: Any, request: Any, **how: Any) -> tuple[Any, Any]:
        response, call = send.with_call(request, **how)
        return response, call.trailing_metadata()

    async def next(self, call: Any) -> Any:
        return next(call, None)

    async def sleep(self, seconds: float, cancelled: threading.Event) -> None:
        cancelled.wait(seconds)

    async def close(self) -> None:
        self.channel.close()


class AsyncWire:
    """Calls for one event loop."""

    def __init__(self, address: str, encryption: grpc.ChannelCredentials | None) -> None:
        self.channel: aio.Channel = (
            aio.insecure_channel(address, CHANNEL_OPTIONS)
            if encryption is None
            else aio.secure_channel(address, encryption, CHANNEL_OPTIONS)
        )

    async def reply(self, send: Any, request: Any, **how: Any) -> tuple[Any, Any]:
        call = send(request, **how)
        return await call, await call.trailing_metadata()

    async def next(self, call: Any) -> Any:
        response = await call.read()
        return None if response is aio.EOF else response  # type: ignore[attr-defined]  # which the stubs lack

    async def sleep(self, seconds: float, cancelled: threading.Event) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self.channel.close(grace=None)


class Repeats:
    """Counts how often one call was made. patience_s: how long it is repeated where the server says when."""

    def __init__(self, address: str, timeout_s: float | None, patience_s: float = 0.0) -> None:
        self._address = address
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._patient_until = time.monotonic() + patience_s
        self._made = 1

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, None without one."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def translate(self, error: grpc.RpcError) -> SparseKVError:
        """A failed call as one of our errors."""
        return translate(error, self._address)

    def wait_s(self, error: SparseKVError) -> float:
        """Seconds until the call may be made again. Raises the error where that is not to be.

        They are drawn at random from a range that doubles, unless the server names them.
        """
        unreachable = isinstance(error, ServerUnreachableError)
        down = unreachable or code_of(error) is grpc.StatusCode.UNAVAILABLE
        hopeless = error.reason in CALLERS_OWN or (unreachable and _NO_CONNECTION in error.message)
        if down and not hopeless and self._made < MOST_ATTEMPTS:
            longest_s = min(_FIRST_S * 2 ** (self._made - 1), _LONGEST_S)
            self._made += 1
            wait_s = random.uniform(0, longest_s) if error.retry_after_s is None else error.retry_after_s
        elif error.retry_after_s is not None and time.monotonic() + error.retry_after_s < self._patient_until:
            wait_s = error.retry_after_s
        else:
            raise error from None
        if self.left_s is not None and wait_s >= self.left_s:
            raise error from None
        return wait_s


class Stream(Generic[ResponseT]):
    """A call with many responses, which begins at once."""

    def __init__(self, wire: Wire, start: Callable[[float | None], Any], repeats: Repeats) -> None:
        """start: makes the call, with so many seconds until its deadline."""
        self._cancelled = threading.Event()
        self._wire, self._start, self._repeats = wire, start, repeats
        self._begun = False
        self._call = start(repeats.left_s)

    def cancel(self) -> None:
        """Ends the call. Harmless when it has ended."""
        self._cancelled.set()
        self._call.cancel()

    async def read(self) -> ResponseT | None:
        """The next response, None behind the last one. Raises the call's error as one of ours."""
        while True:
            try:
                response = await self._wire.next(self._call)
                self._begun = True
                return cast(ResponseT | None, response)
            except grpc.RpcError as error:
                failed = self._repeats.translate(error)
            except (
                asyncio.CancelledError
            ):  # what reads was cancelled, or by gRPC's account the call, with `cancel`
                task = asyncio.current_task()
                if not self._cancelled.is_set() or (task is not None and task.cancelling()):
                    self.cancel()  # gRPC does so, too, but not where the task was cancelled with a response in hand
                    raise
                raise CancelledError("the call was cancelled") from None
            if self._begun and isinstance(failed, ServerUnreachableError):
                raise ServerUnreachableError(
                    "the server stopped before the answer was complete", **failed.metadata
                ) from None
            if self._begun:
                raise failed
            await self._wire.sleep(self._repeats.wait_s(failed), self._cancelled)
            if self._cancelled.is_set():
                raise failed
            self._call = self._start(self._repeats.left_s)
            if self._cancelled.is_set():  # meanwhile, which ended the call before only
                self._call.cancel()
