"""What a connection is made of, what a failed call means, and how it is made again where no server took it."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc
from grpc import aio

from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    ServerUnreachableError,
    error_by_reason,
)
from decode_engine.rpc.door.options import Credentials
from decode_engine.rpc.transport.status import CALLERS_OWN, code_of, error_info, retry_info
from index_store.errors import InvalidArgumentError, SparseKVError

HEALTH_TIMEOUT_S = 5.0

REPEATED = frozenset(
    (
        *("CreateContext", "GetContext", "ListContexts", "WarmContext", "UpdateContext"),
        *("ListMethods", "GetServerStatus", "ListTenants", "Drain", "Tokenize", "Detokenize", "CountTokens"),
        *("ListOperations", "GetOperation", "WaitOperation", "CancelOperation"),
    )
)
"""Methods with one reply that may be called twice, and are where no server took them (CreateContext always has a
request_id). Of streams all are."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [("grpc.max_receive_message_length", -1)]


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials | None:
    """What encrypts, None where nothing does. Raises InvalidArgumentError for a file that cannot be read."""
    if credentials.ca_file is None:
        return None
    paths = (credentials.authorities, credentials.client_key, credentials.client_cert)
    try:
        roots, key, chain = (None if path is None else path.read_bytes() for path in paths)
    except OSError as error:
        raise InvalidArgumentError(f"a certificate cannot be read: {error}") from error
    return grpc.ssl_channel_credentials(roots, key, chain)


def translate(error: grpc.RpcError, address: str) -> SparseKVError:
    """The error of a failed call: the server's own by its reason, else one by the status code."""
    info = error_info(error)
    call = cast(grpc.Call, error)
    code, details = call.code(), call.details() or ""
    if info is not None:
        return error_by_reason(info.reason, details, info.metadata, retry_info(error))
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachableError(
            f"no server answers at {address}; start one with `decode-engine serve`, or name another with "
            f"its address ({details})",
            address=address,
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError("the deadline passed before the server had finished")
    if code == grpc.StatusCode.CANCELLED and details == _CHANNEL_CLOSED:
        return CancelledError("the call was cancelled")
    if code == grpc.StatusCode.CANCELLED:  # by the server, which ends
        return ServerUnreachableError(f"the server at {address} ended the call ({details})", address=address)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:  # by gRPC itself, which knows no reasons
        return InvalidArgumentError(f"the server refused the request for its size: {details}")
    return InternalError(f"the call failed with {code.name}: {details}", code=code.name)


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """Whether a server takes calls. phase: what it does while it starts; "" where it does not, or nobody answers."""

    serving: bool
    phase: str = ""


MOST_ATTEMPTS = 4
_FIRST_S, _LONGEST_S = 0.1, 1.0
_CHANNEL_CLOSED = "Channel closed!"
"""gRPC's words where another thread closed the channel."""
_NO_CONNECTION = "failed to connect"
"""How gRPC's words begin where nobody listens. It tries no other connection for a second, so all calls fail by then."""

ResponseT = TypeVar("ResponseT")


class BlockingWire:
    """How one waits, which is all that differs between threads and coroutines: here calls block the thread that makes
    them, so that a coroutine over it never suspends, and `finish` runs it."""

    channel: Any
    """grpc.Channel or grpc.aio.Channel."""

    def __init__(self, address: str, encryption: grpc.ChannelCredentials | None) -> None:
        self.channel = _channel(grpc, address, encryption)
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, _end, self.channel, self._streams, os.getpid())

    def watched(self, call: Any) -> Any:
        """A call with many responses, which has begun: it has ended before the process does."""
        self._streams.add(call)
        return call

    async def reply(self, send: Any, request: Any, **how: Any) -> tuple[Any, Any]:
        """The one response to a request, and the metadata behind it. Raises grpc.RpcError."""
        response, call = send.with_call(request, **how)
        return response, call.trailing_metadata()

    async def next(self, call: Any) -> Any:
        """The next response of a stream, None behind the last one. Raises grpc.RpcError, CancelledError."""
        return next(call, None)

    async def sleep(self, seconds: float, cancelled: threading.Event) -> None:
        """Waits; a blocking one no longer than until that is set."""
        cancelled.wait(seconds)

    async def close(self) -> None:
        """Closes the channel."""
        self.channel.close()


class AsyncWire(BlockingWire):
    """The same for one event loop."""

    def __init__(self, address: str, encryption: grpc.ChannelCredentials | None) -> None:
        self.channel = _channel(aio, address, encryption)

    def watched(self, call: Any) -> Any:
        return call

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


_END_S = 5.0


def _end(channel: grpc.Channel, streams: weakref.WeakSet[Any], process: int) -> None:
    """Closes a channel that nobody holds, or whose process ends, and waits until gRPC's thread has left its streams.

    Of a process that ends with one, gRPC frees it while that thread, which stands still by then, may have its lock: the
    process would wait for ever.
    """
    if os.getpid() != process:  # which was forked, without that thread
        return
    running = [(call, threading.Event()) for call in streams]
    waits = [ended for call, ended in running if call.add_callback(ended.set)]
    channel.close()
    for each in waits:
        each.wait(_END_S)


def _channel(kind: Any, address: str, encryption: grpc.ChannelCredentials | None) -> Any:
    if encryption is None:
        return kind.insecure_channel(address, CHANNEL_OPTIONS)
    return kind.secure_channel(address, encryption, CHANNEL_OPTIONS)


class Repeats:
    """Counts how often one call was made. patience_s: how long it is repeated where the server says when.

    gRPC would repeat by itself. But where a server dies while its retries have a stream in hand, that stream may never
    end, not even at its deadline (grpcio 1.85: after one in 10 to 20 killed servers, six streams at a time).
    """

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

    def __init__(self, wire: BlockingWire, start: Callable[[float | None], Any], repeats: Repeats) -> None:
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
                if self._cancelled.is_set() and isinstance(failed, ServerUnreachableError):
                    raise CancelledError("the call was cancelled") from None
            except asyncio.CancelledError:  # of what reads, or by gRPC's account of the call, by `cancel`
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
                raise CancelledError("the call was cancelled")
            self._call = self._start(self._repeats.left_s)
            if self._cancelled.is_set():  # meanwhile, which ended the call before only
                self._call.cancel()
