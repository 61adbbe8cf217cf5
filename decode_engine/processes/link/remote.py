"""A door's side of the link: the engine of another process as a `Core`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

import zmq
from msgspec import Raw

from decode_engine.errors import EngineCrashedError, NotReadyError
from decode_engine.orders.events import (
    Ends,
    Event,
    Facts,
    Fails,
    Residency,
    Status,
    Tenancy,
    Warmed,
    error_of_event,
    event_of_error,
)
from decode_engine.orders.order import Order
from decode_engine.processes.link import frames
from index_store.errors import SparseKVError

ResultT = TypeVar("ResultT")
OnEvents = Callable[[Sequence[Event]], None]

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""After which a request may come again that ended with its engine."""
_LINGER_S = 1.0


class RemoteHandle:
    """A request of `RemoteCore`."""

    def __init__(self, core: RemoteCore, number: int, answers: int, on_events: OnEvents) -> None:
        self._core = core
        self._number = number
        self._left = answers
        self._on_events = on_events

    def cancel(self) -> None:
        if self._left:
            self._left = 0
            self._core.give_up(self._number)

    def stop(self, answer: int, tokens: int) -> None:
        if self._left:
            self._core.send(frames.Stops(self._number, answer, tokens))

    def take(self, events: Sequence[Event]) -> bool:
        """Hands on events, if any are wanted; whether others may follow."""
        if self._left:
            for event in events:
                if isinstance(event, Fails):
                    self._left = 0
                elif isinstance(event, Ends):
                    self._left -= 1
            try:
                self._on_events(events)
            except Exception:
                logger.exception("what the engine says of a request was not understood; it is given up")
                self.cancel()
        return self._left > 0


class RemoteCore:
    """An engine over its socket. To be made and used on a door's event loop; see `Core`.

    While there is no engine, or it starts, requests and questions end with NOT_READY and its phase. Where it dies,
    those that it has not ended end with ENGINE_CRASHED.
    """

    def __init__(
        self,
        path: Path,
        on_ready: Callable[[bool], None] = lambda ready: None,
        on_phase: Callable[[str], None] = lambda phase: None,
        silent_s: float = 60.0,
    ) -> None:
        """on_ready: called with whether requests are taken, when that changes. on_phase: with what an engine does
        that starts. silent_s: after which an engine that says nothing counts as dead."""
        self.phase = "begin"
        self._on_ready = on_ready
        self._on_phase = on_phase
        self._silent_s = silent_s
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._life = 0
        self._facts: Facts | None = None
        self._requests: dict[int, RemoteHandle] = {}
        self._questions: dict[int, asyncio.Future[Raw]] = {}
        self._heard = time.monotonic()
        self._away: Fails = self._not_ready()
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        # Nothing is kept from going to the engine: what doors hold is bounded by what their clients may.
        self._socket = frames.LoopSocket(zmq.SocketType.DEALER, 0, int(events), self._receive, self._note)
        self._socket.connect(path)
        self._tick = self._loop.call_later(frames.LIFE_S, self._live)

    async def facts(self) -> Facts:
        if self._facts is None:
            raise error_of_event(self._away)
        return self._facts

    def submit(self, order: Order, on_events: OnEvents) -> RemoteHandle:
        number = next(self._numbers)
        handle = RemoteHandle(self, number, order.answers, on_events)
        if self._facts is None:
            self._loop.call_soon(handle.take, [self._away])
        else:
            self._requests[number] = handle
            self.send(frames.Submits(number, order))
        return handle

    async def status(self) -> Status:
        return await self._ask(Status, "status")

    async def residency(self, bases: Sequence[str] = ()) -> Residency:
        return await self._ask(Residency, "residency", bases)

    async def tenancy(self) -> Tenancy:
        return await self._ask(Tenancy, "tenancy")

    async def allow(self, tenant: str, tokens: int) -> None:
        await self._ask(type(None), "allow", tenant, tokens)

    async def warm(self, context: str, deadline_ns: int | None) -> Warmed:
        return await self._ask(Warmed, "warm", context, deadline_ns)

    async def changed(self, context: str) -> None:
        await self._ask(type(None), "changed", context)

    def close(self) -> None:
        """Leaves; what is open gets no more events. Idempotent."""
        self._tick.cancel()
        self._requests.clear()
        if self._facts is not None:
            self._facts = None
            self.send(frames.Leaves())
        for question in self._questions.values():
            question.cancel()
        self._socket.close(_LINGER_S)

    def send(self, message: frames.FromDoor) -> None:
        """Sends, now or when there is an engine."""
        self._socket.send(frames.encode(message))

    def give_up(self, number: int) -> None:
        if self._requests.pop(number, None) is not None:
            self.send(frames.Cancels(number))

    async def _ask(
        self,
        kind: type[ResultT],
        method: Literal["status", "residency", "tenancy", "allow", "warm", "changed"],
        *given: object,
    ) -> ResultT:
        await self.facts()
        question = frames.Asks(next(self._numbers), method, [*given])
        answer = self._questions[question.number] = self._loop.create_future()
        self.send(question)
        try:
            return frames.decode_result(await answer, kind)
        except asyncio.CancelledError:
            if self._facts is not None:
                self.send(frames.Cancels(question.number))
            raise
        finally:
            del self._questions[question.number]

    def _receive(self, parts: list[bytes]) -> None:
        self._heard = time.monotonic()
        message = frames.decode_from_engine(parts[0])
        match message:
            case frames.Turn(events):
                self._hand_out(events)
            case frames.Answers(number, result):
                if (question := self._questions.get(number)) is not None and not question.done():
                    question.set_result(result)
            case frames.Denies(number, error):
                if (question := self._questions.get(number)) is not None and not question.done():
                    question.set_exception(error_of_event(error))
            case frames.Welcome(life, facts):
                if life == self._life:
                    self._facts = facts
                    self._on_ready(True)
            case frames.Starting(phase):
                self.phase = phase
                self._away = self._not_ready()
                self._on_phase(phase)
            case frames.Closing(error):
                self._lose(error, error)
            case frames.Unknown(why):
                if self._facts is not None:  # else a hello is on its way, which says more than this answers
                    crashed = (
                        f"the engine gave up this door ({why}), and the request with it; it may be sent again"
                    )
                    self._lose(_crashed(crashed), self._not_ready())
                    self._say_hello()

    def _hand_out(self, events: list[tuple[int, Event]]) -> None:
        """Each request gets its events of a turn at once."""
        by_number: dict[int, list[Event]] = {}
        for number, event in events:
            by_number.setdefault(number, []).append(event)
        for number, own in by_number.items():
            if (handle := self._requests.get(number)) is not None and not handle.take(own):
                self._requests.pop(number, None)

    def _note(self, event: int) -> None:
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._say_hello()
        else:
            self._socket.read(2**20)  # the last that it has said
            self.phase = "start the engine again"
            crashed = (
                "the engine ended while it worked on this request; another one is started: send it again"
            )
            self._lose(_crashed(crashed), self._not_ready())

    def _say_hello(self) -> None:
        self._life += 1
        self.send(frames.Hello(frames.VERSION, os.getpid(), self._life))

    def _lose(self, error: Fails, away: Fails) -> None:
        """All that is open ends with an error; what comes is told that there is no engine."""
        ready, self._facts, self._away = self._facts is not None, None, away
        requests, self._requests = self._requests, {}
        for handle in requests.values():
            handle.take([error])
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error_of_event(error))
        if ready:
            self._on_ready(False)

    def _live(self) -> None:
        self._tick = self._loop.call_later(frames.LIFE_S, self._live)
        if self._facts is None:
            return
        self._socket.read(2**20)  # of what came while this loop could not run
        if time.monotonic() - self._heard > self._silent_s:
            crashed = f"the engine has said nothing for {self._silent_s:g} s; the request was given up"
            self._lose(_crashed(crashed), self._not_ready())
            self._say_hello()
        else:
            self.send(frames.Alive())

    def _not_ready(self) -> Fails:
        text = f"the server is starting ({self.phase}); try again in a moment"
        return event_of_error(NotReadyError(text, phase=self.phase))


def _crashed(text: str) -> Fails:
    error: SparseKVError = EngineCrashedError(text)
    error.retry_after_s = RETRY_S
    return event_of_error(error)
