"""gRPC through the front door: messages pass as bytes; the first one of a caller says where to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
from grpc import aio

from decode_engine.errors import EngineCrashedError, NotReadyError
from decode_engine.processes.cluster.tries import (
    ELSEWHERE,
    MANY_MESSAGES,
    MOVED_ON,
    Asked,
    Tries,
    asked_by_rpc,
)
from decode_engine.rpc.routing.router import Replica
from decode_engine.rpc.transport.calls import AbortError, Call
from decode_engine.rpc.transport.status import error_info
from index_store.errors import InvalidArgumentError

_CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # a stream that its retries have in hand may never end where a server dies
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),  # a replica whose machine is gone ends its calls
    ("grpc.keepalive_timeout_ms", 20_000),
]
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_UNSENT = "failed to connect"
"""How gRPC's words begin where nobody took the call."""
_OF_ONE = frozenset({"/sparsekv.v1.GenerationService/Drain"})


class GrpcForwarding(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """All methods of all services, behind a `Gate`, which bounds what callers hold. begin: begins a call."""

    def __init__(self, begin: Callable[[Asked, str, float | None], Tries]) -> None:
        self._begin = begin
        self._channels: dict[str, aio.Channel] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method: a stream in and out, of which one message is a case."""
        return grpc.stream_stream_rpc_method_handler(cast(Any, self._forward), bytes, bytes)

    async def close(self) -> None:
        """Ends what is open to replicas."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    def _channel(self, replica: Replica) -> aio.Channel:
        if replica.grpc not in self._channels:
            self._channels[replica.grpc] = aio.insecure_channel(replica.grpc, _CHANNEL)
        return self._channels[replica.grpc]

    async def _forward(self, requests: AsyncIterator[bytes], call: Call) -> None:
        path = call.call_name
        if path in _OF_ONE:
            raise InvalidArgumentError(
                "a cluster is drained by `ops/cluster down`; to drain one server, call it at its own address"
            )
        metadata = [pair for pair in call.context.invocation_metadata() or () if pair[0] != "user-agent"]
        shown = {name: value for name, value in metadata if isinstance(value, str)}
        many = path.rpartition("/")[2] in MANY_MESSAGES
        first = await anext(requests, None)
        if first is None:
            raise InvalidArgumentError("the call has no message, expected one")
        left_s = None if call.deadline_s is None else call.deadline_s - time.monotonic()
        with self._begin(asked_by_rpc(path, first, shown), shown.get("authorization", ""), left_s) as tries:
            relay = _Relay(path, first, requests if many else None, metadata, call)
            while not await relay.run(self._channel(await tries.next()), tries):
                pass


class _Relay:
    """One call, which begins anew at another replica as long as nothing of it has been told."""

    def __init__(
        self,
        path: str,
        first: bytes,
        rest: AsyncIterator[bytes] | None,
        metadata: list[tuple[str, Any]],
        caller: Call,
    ) -> None:
        self._path, self._first, self._rest = path, first, rest
        self._metadata, self._caller = metadata, caller
        self._first_taken = False

    async def run(self, channel: aio.Channel, tries: Tries) -> bool:
        """Whether the call has ended; else the next replica is to be asked."""
        left_s = self._caller.context.time_remaining()
        # Bytes as they are. Where gRPC fails to write to a stream, it loses why that ended: one message is no stream.
        kind: Any = channel.unary_stream if self._rest is None else channel.stream_stream
        sent = self._first if self._rest is None else self._sending(self._rest)
        call = kind(self._path, None, None)(sent, timeout=left_s, metadata=aio.Metadata(*self._metadata))
        try:
            async for piece in call:
                await self._caller.write(piece)
            self._caller.context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
            return True
        except aio.AioRpcError as error:
            return await self._end(error, tries)
        finally:
            call.cancel()

    async def _sending(self, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield self._first
        self._first_taken = True  # what comes behind it is not kept
        async for message in rest:
            yield message

    async def _end(self, error: aio.AioRpcError, tries: Tries) -> bool:
        info = error_info(error)
        reason = "" if info is None else info.reason
        unsent = info is None and (error.details() or "").startswith(_UNSENT)
        lost = unsent or (info is None and error.code() in _LOST and not self._path.startswith("/grpc."))
        if not self._caller.begun and (self._rest is None or not self._first_taken):
            again = tries.asked.repeatable or unsent or reason in MOVED_ON - {"ENGINE_CRASHED"}
            if (lost or reason in MOVED_ON) and again and tries.failed():
                return False
            if reason in ELSEWHERE and tries.absent():
                return False
        if lost:
            if unsent:
                raise NotReadyError("no replica takes the call; try again later")
            raise EngineCrashedError("the replica stopped before the answer was complete; ask again")
        self._caller.context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
        raise AbortError(error.code(), error.details() or "")
