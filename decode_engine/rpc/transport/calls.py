"""Every call, from its first byte to its log line: bounded, timed, turned into a status, logged.

The gate stands before all services, health and reflection included. It takes every handler over as one that reads and
writes single messages, which looks the same on the wire, so that a call whose message does not come, or whose answer
nobody reads, is a wait with an end and not a handler that hangs. Handlers get a `Call` in place of gRPC's context.

A call may wait for its client twice, for its message and for the answer to be read; `Stalls` bounds both. Who is
given up while a message of the server lies unread cannot be told so, because the status stands behind that message
in HTTP/2's flow control; its call stays with the transport until the client reads, resets the stream or goes away.
`Abandoned` bounds how many there are, by ending connections.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from decode_engine.errors import CancelledError, DeadlineExceededError, UnfinishedCallError, UnreadAnswerError
from decode_engine.rpc.door.access import Door, Sharing
from decode_engine.rpc.door.audit import AuditLog
from decode_engine.rpc.door.rights import admit
from decode_engine.rpc.transport.asker import Asker, endpoint_of, plain_address
from decode_engine.rpc.transport.status import Paths, code_of, reason_of, to_trailers
from decode_engine.rpc.transport.work import SPARE, BlockingWork, forget_error
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.cli.traces import Traces
from index_store.errors import InvalidArgumentError

_HANDLES = Path("/proc/self/fd")


class Stalls:
    """Waits for clients: at most `limit` at once, each of at most `seconds`. One too many ends the longest one."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._waits: dict[asyncio.Future[None], float] = {}  # when each ends at the latest, the oldest first
        self._timer: asyncio.TimerHandle | None = None  # for all: messages are sent more often than late

    def __len__(self) -> int:
        return len(self._waits)

    async def wait(self, task: asyncio.Future[Any]) -> bool:
        """Whether the task was done in time. It goes on otherwise; nobody sees what it raises then."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(done: asyncio.Future[Any]) -> None:
            forget_error(done)
            if not waiter.done():
                waiter.set_result(None)

        task.add_done_callback(wake)
        self._waits[waiter] = loop.time() + self._seconds
        if len(self._waits) > self._limit:
            self._give_up(next(iter(self._waits)))
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._end_late_ones)
        try:
            await waiter
        finally:
            self._waits.pop(waiter, None)
        return task.done()

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        del self._waits[waiter]
        if not waiter.done():
            waiter.set_result(None)

    def _end_late_ones(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waits and (oldest := next(iter(self._waits.items())))[1] <= loop.time():
            self._give_up(oldest[0])
        self._timer = None
        if self._waits:
            self._timer = loop.call_at(next(iter(self._waits.values())), self._end_late_ones)


class Abandoned:
    """Calls that ended here and not yet for their clients: at most `limit`.

    One too many ends the connection that has most of them: a client, or a proxy, that keeps reading nothing.
    """

    def __init__(self, limit: int, hang_up: Callable[[str], object]) -> None:
        self._limit = limit
        self._hang_up = hang_up
        self._peers: dict[asyncio.Future[Any], str] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: str, ending: asyncio.Future[Any]) -> None:
        """Takes in a call of a peer that is over when `ending` is done."""
        self._peers[ending] = peer
        ending.add_done_callback(self._remove)
        if len(self._peers) > self._limit:
            ((worst, _),) = Counter(self._peers.values()).most_common(1)
            self._peers = {task: other for task, other in self._peers.items() if other != worst}
            self._hang_up(worst)

    def _remove(self, ending: asyncio.Future[Any]) -> None:
        forget_error(ending)
        self._peers.pop(ending, None)


def hang_up(peer: str) -> bool:
    """Ends the connection of a peer, `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`. False where it is not found.

    gRPC's Python server can neither reset a stream nor close a connection. The sockets are this process's own, though,
    and shutting one down has gRPC clean up behind it. Does nothing where the system does not list a process's sockets.
    """
    wanted = endpoint_of(peer)
    if wanted is None or not _HANDLES.is_dir():
        return False
    for entry in os.listdir(_HANDLES):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            copy = os.dup(int(entry))  # names the same connection, whatever becomes of the number
        except OSError:
            continue
        with socket.socket(fileno=copy) as connection:
            try:
                host, port = connection.getpeername()[:2]
                if (plain_address(host), port) == wanted:
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
            except (OSError, ValueError):  # not connected, or no Internet address
                continue
    return False


logger = logging.getLogger(__name__)

_LONGEST_DEADLINE_S = 10 * 365 * 86400.0
_OPEN_SERVICE = "/grpc.health.v1.Health/"  # for whoever looks whether the server is up
_QUIET = ("OK", CancelledError.reason)  # as health checks end, one every few seconds
LARGE_BYTES = 2**16  # of a message whose parsing others would wait for


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may make the server hold.

    connections: at once. streams: calls at once on one connection. idle_s: of a connection without calls.
    message_s, unfinished: how long a call may wait for its message, and how many at once. unread_s, unread: how long an
    answer may wait to be read, and how many at once. abandoned: calls given up, whose clients have not been told.
    waiting: calls that wait for a thread.
    """

    connections: int = 4096
    streams: int = 256
    idle_s: float = 300.0
    message_s: float = 20.0
    unfinished: int = 64
    unread_s: float = 60.0
    unread: int = 128
    abandoned: int = 128
    waiting: int = SPARE

    def of_one(self, sharing: Sharing) -> Limits:
        """Those of one of several doors, which have these together; what takes no more than its time, beside as many as
        there are places: requests that come at once wait for each other."""
        places = sharing.places
        return replace(
            self,
            connections=sharing.part(self.connections),
            unfinished=places + sharing.part(self.unfinished),
            unread=places + sharing.part(self.unread),
            abandoned=sharing.part(self.abandoned),
            waiting=places + sharing.part(self.waiting),
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls now: open ones, those whose message has not come, those whose answer waits to be read or never was; and
    lines that the audit log lacks."""

    open: int
    unfinished: int
    unread: int
    unlogged: int


class AbortError(Exception):
    """A handler ends its call with a status of its own, in place of one of the API's errors."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Call(Asker):
    """One call, as its handler sees it. open: a health check."""

    def __init__(self, gate: Gate, name: str, context: Any) -> None:
        shown = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        left_s: float | None = context.time_remaining()
        if left_s is not None and left_s >= _LONGEST_DEADLINE_S:
            left_s = None
        super().__init__(gate.work, context.peer(), shown, left_s)
        self.call_name = name
        self.name = name.rpartition("/")[2]
        self.open = name.startswith(_OPEN_SERVICE)
        self.context = context
        self.serialize: Callable[[Any], bytes] = bytes
        self.begun = False
        self._gate = gate

    def traffic(self) -> Traffic:
        return self._gate.traffic()

    def certificate(self) -> str:
        names = self.context.auth_context().get("x509_common_name", ())
        return next((name.decode("utf-8", "replace") for name in names), "")

    async def write(self, message: Any) -> None:
        """Sends an answer, and returns when the client has room for more. Raises UnreadAnswerError, CancelledError."""
        await self._gate.send(self, message)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """Ends the call. Raises AbortError."""
        raise AbortError(code, details)


class Gate(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before all handlers; see the module."""

    def __init__(
        self,
        limits: Limits,
        paths: Paths,
        door: Door,
        traces: Traces | None = None,
        audit: AuditLog | None = None,
        line: int = logging.INFO,
    ) -> None:
        """line: the level of the line about every call."""
        self._line = line
        self._traces = traces
        self._audit = audit
        self.work = BlockingWork(waiting=limits.waiting)
        self._door = door
        self._limits = limits
        self._paths = paths
        self._open = 0
        self._unfinished = Stalls(limits.unfinished, limits.message_s)
        self._unread = Stalls(limits.unread, limits.unread_s)
        self._abandoned = Abandoned(limits.abandoned, self._hang_up)

    def traffic(self) -> Traffic:
        lost = 0 if self._audit is None else self._audit.lost
        return Traffic(self._open, len(self._unfinished), len(self._unread) + len(self._abandoned), lost)

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        """Takes a call's handler over; called by grpc for every call."""
        handler = await continuation(details)
        if handler is None:
            return None
        name: str = details.method

        async def behaviour(requests: object, context: Any) -> None:
            call = Call(self, name, context)
            call.audit = None if call.open else self._audit
            if self._traces is not None and not call.open:
                call.begin_span(self._traces, name[1:], {"rpc.system": "grpc"})
            await self._serve(call, handler)

        return grpc.stream_stream_rpc_method_handler(behaviour)

    async def _serve(self, call: Call, handler: Any) -> None:
        self._open += 1
        try:
            await self._answer(call, handler)
        except asyncio.CancelledError:
            late = call.deadline_s is not None and time.monotonic() >= call.deadline_s
            self._log(call, (DeadlineExceededError if late else CancelledError).reason)
            raise
        except Exception as error:
            await self._fail(call, error)
        else:
            self._log(call, "OK")
        finally:
            self._open -= 1
            call.end()

    async def _answer(self, call: Call, handler: Any) -> None:
        call.serialize = handler.response_serializer
        if not call.open:
            call.enter(self._door)
            admit(call.caller, call.call_name)
        if handler.request_streaming:
            request: Any = self._requests(call, handler)
        else:
            request = await self._receive(call, handler)
        behaviour = _behaviour(handler)
        if inspect.isasyncgenfunction(behaviour):
            async with aclosing(behaviour(request, call)) as responses:
                async for response in responses:
                    await self.send(call, response)
        else:
            response = await behaviour(request, call)
            if not handler.response_streaming:
                await self.send(call, response)

    async def _requests(self, call: Call, handler: Any) -> AsyncIterator[Any]:
        """The messages of a client that sends several, each of which has to come in time."""
        while (message := await self._receive(call, handler, more=True)) is not None:
            yield message

    async def _receive(self, call: Call, handler: Any, *, more: bool = False) -> Any:
        """The next message; with `more`, None where there is none. Raises UnfinishedCallError, InvalidArgumentError."""
        reading = asyncio.ensure_future(call.context.read())
        if not await self._unfinished.wait(reading):
            raise UnfinishedCallError(
                f"no message came within {self._limits.message_s:g} s, or too many calls waited for theirs; send it "
                "with the call"
            )
        data = reading.result()
        if data is aio.EOF:  # type: ignore[attr-defined]
            if more:
                return None
            raise UnfinishedCallError(
                f"the client ended the call without a message, or sent one of more than {MAX_REQUEST_BYTES} bytes"
            )
        try:
            if len(data) > LARGE_BYTES:
                return await call.run(lambda: handler.request_deserializer(data))
            return handler.request_deserializer(data)
        except DecodeError as error:
            raise InvalidArgumentError(
                f"the message has {len(data)} bytes that are no request of {call.name}: {error}"
            ) from error

    async def send(self, call: Call, message: Any) -> None:
        data = call.serialize(message)
        if not call.begun:  # by itself, so that a status can follow even where the first message lies unread
            call.begun = True
            await self._until_taken(call.context.send_initial_metadata(()))
        await self._until_taken(call.context.write(data))

    async def _until_taken(self, sending: Awaitable[None]) -> None:
        task = asyncio.ensure_future(sending)
        if not await self._unread.wait(task):
            raise UnreadAnswerError(
                f"the answer was not read for {self._limits.unread_s:g} s, or too many others waited to be read"
            )
        try:
            task.result()
        except aio.BaseError as error:
            raise CancelledError("the client ended the call") from error

    async def _fail(self, call: Call, error: Exception) -> None:
        if isinstance(error, AbortError):
            self._log(call, error.code.name, error.details)
            ending = call.context.abort(error.code, error.details)
        else:
            public = call.public(error, self._paths)
            told = public.message if reason_of(public) == "INTERNAL" else str(error)
            self._log(call, reason_of(public), told)
            ending = call.context.abort(code_of(public), public.message, to_trailers(public))
        task = asyncio.ensure_future(ending)
        task.add_done_callback(forget_error)
        await asyncio.sleep(0)  # the call has its status from here on, whether the client takes it or not
        if isinstance(error, UnreadAnswerError) or not await self._unread.wait(task):
            self._abandoned.add(call.peer, task)

    def _hang_up(self, peer: str) -> None:
        logger.warning("ending the connection of %s, which leaves too many answers unread", peer)
        task = asyncio.ensure_future(self.work.run_alone(lambda: hang_up(peer)))
        task.add_done_callback(forget_error)

    def _log(self, call: Call, reason: str, message: str = "") -> None:
        level = logging.DEBUG if call.open and reason in _QUIET else self._line
        error = "" if reason in _QUIET else reason
        call.log(call.name, reason, message, level, error, rpc=call.name, reason=reason)


def _behaviour(handler: Any) -> Any:
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary
