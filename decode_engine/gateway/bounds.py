"""HTTP connections with an end: for heads that do not come, answers that are not read, and more than there may be."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from decode_engine.gateway.failures import HttpError, refusal

HEAD_BYTES = 64 * 2**10
"""Of the head of a request."""


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


class BoundedConnection(H11Protocol):
    """One connection. The server below knows no end of its own but the time between two requests."""

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections:
            transport.abort()
        else:
            self._head = self.loop.call_later(self._bounds.head_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request. The time of its head begins with the first of them."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head = _stop(self._head)
        elif self._head is None and self.cycle is not None and self.cycle.response_complete:
            self._head = self.loop.call_later(self._bounds.head_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Tells in the shape of all errors what is wrong with a head."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        why = f"the head of the request is no HTTP: {str(error or msg)[:200]}"
        if status == 431:
            why = f"the head of the request has more than {HEAD_BYTES} bytes, which is the limit; shorten it"
        reply = refusal(HttpError(status, why, "head_too_large" if status == 431 else "invalid_head"))
        headers = [*reply.raw_headers, (b"connection", b"close")]
        events = (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=bytes(reply.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """An answer has been sent. What is left of the body nobody reads: it gets as long as a head."""
        super().on_response_complete()
        cycle = self.cycle

        def end() -> None:
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.transport.abort()

        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(self._bounds.head_s, end)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._head, self._unread = _stop(self._head), _stop(self._unread)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._bounds.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._unread = _stop(self._unread)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for a while; what was not read by now never will be."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._bounds.unread_s, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Nothing, which takes the timer's place."""
    if timer is not None:
        timer.cancel()
    return None
