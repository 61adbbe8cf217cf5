"""The gateway as a whole: a port, a thread with its event loop, a client of the server behind it."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn

from decode_engine.errors import AddressError
from decode_engine.gateway.app import make_app
from decode_engine.gateway.behind import Behind
from decode_engine.gateway.bounds import HEAD_BYTES, BoundedConnection, Bounds
from decode_engine.rpc.client import AsyncClient, Credentials
from decode_engine.rpc.door.certificates import Certificates
from decode_engine.rpc.door.rules import Door

logger = logging.getLogger(__name__)

_BACKLOG = 512
_UNREAD_BYTES = 2**17
"""What the system keeps of an answer that is not read."""


class Gateway:
    """Serves from its making until `stop`. Use as a context manager, or call that.

    address: with the port that was found where 0 was asked for.
    """

    def __init__(
        self,
        listen: str,
        server: str,
        *,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
        door: Door | None = None,
        certificates: Certificates | None = None,
        cors_origins: Sequence[str] = (),
        bounds: Bounds = Bounds(),  # noqa: B008  frozen
        shared: bool = False,
    ) -> None:
        """server: HOST:PORT or a socket's path as `unix:PATH`. credentials: what encrypts the way to it; who asks shows
        a token of their own. shared: other processes listen there, too. Raises AddressError, InvalidArgumentError."""
        self._server_address = server
        self._credentials = credentials
        self._door = door or Door()
        self._certificates = certificates
        self._cors_origins = cors_origins
        self._bounds = bounds
        self._socket = _bind(listen, shared)
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._begun: Future[uvicorn.Server] = Future()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        self._server = self._begun.result()

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

    def begin_stop(self, grace_s: float) -> None:
        """Takes no more connections, and ends the requests that are open after the grace."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True

    def stop(self, grace_s: float) -> None:
        """The same, and waits until all is over. Idempotent."""
        self.begin_stop(grace_s)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._begun.done():
                logger.exception("the gateway has failed")
            else:
                self._begun.set_exception(error)

    async def _serve(self) -> None:
        async with AsyncClient(self._server_address, credentials=self._credentials) as client:
            app = make_app(Behind(client), self._door, self._bounds, self._cors_origins)
            server = uvicorn.Server(self._uvicorn_config(app))
            self._begun.set_result(server)
            await server.serve(sockets=[self._socket])

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
