"""The engine in the door's own process: the same interface as through a socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from decode_engine.core.service import EngineService
from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Outbox, Reply
from decode_engine.errors import CancelledError, DeadlineExceededError
from decode_engine.layers.session import Session
from decode_engine.orders.events import Ends, Event, Facts, Fails, Residency, Status, Tenancy, Warmed
from decode_engine.orders.order import Order

logger = logging.getLogger(__name__)

OnEvents = Callable[[Sequence[Event]], None]


class LocalHandle:
    """See `Handle`."""

    def __init__(self, engine: Engine[Session], reply: Reply, forget: Callable[[], object]) -> None:
        self._engine = engine
        self._reply = reply
        self._forget = forget

    def cancel(self) -> None:
        self._forget()
        self._reply.cancelled = True
        self._engine.wake()

    def stop(self, answer: int, tokens: int) -> None:
        self._reply.stops[answer] = tokens
        self._engine.wake()


class LocalCore:
    """See `Core`. To be used on one event loop; events come there, all of a step at once."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[OnEvents, int]] = {}  # with how many answers have not ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: Outbox | None = None

    async def facts(self) -> Facts:
        return self._service.facts()

    def submit(self, order: Order, on_events: OnEvents) -> LocalHandle:
        if self._outbox is None:
            self._loop = asyncio.get_running_loop()
            self._outbox = self._service.outboxes.open(self)
        number = next(self._numbers)
        reply = Reply(partial(self._outbox.put, number))
        self._asked[number] = (on_events, order.answers)
        self._service.submit(order, reply)
        return LocalHandle(self._service.engine, reply, partial(self._asked.pop, number, None))

    def send(self, batch: Sequence[tuple[int, Event]]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, batch)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("events came after the end of their loop")

    def _deliver(self, batch: Sequence[tuple[int, Event]]) -> None:
        by_request: dict[int, list[Event]] = {}
        for number, event in batch:
            by_request.setdefault(number, []).append(event)
        for number, events in by_request.items():
            found = self._asked.get(number)
            if found is None:  # it was cancelled
                continue
            on_events, left = found
            left -= sum(isinstance(event, Ends) for event in events)
            if left <= 0 or isinstance(events[-1], Fails):
                del self._asked[number]
            else:
                self._asked[number] = (on_events, left)
            on_events(events)

    async def status(self) -> Status:
        return self._service.status()

    async def residency(self, bases: Sequence[str] = ()) -> Residency:
        return await self._service.threads.run(partial(self._service.residency, bases))

    async def tenancy(self) -> Tenancy:
        return await self._service.threads.run(self._service.tenancy)

    async def allow(self, tenant: str, tokens: int) -> None:
        await self._service.threads.run(partial(self._service.tenants.allow, tenant, tokens))

    async def warm(self, context: str, deadline_ns: int | None) -> Warmed:
        left = False

        def check() -> None:
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                raise DeadlineExceededError("the deadline passed before the server had an answer")
            if left:
                raise CancelledError("the client ended the call")

        try:
            return await self._service.threads.run_alone(partial(self._service.warm, context, check))
        finally:
            left = True

    async def changed(self, context: str) -> None:
        await self._service.threads.run(partial(self._service.changed, context))
