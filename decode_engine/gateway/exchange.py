"""One request and its response: who asks, a body within bounds, errors, an answer that ends when its client is gone."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message as ProtoMessage
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from decode_engine.errors import CancelledError, PromptTooLongError
from decode_engine.gateway.wire.parameters import Endpoint, Reading
from decode_engine.gateway.wire.reply_structs import ErrorDetails, ErrorReply, JsonReply
from decode_engine.rpc.client.verbs import METHODS, Call, Verbs
from decode_engine.rpc.door.access import UnauthenticatedError
from decode_engine.rpc.server import GrpcDoor
from decode_engine.rpc.transport.asker import Asker
from decode_engine.rpc.transport.calls import LARGE_BYTES
from decode_engine.rpc.transport.status import CODES, reason_of, retry_after
from decode_engine.rpc.transport.work import forget_error
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import ContextNotFoundError, InvalidArgumentError, SparseKVError

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "DATA_LOSS": 500,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
_REPEATABLE = frozenset({"SHUTTING_DOWN"})
"""Reasons that waiting may mend, although nobody says how long. OpenAI's clients repeat others, too, unless told."""
_PARTICULAR = {"STORE_FULL": 507, "STORE_BOUND_REACHED": 507}
"""Reasons that HTTP has a better word for than for their code."""


class HttpError(Exception):
    """A request that HTTP itself refuses. headers: of the response."""

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


def status_of_reason(reason: str) -> int:
    """The HTTP status of a reason; 500 for one that is unknown."""
    code = CODES.get(reason)
    return _PARTICULAR.get(reason) or (500 if code is None else _STATUSES[code.name])


def failure(error: SparseKVError | HttpError) -> tuple[int, ErrorReply]:
    if isinstance(error, HttpError):
        return error.status, _body(error.status, error.message, None, error.code)
    status = status_of_reason(reason_of(error))
    code = reason_of(error).lower()
    if isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
    elif isinstance(error, UnauthenticatedError):
        code = "invalid_api_key"
    message, param = error.message, error.metadata.get("field")
    if isinstance(error, ContextNotFoundError):
        param = "context"
    return status, _body(status, message, param, code)


def refusal(error: SparseKVError | HttpError) -> JsonReply:
    status, body = failure(error)
    headers = {"x-should-retry": "false"}
    if isinstance(error, SparseKVError):
        delay = retry_after(error)
        if delay is not None:
            headers["retry-after"] = str(math.ceil(delay))
            headers["retry-after-ms"] = str(math.ceil(delay * 1000))
        if delay is not None or error.reason in _REPEATABLE:
            headers["x-should-retry"] = "true"
    else:
        headers |= error.headers
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonReply(body, status_code=status, headers=headers)


def _body(status: int, message: str, param: str | None, code: str) -> ErrorReply:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorReply(ErrorDetails(message, kind, param, code))


ResultT = TypeVar("ResultT")

_OPEN_PATHS = frozenset({"/health", "/live", "/", "/page.css", "/page.js"})
_BODY_S = 20.0
"""How long a body may take to arrive, or the next piece of a file."""
_MOST_TOLD = 40
"""Names in a header."""
_SILENCE_S = 15.0
"""After which a stream without news gets a comment, so that nobody in between gives up."""
_LAST_WORDS_S = 0.5
"""For a client to take the events that end its stream."""
_SERVER_ERROR = 500
CERTIFICATE = "sparsekv.certificate"
"""Of a connection's state: the name in the certificate that its client showed."""
CLIENT_GONE = 499
"""As proxies log it; nobody sees it."""


async def read_json(request: Request, read: Callable[[Any], ResultT]) -> ResultT:
    """What is read of a body of JSON; of a large one by another thread, since all clients would wait for it.

    Raises HttpError for one that is too large or late, TooManyRequestsError where others hold too much,
    InvalidArgumentError for what is no JSON in UTF-8, and what `read` raises.
    """
    data = await _read_body(request)
    if len(data) > LARGE_BYTES:
        return await exchange_of(request).run(lambda: read(parse_json(data)))
    return read(parse_json(data))


async def read_given(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    """What a body gives of an endpoint's parameters; the response tells which do nothing. Raises as `read_json`."""
    reading = Reading()
    given = await read_json(request, lambda body: endpoint.read(body, reading))
    tell(request, "taken", tuple(reading.taken))
    return given


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8, all of whose texts can be written as such. Raises InvalidArgumentError."""
    collecting = gc.isenabled()
    gc.disable()  # many small lists would have it go through all of them again and again, seconds for a few MiB
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the body is no JSON: {error}") from error
    finally:
        if collecting:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may make the gateway hold.

    connections: at once. requests: at once. body_bytes: of open requests together. head_s: how long the head of a
    request may take. unread_s: how long an answer may lie unread. idle_s: of a connection between two requests.
    """

    connections: int = 1024
    requests: int = 240
    body_bytes: int = 2**28
    head_s: float = 20.0
    unread_s: float = 60.0
    idle_s: float = 30.0

    def beside(self, places: int) -> Bounds:
        """The same for others than so many requests that may be running or waiting."""
        return replace(self, connections=places + self.connections, requests=places + self.requests)


class Exchange(Asker):
    """Who asks over HTTP, and what is known of the request and its response. beside: whose answers these are, too.

    open: no token is asked for. begun: the response has begun. told: further headers of it. said: why it is an error.
    """

    def __init__(self, scope: Scope, send: Send, beside: GrpcDoor, hold: Callable[[int], None]) -> None:
        """hold: counts bytes that bodies of open requests have. Raises TooManyRequestsError."""
        host, port = scope["client"] or ("", 0)
        shown = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        super().__init__(beside.listener.work, f"http:{host}:{port}", shown)
        self.note(peer=f"{host}:{port}")
        self.beside = beside
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.open = self.path in _OPEN_PATHS
        self.audit = None if self.open else beside.audit
        self.said = ""
        self.begun = False
        self.told: dict[str, str] = {}
        self._certificate: str = scope.get("state", {}).get(CERTIFICATE, "")
        self._hold = hold
        self._body_bytes = 0
        self._status = 0
        self._send = send

    def certificate(self) -> str:
        return self._certificate

    def hold(self, nbytes: int) -> None:
        """Counts bytes of its body. Raises TooManyRequestsError."""
        self._hold(nbytes)
        self._body_bytes += nbytes

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            self._status = message["status"]
            told = {"x-request-id": self.id, **self.told}
            headers = ((name.encode(), value.encode()) for name, value in told.items())
            message["headers"] = [*message["headers"], *headers]
        await self._send(message)

    def end(self) -> None:
        """It is over: one line about what became of it; none of a health check."""
        super().end()
        self._hold(-self._body_bytes)
        level = logging.DEBUG if self.open else logging.INFO
        if self.span is not None:
            self.note(status=self._status)
        error = str(self._status) if self._status >= _SERVER_ERROR else ""
        self.log(f"{self.method} {ascii(self.path[:200])[1:-1]}", str(self._status), self.said, level, error)


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.state.exchange
    return exchange


class LocalVerbs(Verbs):
    """The client's verbs, answered by the services here. Raises NotReadyError, and what their handlers raise."""

    def __init__(self, request: Request) -> None:
        self._exchange = exchange_of(request)

    async def run(self, call: Call[ResultT]) -> ResultT:
        service = METHODS[call.method].containing_service.full_name
        handler = getattr(self._exchange.beside.served.services[service], call.method)
        sent = call.request if isinstance(call.request, ProtoMessage) else _each(call.request)
        return call.read(await handler(sent, self._exchange))


async def _each(parts: Iterable[ResultT]) -> AsyncIterator[ResultT]:
    for part in parts:
        yield part


def tell(request: Request, name: str, values: Sequence[str]) -> None:
    """Has the response say something in a header `x-sparsekv-NAME`, whatever it is."""
    said = [value.strip() for value in values[:_MOST_TOLD] if value.isascii() and value.isprintable()]
    if any(said):
        exchange_of(request).told[f"x-sparsekv-{name}"] = ", ".join(filter(None, said))


async def _read_body(request: Request) -> bytes:
    pieces: list[bytes] = []
    left = MAX_REQUEST_BYTES
    unpack = _unpacking(request.headers.get("content-encoding", "identity"))
    check_length(request.headers.get("content-length", ""), MAX_REQUEST_BYTES)
    bounded = Request(request.scope, bounded_receive(request.receive, MAX_REQUEST_BYTES, _BODY_S))
    try:
        async for packed in bounded.stream():
            piece = unpack(packed, left + 1)
            left -= len(piece)
            if left < 0:
                raise _too_large(MAX_REQUEST_BYTES)
            exchange_of(request).hold(len(piece))
            pieces.append(piece)
    except zlib.error as error:
        raise InvalidArgumentError(f"the body is not what its content-encoding says: {error}") from error
    return b"".join(pieces)


def check_length(declared: str, most_bytes: int) -> None:
    """Raises HttpError for a body that says in its head that it is too large: nothing of it is waited for."""
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> HttpError:
    return HttpError(
        413, f"the body has more than {most_bytes} bytes, which is the limit; shorten it", "body_too_large"
    )


def _unpacking(encoding: str) -> Callable[[bytes, int], bytes]:
    """What unpacks the pieces of a body, each to at most so many bytes. Raises HttpError for other encodings."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda piece, most: piece
    if name not in ("gzip", "x-gzip", "deflate"):
        raise HttpError(
            415,
            f"content-encoding is {ascii(encoding)[:60]}, expected gzip, deflate, or none",
            "unsupported_content_encoding",
            {"accept-encoding": "gzip, deflate"},
        )
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32 if "gzip" in name else zlib.MAX_WBITS).decompress


def bounded_receive(receive: Receive, most_bytes: int, seconds: float) -> Receive:
    """A body in pieces. Raises HttpError for too much or too late, CancelledError where the client goes before."""
    total, until = 0, time.monotonic() + seconds

    async def bounded() -> Message:
        nonlocal total
        try:
            async with asyncio.timeout(min(_BODY_S, until - time.monotonic())):
                message = await receive()
        except TimeoutError as error:
            late = f"nothing of the body came for {_BODY_S:g} s, or not all of it in {seconds:g} s"
            raise HttpError(408, f"{late}; send it with the request", "body_too_late") from error
        if message["type"] == "http.disconnect":
            raise CancelledError("the client went before all of its request was here")
        total += len(message.get("body", b""))
        if total > most_bytes:
            raise _too_large(most_bytes)
        return message

    return bounded


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """The work's result; None where the client went before, which cancels the work. The body has been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        await end_tasks(task, gone)


class EventStream(Response):
    """Server-sent events from a generator of them, until it ends or the client is gone.

    While it has nothing to say, comments are sent. release: runs at the end, whether or not anything was sent.
    last_words: the events that end it where this process is told to stop before.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        release: Callable[[], Coroutine[Any, Any, None]],
        last_words: Callable[[], bytes] = bytes,
    ) -> None:
        self._events = events
        self._release = release
        self._last_words = last_words
        self._begun = self._ended = False
        self._said_s = 0.0
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                scope["state"]["exchange"].note(ended=CancelledError.reason)
        except asyncio.CancelledError:  # the server's grace is over
            await end_tasks(task)
            if self._begun and not self._ended:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._say_last(send)
            raise
        finally:
            await end_tasks(task, gone)
            await self._release()

    async def _say_last(self, send: Send) -> None:
        if words := self._last_words():
            await send({"type": "http.response.body", "body": words, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._begun, self._said_s = True, loop.time()
            comments = asyncio.ensure_future(self._comment(send))
            comments.add_done_callback(forget_error)  # a connection is gone, which the next event meets, too
            try:
                async for data in events:
                    self._said_s = loop.time()
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                comments.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self._ended = True

    async def _comment(self, send: Send) -> None:
        """Sends a comment wherever nothing else was sent for a while. Every sending is of whole events."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._said_s + _SILENCE_S - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                self._said_s = loop.time()
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels those that are not done, and waits for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
