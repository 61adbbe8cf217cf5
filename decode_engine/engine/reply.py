"""A request's way back to who asked for it, and the letters that carry the events of a turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from decode_engine.orders.events import Event, event_of_error
from index_store.errors import SparseKVError

logger = logging.getLogger(__name__)


class Reply:
    """What a request is told, and what was asked of it since. Any thread calls `tell` and `fail`, which never wait.

    cancelled: nobody waits for it any more. stops: how many tokens answers have that a stop string ended, by answer.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self.tell = tell
        self.cancelled = False
        self.stops: dict[int, int] = {}

    def fail(self, error: Exception) -> None:
        """The request has ended by an error; nothing follows."""
        if not isinstance(error, SparseKVError):
            logger.error("a request failed", exc_info=error)
        self.tell(event_of_error(error))


class Sink(Protocol):
    """Where events of a door's requests go: to its loop, or through a socket."""

    def send(self, batch: Sequence[tuple[int, Event]]) -> None:
        """Hands events over, each with its request's number, in order. One thread calls it at a time; never waits."""


class Outbox:
    """Events of a door's requests until they are sent, all that are there at once. Thread-safe."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._events: list[tuple[int, Event]] = []
        self._lock = threading.Lock()

    def put(self, number: int, event: Event) -> None:
        """Adds an event, which `flush` sends."""
        with self._lock:
            self._events.append((number, event))

    def flush(self) -> None:
        """Sends what is there."""
        if not self._events:
            return
        with self._lock:  # while it is sent, too: batches keep their order
            batch, self._events = self._events, []
            if batch:
                self._sink.send(batch)
