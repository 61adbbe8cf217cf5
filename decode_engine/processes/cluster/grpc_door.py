"""gRPC through the front door: messages pass as bytes; the first one of a caller says where to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
from grpc import aio

from decode_engine.errors import EngineCrashedError, NotReadyError
from decode_engine.processes.cluster.asked import MANY_MESSAGES, asked_by_rpc
from decode_engine.processes.cluster.tries import ELSEWHERE, MOVED_ON, Tries
from decode_engine.rpc.routing.router import Replica
from decode_engine.rpc.transport.status import code_of, error_info, to_trailers
from index_store.errors import InvalidArgumentError, SparseKVError

_CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # a stream that its retries have in hand may never end where a server dies
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
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

logger = logging.getLogger(__name__)


class GrpcForwarding(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """All methods of all services. tries: begins a call."""

    def __init__(self, begin: Any) -> None:
        self._begin = begin
        self._channels: dict[str, aio.Channel] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method: a stream in and out, of which one message is a case."""
        path = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
            await self._forward(path, requests, context)

        return grpc.stream_stream_rpc_method_handler(cast(Any, forward))

    async def close(self) -> None:
        """Ends what is open to replicas."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    def _channel(self, replica: Replica) -> aio.Channel:
        if replica.grpc not in self._channels:
            self._channels[replica.grpc] = aio.insecure_channel(replica.grpc, _CHANNEL)
        return self._channels[replica.grpc]

    async def _forward(
        self, path: str, requests: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]
    ) -> None:
        metadata = [pair for pair in context.invocation_metadata() or () if pair[0] != "user-agent"]
        shown = {name: value for name, value in metadata if isinstance(value, str)}
        many = path.rpartition("/")[2] in MANY_MESSAGES
        try:
            first = await anext(requests)
        except StopAsyncIteration:
            await _abort(context, InvalidArgumentError("the call has no message, expected one"))
        if path in _OF_ONE:
            why = (
                "a cluster is drained by `ops/cluster down`; to drain one server, call it at its own address"
            )
            await _abort(context, InvalidArgumentError(why))
        asked = asked_by_rpc(path, first, shown)
        with self._begin(asked, shown.get("authorization", "")) as tries:
            relay = _Relay(path, first, requests if many else None, metadata, context)
            while True:
                try:
                    replica = await tries.next()
                except SparseKVError as error:
                    await _abort(context, error)
                if await relay.run(self._channel(replica), tries):
                    return


class _Relay:
    """One call, which begins anew at another replica as long as nothing of it has been told."""

    def __init__(
        self,
        path: str,
        first: bytes,
        rest: AsyncIterator[bytes] | None,
        metadata: list[tuple[str, Any]],
        context: aio.ServicerContext[bytes, bytes],
    ) -> None:
        self._path, self._first, self._rest = path, first, rest
        self._metadata, self._context = metadata, context
        self._begun = False

    async def run(self, channel: aio.Channel, tries: Tries) -> bool:
        """Whether the call has ended; else the next replica is to be asked."""
        left_s = self._context.time_remaining()
        start: Any = channel.stream_stream(self._path, None, None)  # bytes as they are
        call = start(self._sending(), timeout=left_s, metadata=aio.Metadata(*self._metadata))
        try:
            async for piece in call:
                if not self._begun:
                    self._begun = True
                    await self._context.send_initial_metadata(tuple(await call.initial_metadata() or ()))
                await self._context.write(piece)
            self._context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
            return True
        except aio.AioRpcError as error:
            return await self._end(error, tries)
        finally:
            call.cancel()

    async def _sending(self) -> AsyncIterator[bytes]:
        yield self._first
        if self._rest is not None:
            async for message in self._rest:
                yield message

    async def _end(self, error: aio.AioRpcError, tries: Tries) -> bool:
        info = error_info(error)
        reason = "" if info is None else info.reason
        lost = info is None and error.code() in _LOST and not self._path.startswith("/grpc.")
        unsent = lost and (error.details() or "").startswith(_UNSENT)
        if not self._begun and self._rest is None:
            again = tries.asked.repeatable or unsent or reason in MOVED_ON - {"ENGINE_CRASHED"}
            if (lost or reason in MOVED_ON) and again and tries.failed():
                return False
            if reason in ELSEWHERE and tries.absent():
                return False
        if lost:
            stopped = "the replica stopped before the answer was complete; ask again"
            refused = "no replica takes the call; try again later"
            await _abort(self._context, NotReadyError(refused) if unsent else EngineCrashedError(stopped))
        trailing: Any = tuple(error.trailing_metadata() or ())
        await self._context.abort(error.code(), error.details() or "", trailing)
        raise AssertionError("abort raises")


async def _abort(context: aio.ServicerContext[bytes, bytes], error: SparseKVError) -> None:
    await context.abort(code_of(error), error.message, to_trailers(error))
