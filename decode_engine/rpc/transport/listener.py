"""The gRPC server: an event loop on a thread of its own, the port, health, and reflection.

Nothing that blocks runs on this thread, so health answers whatever else goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from decode_engine.errors import AddressError
from decode_engine.rpc.door.access import Door
from decode_engine.rpc.door.audit import AuditLog
from decode_engine.rpc.door.options import Certificates
from decode_engine.rpc.transport.calls import Gate, Limits
from decode_engine.rpc.transport.starting import Health
from decode_engine.rpc.transport.status import Paths
from decode_engine.rpc.transport.work import LoopThread
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.cli.traces import Traces

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""One and the same on the wire, under the names that older and newer clients ask for."""

_KEEPALIVE_MS = 20_000
_PING_MS = 1_000  # clients that wait may ping as often as this, with and without calls
_HANDSHAKE_MS = 10_000
_CLOSE_S = 1.0  # for answers that have been given to be sent
_WINDOW_BYTES = 2**16  # of a stream whose message nobody has asked for yet

logger = logging.getLogger(__name__)


class Listener:
    """Serves from its making until `close`; not healthy until told so. Its methods are for any thread but its own."""

    def __init__(
        self,
        address: str,
        services: Sequence[str],
        register: Callable[[aio.Server], None],
        limits: Limits | None = None,
        paths: Paths | None = None,
        door: Door | None = None,
        certificates: Certificates | None = None,
        phase: Callable[[], str] = lambda: "",
        shared: bool = False,
        traces: Traces | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """register: adds the services, of these names, to the server. phase: what goes on while it is not healthy yet.

        shared: other doors listen at the address, too. Raises AddressError.
        """
        self._shared = shared
        self._phase = phase
        self._door = door or Door()
        self._certificates = certificates
        self._stops: list[Callable[[float], Coroutine[Any, Any, None]]] = []
        self._limits = limits or Limits()
        self._paths = paths or Paths()
        self._traces = traces
        self._audit = audit
        self._thread = LoopThread("rpc")
        self.loop = self._thread.loop
        try:
            self.address: str = self._thread.do(self._start(address, services, register))
        except BaseException:
            self._thread.close()
            raise

    def set_serving(self, serving: bool) -> None:
        """What health says; without effect once stopping."""
        self._soon(lambda: self.health.set(serving))

    def also_stop(self, stop: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        """Has another port on the same loop stop with this one. stop: as `begin_stop`."""
        self._stops.append(stop)

    def begin_drain(self, grace_s: float) -> Future[None]:
        """Takes no new calls, which is told to who asks; done when none runs any more, or after the grace."""
        return asyncio.run_coroutine_threadsafe(self._drain(grace_s), self.loop)

    def begin_stop(self, grace_s: float) -> Future[None]:
        """The same, then closes the port, and ends what is open; done when all is."""
        return asyncio.run_coroutine_threadsafe(self._stop(grace_s), self.loop)

    def close(self) -> None:
        """Ends the thread, after a stop. Idempotent."""
        if not self.loop.is_closed():
            self.work.close()
            self._thread.close()

    async def _start(
        self, address: str, services: Sequence[str], register: Callable[[aio.Server], None]
    ) -> str:
        self._gate = Gate(self._limits, self._paths, self._door, self._traces, self._audit)
        self.work = self._gate.work
        self.health = Health(services, self._phase)
        self._server = aio.server(
            interceptors=[self._gate], options=server_options(self._limits, self._shared)
        )
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        reflection = ReflectionServicer((*services, HEALTH_SERVICE, *REFLECTION_SERVICES))
        self._server.add_generic_rpc_handlers(
            [_reflection_handler(service, reflection) for service in REFLECTION_SERVICES]
        )
        return await begin_at(self._server, address, self._certificates)

    async def _drain(self, grace_s: float) -> None:
        self.health.drain()
        await self._door.drain(grace_s)

    async def _stop(self, grace_s: float) -> None:
        end = self.loop.time() + grace_s
        await self._drain(grace_s)
        self.health.stop()
        left_s = min(max(end - self.loop.time(), 0.0), _CLOSE_S)
        await asyncio.gather(self._server.stop(left_s), *(stop(left_s) for stop in self._stops))

    def _soon(self, function: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed, and nobody asks any more
            logger.debug("the listener has ended")


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Of the files as they are when a connection is made."""
    authorities = certificates.client_authorities

    def read() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(certificates.key.read_bytes(), certificates.chain.read_bytes())],
            root_certificates=None if authorities is None else authorities.read_bytes(),
        )

    stamp = certificates.stamp()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal stamp
        seen = certificates.stamp()
        changed = certificates.changed(stamp)
        stamp = seen
        return read() if changed else None

    return grpc.dynamic_ssl_server_credentials(
        read(),
        renewed,  # type: ignore[arg-type]  # None: as before
        require_client_authentication=authorities is not None,
    )


async def begin_at(server: aio.Server, address: str, certificates: Certificates | None) -> str:
    """Has a server begin; the address with the port that was found where 0 was asked for. Raises AddressError."""
    try:
        if certificates is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(certificates))
    except RuntimeError as error:
        raise AddressError.of(address) from error
    await server.start()
    return f"{address.rpartition(':')[0]}:{port}"


def server_options(limits: Limits, shared: bool) -> list[tuple[str, int]]:
    """What bounds connections and messages of a port. shared: other processes listen there, too."""
    return [
        ("grpc.so_reuseport", int(shared)),  # else a second server on the port is a mistake, not a replica
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_connection_idle_ms", int(limits.idle_s * 1000)),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.http2.bdp_probe", 0),  # windows that grow by themselves are memory that clients may fill
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),  # a client whose machine is gone ends its calls
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
    ]


def _reflection_handler(service: str, servicer: ReflectionServicer) -> grpc.GenericRpcHandler:  # type: ignore[type-arg]
    return grpc.method_handlers_generic_handler(
        service,
        {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                servicer.ServerReflectionInfo,
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
        },
    )
