"""The standard health service (grpc.health.v1). A watcher that reads nothing holds up nobody but itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.starting import PHASE_KEY

_MAX_WATCHERS = 64


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """All services are well, or none is. To be used on the loop's thread."""

    def __init__(self, services: Iterable[str], phase: Callable[[], str] = lambda: "") -> None:
        """phase: what goes on before they are well; stands behind replies to checks (`PHASE_KEY`)."""
        self._phase = phase
        self._services = frozenset(("", *services))
        self._begun = False
        self._serving = False
        self._stopping = False
        self._changed = asyncio.Event()
        self._watchers = 0

    @property
    def serving(self) -> bool:
        """Whether calls are taken."""
        return self._serving

    @property
    def phase(self) -> str:
        """What goes on before they are taken for the first time; "" after that."""
        return "" if self._begun or self._stopping else self._phase()

    def set(self, serving: bool) -> None:
        """Whether calls are taken. Has no effect after `stop`."""
        self._serving = serving and not self._stopping
        self._begun = self._begun or serving
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Not serving, for good."""
        self._stopping = True
        self.set(serving=False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, call: Call
    ) -> health_pb2.HealthCheckResponse:
        """The state now. NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await call.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        if phase := self.phase:
            call.context.set_trailing_metadata(((PHASE_KEY, phase),))
        return health_pb2.HealthCheckResponse(status=self._state(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, call: Call
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now and at every change, until the server stops or the client has enough."""
        if self._watchers >= _MAX_WATCHERS:
            raise TooManyRequestsError(
                f"{self._watchers} clients watch, which is the limit; ask by Check instead",
                limit=_MAX_WATCHERS,
            )
        self._watchers += 1
        last: int | None = None
        try:
            while True:
                changed, stopping, state = self._changed, self._stopping, self._state(request.service)
                if state != last:
                    yield health_pb2.HealthCheckResponse(status=state)
                    last = state
                elif stopping:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers -= 1

    def _state(self, service: str) -> int:
        states = health_pb2.HealthCheckResponse
        if service not in self._services:
            return int(states.SERVICE_UNKNOWN)
        return int(states.SERVING if self._serving else states.NOT_SERVING)
