"""What a server says of itself: the phase that it is in while it starts, over every door, and its health.

Nothing here imports what takes seconds, so that ports answer in the first second.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.errors import NotReadyError, TooManyRequestsError

if TYPE_CHECKING:
    from decode_engine.rpc.transport.calls import Call

PHASE_KEY = "sparsekv-phase"
"""Metadata behind the reply of a health check that says NOT_SERVING: the phase."""

TELL_EVERY_S = 10.0

Tell = Callable[[str], None]
"""Takes a phase, such as "hash weights: 3.1 of 16.1 GB"."""


class Phase:
    """What goes on now. Thread-safe."""

    def __init__(self) -> None:
        self.text = "begin"
        self._what = ""
        self._told = 0.0
        self._lock = threading.Lock()
        self._listeners: list[tuple[Tell, bool]] = []

    def listen(self, tell: Tell, *, always: bool = False) -> None:
        """tell: called when another phase begins, and every ten seconds of one that gets on; always: at each change."""
        self._listeners.append((tell, always))

    def say(self, what: str, how_far: str = "") -> None:
        """what: begins a phase, or goes on with it. how_far: the part of it that changes. Both in ASCII."""
        text = f"{what}: {how_far}" if how_far else what
        with self._lock:
            now = time.monotonic()
            due = what != self._what or now - self._told >= TELL_EVERY_S
            if due:
                self._what, self._told = what, now
            self.text = text
        for tell, always in self._listeners:
            if due or always:
                tell(text)

    def refusal(self) -> NotReadyError:
        return NotReadyError(f"the server is starting ({self.text}); try again in a moment", phase=self.text)


class Services(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Services that are added to a running server once there is something to serve from.

    The generated `add_..._to_server` functions take it in place of a server. Until `open` is called, calls of these
    services end with what `refusal` makes.
    """

    def __init__(self, names: Sequence[str], refusal: Callable[[], Exception]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in names)
        self._refusal = refusal
        self._handlers: list[grpc.GenericRpcHandler] = []  # type: ignore[type-arg]
        self._open = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The same handlers by method, which are not needed."""

    def open(self) -> None:
        """From here on calls are served."""
        self._open = True

    def service(self, handler_call_details: Any) -> Any:
        if self._open:
            found = (each.service(handler_call_details) for each in self._handlers)
            return next((handler for handler in found if handler is not None), None)
        ours = handler_call_details.method.startswith(self._prefixes)
        return grpc.unary_unary_rpc_method_handler(self._refuse, bytes, bytes) if ours else None

    async def _refuse(self, request: object, call: object) -> bytes:
        raise self._refusal()


class Stopping(threading.Event):
    """Set once a server is to drain and to end. Of several who say so, whose limit is over first counts."""

    def __init__(self, on_begin: Callable[[float], None] = lambda left_s: None) -> None:
        """on_begin: told the seconds that are left, whenever somebody says so."""
        super().__init__()
        self._on_begin = on_begin
        self._end = math.inf
        self._deciding = threading.Lock()

    def begin(self, grace_s: float) -> None:
        """Has the server drain. grace_s: how long running calls may go on, at most. From any thread."""
        with self._deciding:
            self._end = min(self._end, time.monotonic() + grace_s)
            self._on_begin(self.left_s)
        self.set()

    @property
    def left_s(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


LIVENESS = "liveness"
"""What is asked for in a health check by who wants to know no more than whether the process answers."""

_MAX_WATCHERS = 64


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """All services are well, or none is; LIVENESS always is. To be used on the loop's thread."""

    def __init__(self, services: Iterable[str], phase: Callable[[], str] = lambda: "") -> None:
        """phase: what goes on before they are well; stands behind replies to checks (`PHASE_KEY`)."""
        self._phase = phase
        self._services = frozenset(("", *services))
        self._begun = False
        self._serving = False
        self._stopping = self.draining = False
        self._changed = asyncio.Event()
        self._watchers = 0

    @property
    def serving(self) -> bool:
        return self._serving

    @property
    def phase(self) -> str:
        """What goes on before they are taken for the first time; "" after that."""
        return "" if self._begun or self.draining else self._phase()

    def set(self, serving: bool) -> None:
        """Whether calls are taken. Has no effect after `drain`."""
        self._serving = serving and not self.draining
        self._begun = self._begun or serving
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        self.draining = True
        self.set(serving=False)

    def stop(self) -> None:
        """Nobody is told any more, either."""
        self._stopping = True
        self.drain()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, call: Call
    ) -> health_pb2.HealthCheckResponse:
        """The state now. NOT_FOUND for a service that is not here."""
        if request.service not in (*self._services, LIVENESS):
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
        if service == LIVENESS:
            return int(states.SERVING)
        if service not in self._services:
            return int(states.SERVICE_UNKNOWN)
        return int(states.SERVING if self._serving else states.NOT_SERVING)
