"""Who serves now, as replicas tell it of themselves, which front doors read; and how many are wanted: by the requests
that wait, and by the memory that contexts fill.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from decode_engine.rpc.routing.router import Replica

FULL = 0.9
"""Share of the memory for contexts from which on one more replica holds some of them."""
_EMPTY = 0.5
UP_S = 5.0
"""How long more replicas have to be wanted."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of one replica. waiting, running: requests. sessions: that it runs at once. resident: share of its memory for
    contexts that is filled."""

    waiting: float
    running: float
    sessions: float
    resident: float


def replicas_wanted(loads: Sequence[Load]) -> int:
    """The number that these would be enough for, 1 or more; bounds and delays are whoever asks'.

    Of requests, as many as all of them need; one more where memory is full and requests come. One fewer replica where
    neither is needed: what the others then hold must fit.
    """
    now = max(1, len(loads))
    if not loads:
        return 1
    sessions = max(1.0, sum(load.sessions for load in loads) / now)
    asked = sum(load.waiting + load.running for load in loads)
    for_requests = max(1, math.ceil(asked / sessions))
    filled = sum(load.resident for load in loads)
    if for_requests > now:
        return for_requests
    if filled / now >= FULL and asked:
        return now + 1
    if for_requests < now and now > 1 and (filled / (now - 1) <= _EMPTY or not asked):
        return now - 1
    return now


@dataclass
class Scale:
    """The number of replicas: what is wanted for a while, within bounds.

    least, most: the bounds. down_s: how long fewer have to be wanted. number: from now on.
    """

    least: int
    most: int
    down_s: float
    clock: Callable[[], float] = time.monotonic
    number: int = field(init=False)
    _other: int = field(init=False)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self.number, self._other, self._since = self.least, 0, self.clock()

    def note(self, loads: Sequence[Load]) -> None:
        """How much the replicas have to do now; while one of them does not tell, nothing changes."""
        told = replicas_wanted(loads) if len(loads) == self.number else self.number
        wanted, now = min(max(told, self.least), self.most), self.clock()
        other = (wanted > self.number) - (wanted < self.number)
        if other != self._other or not other:
            self._other, self._since = other, now
        elif now - self._since >= (UP_S if other > 0 else self.down_s):
            self.number, self._since = wanted, now


GONE_S = 3.0
"""Who says nothing for so long is there no more."""


@dataclass
class Roster:
    """Names are places, `engine-0` and on: who is started again has its place, and so its contexts."""

    clock: Callable[[], float] = time.monotonic
    _told: dict[str, tuple[float, Replica, Load]] = field(default_factory=dict)
    _workers: dict[str, tuple[float, str]] = field(default_factory=dict)

    def note(self, replica: Replica, load: Load) -> None:
        self._told[replica.name] = self.clock(), replica, load

    def note_worker(self, name: str, store: str) -> None:
        """A worker makes what is ordered at a store."""
        self._workers[name] = self.clock(), store

    def leave(self, name: str) -> None:
        self._told.pop(name, None)
        self._workers.pop(name, None)

    def replicas(self) -> list[Replica]:
        """All that are there, by their names; `attended` where a worker is."""
        self._forget()
        stores = {store for _, store in self._workers.values()}
        told = (replica for _, replica, _ in self._told.values())
        return sorted(
            (replace(each, attended=each.store in stores) for each in told), key=lambda each: each.name
        )

    def loads(self) -> list[Load]:
        self._forget()
        return [load for _, _, load in self._told.values()]

    def workers(self) -> list[str]:
        self._forget()
        return sorted(self._workers)

    def _forget(self) -> None:
        since = self.clock() - GONE_S
        self._told = {key: told for key, told in self._told.items() if told[0] >= since}
        self._workers = {key: told for key, told in self._workers.items() if told[0] >= since}
