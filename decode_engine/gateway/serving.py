"""The HTTP door: a port on the event loop of the gRPC door, whose connections have an end."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from decode_engine.errors import AddressError
from decode_engine.gateway.app import make_app
from decode_engine.gateway.exchange import CERTIFICATE, Bounds, HttpError, refusal
from decode_engine.rpc.door.options import Certificates, common_name
from decode_engine.rpc.server import GrpcDoor
from decode_engine.settings.config import ServeConfig

HEAD_BYTES = 64 * 2**10
"""Of the head of a request."""


class BoundedConnection(H11Protocol):
    """One connection. The server below knows no end of its own but the time between two requests."""

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if encrypted := transport.get_extra_info("ssl_object"):
            self.app_state = {**self.app_state, CERTIFICATE: common_name(encrypted.getpeercert())}
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
        self._head, self._unread = _stop(self._head), _stop(self._unread)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._bounds.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
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


_BACKLOG = 512
_UNREAD_BYTES = 2**17
"""What the system keeps of an answer that is not read."""


class HttpPort:
    """Serves an application from its making until `stop`. Use as a context manager.

    address: with the port that was found where 0 was asked for.
    """

    def __init__(
        self,
        listen: str,
        app: ASGIApp,
        loop: asyncio.AbstractEventLoop,
        *,
        certificates: Certificates | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008  frozen
        shared: bool = False,
    ) -> None:
        """loop: runs already, on another thread. shared: other processes listen there, too.

        Raises AddressError, CertificateError.
        """
        self._certificates = certificates
        self._bounds = bounds
        config = self._uvicorn_config(app)
        config.load()
        if config.ssl is not None and certificates is not None:
            certificates.renew(config.ssl)
        bound = _bind(listen, shared)
        self.address = f"{listen.rpartition(':')[0]}:{bound.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        serving = self._server.serve(sockets=[bound])
        self._serving = asyncio.run_coroutine_threadsafe(serving, loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop(0.0)

    @property
    def url(self) -> str:
        return f"{'http' if self._certificates is None else 'https'}://{self.address}"

    def stop(self, grace_s: float) -> None:
        """Takes no more connections, ends requests that are open after the grace, and waits for that. Idempotent."""
        self._begin_stop(grace_s)
        wait([self._serving])

    async def end(self, grace_s: float) -> None:
        """As `stop`, on the loop."""
        self._begin_stop(grace_s)
        await asyncio.wait([asyncio.wrap_future(self._serving)])

    def _begin_stop(self, grace_s: float) -> None:
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True

    def _uvicorn_config(self, app: Any) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            http=partial(BoundedConnection, self._bounds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # requests have lines of ours
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=int(self._bounds.idle_s),
            **_encryption(self._certificates),
        )


class Gateway(HttpPort):
    """OpenAI's API, which stops when the door beside it does, too."""

    def __init__(
        self,
        listen: str,
        beside: GrpcDoor,
        *,
        certificates: Certificates | None = None,
        cors_origins: Sequence[str] = (),
        bounds: Bounds = Bounds(),  # noqa: B008  frozen
        shared: bool = False,
    ) -> None:
        """beside: the door whose answers, event loop and tokens it shares. Else as `HttpPort`."""
        app = make_app(beside, bounds, cors_origins)
        loop = beside.listener.loop
        super().__init__(listen, app, loop, certificates=certificates, bounds=bounds, shared=shared)
        beside.listener.also_stop(self.end)


@contextmanager
def http_door(config: ServeConfig, beside: GrpcDoor, *, shared: bool = False) -> Iterator[Gateway | None]:
    """What a configuration wants of HTTP while the block runs, perhaps nothing. Raises as `Gateway` does."""
    if config.http_port is None:
        yield None
        return
    listen = f"{config.listen.rpartition(':')[0]}:{config.http_port}"
    try:
        gateway = Gateway(
            listen,
            beside,
            certificates=beside.certificates,
            cors_origins=config.cors_origin,
            bounds=Bounds().beside(config.places),
            shared=shared,
        )
    except AddressError as error:
        raise AddressError.of(listen, "--http-port") from error
    with gateway:
        yield gateway


def _encryption(certificates: Certificates | None) -> dict[str, Any]:
    if certificates is None:
        return {}
    chosen: dict[str, Any] = {"ssl_certfile": certificates.chain, "ssl_keyfile": certificates.key}
    if certificates.client_authorities is not None:
        chosen |= {"ssl_ca_certs": certificates.client_authorities, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return chosen


def _bind(listen: str, shared: bool) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressError.of(listen) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # of every connection, too
        bound.bind(place)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressError.of(listen) from error
    return bound
