"""The front door: two ports that forward what comes to the replicas that the rule names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Self

import aiohttp
from grpc import aio

from decode_engine.gateway.exchange import Bounds
from decode_engine.gateway.serving import HttpPort
from decode_engine.processes.cluster.grpc_door import GrpcForwarding
from decode_engine.processes.cluster.http_door import HttpForwarding
from decode_engine.processes.cluster.tries import Asked, Directory, Tries
from decode_engine.rpc.door.access import Door
from decode_engine.rpc.door.options import Certificates
from decode_engine.rpc.routing.router import Replica, Router
from decode_engine.rpc.transport.calls import Gate, Limits
from decode_engine.rpc.transport.listener import begin_at, server_options
from decode_engine.rpc.transport.status import Paths
from decode_engine.rpc.transport.work import LoopThread

_PLACES = 4096
"""Requests that a front door may have open at once. How many a replica takes it says itself."""
_LIMITS = Limits(unfinished=_PLACES, unread=_PLACES)


class FrontDoor:
    """Serves from its making until `stop`. Use as a context manager. Its methods are for any thread but its own.

    address, url: of gRPC, and where HTTP's paths begin. http: its port. Raises AddressError, CertificateError.
    """

    def __init__(
        self,
        listen: str,
        http_listen: str,
        *,
        replicas: Iterable[Replica] = (),
        certificates: Certificates | None = None,
        shared: bool = False,
        limits: Limits = _LIMITS,
    ) -> None:
        """listen, http_listen: HOST:PORT, port 0 for a free one. shared: other processes listen there, too."""
        self._router = Router()
        self._router.update(replicas)
        self._thread = LoopThread("front-door")
        self._held = AsyncExitStack()
        bounds = Bounds().beside(_PLACES)
        try:
            self.address = self._thread.do(self._start(listen, limits, certificates, shared))
            app = HttpForwarding(self._begin, self._session, self._serving, bounds)
            self.http = HttpPort(
                http_listen, app, self._thread.loop, certificates=certificates, bounds=bounds, shared=shared
            )
        except BaseException:
            self._thread.do(self._held.aclose())
            self._thread.close()
            raise
        self.url = f"{'http' if certificates is None else 'https'}://{self.http.address}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop(0.0)

    def update(self, replicas: Iterable[Replica]) -> None:
        self._thread.loop.call_soon_threadsafe(self._router.update, tuple(replicas))

    def stop(self, grace_s: float) -> None:
        """Takes no more calls, and ends those that run after the grace."""
        self._thread.do(self._stop(grace_s))
        self._thread.close()

    async def _start(
        self, listen: str, limits: Limits, certificates: Certificates | None, shared: bool
    ) -> str:
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            max_line_size=2**16,
            max_field_size=2**16,
        )
        self._session = await self._held.enter_async_context(session)
        self._directory = Directory(self._session)
        self._forwarding = GrpcForwarding(self._begin)
        self._gate = Gate(limits, Paths(), Door(), line=logging.DEBUG)  # replicas tell of it
        self._server = aio.server(interceptors=[self._gate], options=server_options(limits, shared))
        self._server.add_generic_rpc_handlers([self._forwarding])
        return await begin_at(self._server, listen, certificates)

    def _begin(self, asked: Asked, authorization: str, left_s: float | None = None) -> Tries:
        return Tries(self._router, self._directory, asked, authorization, left_s)

    def _serving(self) -> bool:
        return any(not replica.draining for replica in self._router.replicas)

    async def _stop(self, grace_s: float) -> None:
        await asyncio.gather(self._server.stop(grace_s), self.http.end(grace_s))
        await self._forwarding.close()
        await self._held.aclose()
        self._gate.work.close()
