"""The HTTP door: a port on the event loop of the gRPC door, beside which it answers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn

from decode_engine.errors import AddressError
from decode_engine.gateway.app import make_app
from decode_engine.gateway.bounds import HEAD_BYTES, BoundedConnection, Bounds
from decode_engine.rpc.door.certificates import Certificates
from decode_engine.rpc.server import GrpcDoor
from decode_engine.settings.config import ServeConfig

_BACKLOG = 512
_UNREAD_BYTES = 2**17
"""What the system keeps of an answer that is not read."""


class Gateway:
    """Serves from its making until `stop`, or until the door beside it stops. Use as a context manager.

    address: with the port that was found where 0 was asked for.
    """

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
        """beside: the door whose answers, event loop and tokens it shares. shared: other processes listen there, too.

        Raises AddressError, CertificateError.
        """
        self._certificates = certificates
        self._bounds = bounds
        config = self._uvicorn_config(make_app(beside, bounds, cors_origins))
        config.load()
        bound = _bind(listen, shared)
        self.address = f"{listen.rpartition(':')[0]}:{bound.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        serving = self._server.serve(sockets=[bound])
        self._serving = asyncio.run_coroutine_threadsafe(serving, beside.listener.loop)
        beside.listener.also_stop(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(0.0)

    @property
    def url(self) -> str:
        """Where the paths begin."""
        return f"{'http' if self._certificates is None else 'https'}://{self.address}"

    def stop(self, grace_s: float) -> None:
        """Takes no more connections, ends requests that are open after the grace, and waits for that. Idempotent."""
        self._begin_stop(grace_s)
        wait([self._serving])

    async def _end(self, grace_s: float) -> None:
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
    """A socket that listens there. Raises AddressError."""
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
