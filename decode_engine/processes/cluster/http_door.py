"""HTTP through the front door: a request's body is read, and its answer passed on as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

import aiohttp
from starlette.types import Receive, Scope, Send
from yarl import URL

from decode_engine.errors import EngineCrashedError, TooManyRequestsError
from decode_engine.gateway.exchange import (
    Bounds,
    HttpError,
    bounded_receive,
    check_length,
    end_tasks,
    failure,
    refusal,
)
from decode_engine.gateway.wire.reply_structs import JsonReply, event
from decode_engine.processes.cluster.tries import ELSEWHERE, MOVED_ON, Tries, asked_by_http
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import SparseKVError
from index_store.jobs.uploads import MOST_DOCUMENT_BYTES

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
)
_NOT_PASSED = _HOP_BY_HOP | {"host", "content-length", "expect"}
_FORM_BYTES = 2**16
"""Of a form around a file."""
_BODY_S = 600.0
_PIECE_BYTES = 2**16
_EVENTS = "text/event-stream"

logger = logging.getLogger(__name__)


class HttpForwarding:
    """The application. begin: begins a call. serving: whether there is a replica."""

    def __init__(
        self,
        begin: Callable[..., Tries],
        session: aiohttp.ClientSession,
        serving: Callable[[], bool],
        bounds: Bounds,
    ) -> None:
        self._begin, self._session, self._serving, self._bounds = begin, session, serving, bounds
        self._open = self._body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        held = 0
        try:
            if scope["path"] in ("/health", "/live"):
                await _say(self._health(scope["path"]), scope, receive, send)
                return
            if self._open > self._bounds.requests:
                raise TooManyRequestsError(f"{self._open - 1} requests are open here, which is the limit")
            upload = scope["path"] == "/v1/files"
            most = MOST_DOCUMENT_BYTES + _FORM_BYTES if upload else MAX_REQUEST_BYTES
            check_length(dict(scope["headers"]).get(b"content-length", b"").decode("latin-1"), most)
            coming, pieces = bounded_receive(receive, most, _BODY_S), []
            while True:
                message = await coming()
                pieces.append(message.get("body", b""))
                held += len(pieces[-1])
                self._body_bytes += len(pieces[-1])
                if self._body_bytes > self._bounds.body_bytes:
                    raise TooManyRequestsError(
                        "the bodies of open requests are too large together; try again later"
                    )
                if not message.get("more_body"):
                    break
            await self._until_gone(scope, receive, send, b"".join(pieces))
        except (SparseKVError, HttpError) as error:
            await _say(refusal(error), scope, receive, send)
        finally:
            self._open -= 1
            self._body_bytes -= held

    def _health(self, path: str) -> JsonReply:
        if path == "/live" or self._serving():
            return JsonReply({"status": "ok"})
        return JsonReply({"status": "starting", "phase": "wait for a replica"}, status_code=503)

    async def _until_gone(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        task = asyncio.ensure_future(self._forward(scope, send, body))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            await end_tasks(task, gone)

    async def _forward(self, scope: Scope, send: Send, body: bytes) -> None:
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        shown = dict(headers)
        passed = [(name, value) for name, value in headers if name not in _NOT_PASSED]
        target = scope["raw_path"].decode("latin-1") if scope.get("raw_path") else scope["path"]
        query = scope["query_string"].decode("latin-1")
        asked = asked_by_http(scope["method"], target, shown, body)
        with self._begin(asked, shown.get("authorization", "")) as tries:
            while True:
                replica = await tries.next()
                url = f"{replica.http}{target}{'?' + query if query else ''}"
                if await _Answer(send).run(self._session, scope["method"], url, passed, body, tries):
                    return


async def _say(reply: JsonReply, scope: Scope, receive: Receive, send: Send) -> None:
    """What no replica says."""
    reply.headers["x-request-id"] = secrets.token_hex(8)
    await reply(scope, receive, send)


class _Answer:
    """One replica's answer to a request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def run(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: bytes,
        tries: Tries,
    ) -> bool:
        """Whether the request has been answered; else the next replica is to be asked. Raises EngineCrashedError."""
        try:
            async with session.request(
                method, URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
            ) as reply:
                if reply.content_type == _EVENTS:
                    await self._stream(reply)
                    return True
                whole = await reply.read()
                if _again(reply, whole, tries):
                    return False
                await self._say_head(reply)
                await self._send({"type": "http.response.body", "body": whole})
                return True
        except (aiohttp.ClientError, ConnectionError) as error:
            logger.info("a replica's answer ended early: %s", error)
            crashed = EngineCrashedError("the replica stopped before the answer was complete; ask again")
            if self._begun:
                await self._send({"type": "http.response.body", "body": event(failure(crashed)[1])})
                return True
            unsent = isinstance(error, aiohttp.ClientConnectorError)
            if (tries.asked.repeatable or unsent) and tries.failed():
                return False
            raise crashed from error

    async def _say_head(self, reply: aiohttp.ClientResponse) -> None:
        self._begun = True
        head = [(name.lower(), value) for name, value in reply.raw_headers]
        passed = [(name, value) for name, value in head if name.decode("latin-1") not in _HOP_BY_HOP]
        await self._send({"type": "http.response.start", "status": reply.status, "headers": passed})

    async def _stream(self, reply: aiohttp.ClientResponse) -> None:
        """What comes, as it comes. The head waits for the first bytes: until then another replica may be asked."""
        async for piece in reply.content.iter_any():
            if not self._begun:
                await self._say_head(reply)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        if not self._begun:
            await self._say_head(reply)
        await self._send({"type": "http.response.body", "body": b""})


def _again(reply: aiohttp.ClientResponse, body: bytes, tries: Tries) -> bool:
    """Whether an answer is a refusal that another replica may not give."""
    if reply.status < 400:
        return False
    try:
        told: Any = json.loads(body)
        reason = str(told["error"]["code"]).upper()
    except (ValueError, TypeError, KeyError):
        return False
    if reason in MOVED_ON and (tries.asked.repeatable or reason != "ENGINE_CRASHED"):
        return tries.failed()
    return reason in ELSEWHERE and tries.absent()
