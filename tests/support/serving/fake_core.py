"""A `Core` without a model, for both sides of the link: it says tokens turn by turn, on a thread, as an engine does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from decode_engine.errors import TooManyRequestsError
from decode_engine.orders.events import (
    Begins,
    Ends,
    Event,
    Facts,
    Fails,
    Residency,
    Says,
    Status,
    Tenancy,
    Times,
    Waits,
    Warmed,
)
from decode_engine.orders.order import Order
from index_store.errors import ContextNotFoundError
from index_store.store.description.context_id import ModelIdentity

IDENTITY = ModelIdentity("fake", "llama", "f" * 64, "t" * 64, 2, 4, 2, 64, 16, 4096)
FACTS = Facts(IDENTITY, "bfloat16", 16, 64, "cpu")
TIMES = Times(1, 2, 3, 4, 5, 6, 7)

OnEvents = Callable[[Sequence[Event]], None]


class FakeHandle:
    """A request: answer number a says a, a + 1, ... up to `max_tokens` tokens, one a turn."""

    def __init__(self, core: FakeCore, order: Order, on_events: OnEvents) -> None:
        self.order = order
        self.on_events = on_events
        self.said = 0
        self.open = True
        self.stopped: list[tuple[int, int]] = []
        self._core = core

    def cancel(self) -> None:
        self.open = False
        self._core.end(self)

    def stop(self, answer: int, tokens: int) -> None:
        self.stopped.append((answer, tokens))

    def turn(self) -> list[Event]:
        events: list[Event] = []
        if not self.said:
            events += [Waits("session", 1), Begins(self.order.context, "full", 1, len(self.order.prompt), 9)]
        events += [Says(answer, [answer + self.said]) for answer in range(self.order.answers)]
        self.said += 1
        for answer, tokens in self.stopped:
            events.append(Ends(answer, "stop", tokens, 7, TIMES, {"keys": 3}))
        if self.said == self.order.max_tokens and not self.stopped:
            events += [
                Ends(answer, "length", self.said, 7, TIMES, {"keys": 3})
                for answer in range(self.order.answers)
            ]
        return events


class FakeCore:
    """turn: takes one turn of all requests; `run` takes them one after the other until told to stop.

    To be made on the loop that it is used on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._requests: list[FakeHandle] = []
        self.orders: list[Order] = []
        self.cancelled: list[Order] = []
        self.changes: list[str] = []
        self.turns = 0
        self.changed_here = threading.Condition()
        self._stopping = threading.Event()
        self._pace_s = 0.0

    async def facts(self) -> Facts:
        return FACTS

    def submit(self, order: Order, on_events: OnEvents) -> FakeHandle:
        handle = FakeHandle(self, order, on_events)
        if order.method == "none":
            on_events([Fails("METHOD_UNSUPPORTED", "no such method", {"method": "none"}, 2.5)])
            return handle
        if order.method == "broken":
            raise ZeroDivisionError
        with self._lock:
            self._requests.append(handle)
        self._tell(lambda: self.orders.append(order))
        return handle

    def end(self, handle: FakeHandle) -> None:
        with self._lock:
            if handle in self._requests:
                self._requests.remove(handle)
        self._tell(lambda: self.cancelled.append(handle.order))

    async def status(self) -> Status:
        return Status({"turns": self.turns, "limit": None}, {}, {"bytes": 2**40}, [])

    async def residency(self, bases: Sequence[str] = ()) -> Residency:
        return Residency(["a"], dict.fromkeys(bases, "device"))

    async def tenancy(self) -> Tenancy:
        return Tenancy([], "")

    async def allow(self, tenant: str, tokens: int) -> None:
        self._tell(lambda: self.changes.append(f"{tenant} makes {tokens}"))

    async def warm(self, context: str, deadline_ns: int | None) -> Warmed:
        if context == "busy":
            error = TooManyRequestsError("too many", limit=8)
            error.retry_after_s = 3.5
            raise error
        if context == "slow":
            self._tell(lambda: self.changes.append("warm began"))
            try:
                await asyncio.Event().wait()
            finally:
                self._tell(lambda: self.changes.append("warm was given up"))
        if context == "gone":
            raise ContextNotFoundError("there is no such context", context=context)
        return Warmed(False, deadline_ns or 0, 2, 3)

    async def changed(self, context: str) -> None:
        self._tell(lambda: self.changes.append(context))

    def turn(self) -> None:
        """One turn, from any thread: all events are handed to the loop at once."""
        with self._lock:
            said = [(request, request.turn()) for request in self._requests]
            self._requests = [
                request for request, events in said if not any(isinstance(event, Ends) for event in events)
            ]
            self.turns += 1

        def hand_out() -> None:
            for request, events in said:
                if request.open:
                    request.on_events(events)

        self._loop.call_soon_threadsafe(hand_out)

    def run(self, pace_s: float) -> threading.Thread:
        """Takes turns, so far apart, on a thread, until `stop`."""
        self._pace_s = pace_s
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self._stopping.set()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something that the core was told makes it true."""
        with self.changed_here:
            assert self.changed_here.wait_for(condition, 60)

    def _run(self) -> None:
        while not self._stopping.wait(self._pace_s):
            self.turn()

    def _tell(self, note: Callable[[], object]) -> None:
        with self.changed_here:
            note()
            self.changed_here.notify_all()
