"""Who serves now, as replicas tell it of themselves. Front doors read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from decode_engine.rpc.routing.router import Replica

GONE_S = 3.0
"""Who says nothing for so long is there no more."""


@dataclass
class Roster:
    """Names are places, `engine-0` and on: who comes new takes the first that is free, and so the contexts that whoever
    had it held. Nothing else moves when a replica is replaced."""

    clock: Callable[[], float] = time.monotonic
    _told: dict[str, tuple[float, Replica]] = field(default_factory=dict)
    _workers: dict[str, tuple[float, str]] = field(default_factory=dict)

    def note(self, incarnation: str, replica: Replica) -> str:
        """A replica tells of itself; its name from now on. replica.name: the one it had, "" at first."""
        self._forget()
        known = self._told.get(incarnation)
        name = known[1].name if known else replica.name
        taken = {other.name for key, (_, other) in self._told.items() if key != incarnation}
        if not name or name in taken:
            name = next(each for each in (f"engine-{number}" for number in count()) if each not in taken)
        self._told[incarnation] = self.clock(), replace(replica, name=name)
        return name

    def note_worker(self, incarnation: str, store: str) -> None:
        """A worker makes what is ordered at a store."""
        self._workers[incarnation] = self.clock(), store

    def leave(self, incarnation: str) -> None:
        """A replica or worker ends."""
        self._told.pop(incarnation, None)
        self._workers.pop(incarnation, None)

    def replicas(self) -> list[Replica]:
        """All that are there, by their names; `attended` where a worker is."""
        self._forget()
        stores = {store for _, store in self._workers.values()}
        told = (replica for _, replica in self._told.values())
        return sorted(
            (replace(each, attended=each.store in stores) for each in told if each.grpc),
            key=lambda each: each.name,
        )

    def _forget(self) -> None:
        since = self.clock() - GONE_S
        self._told = {key: told for key, told in self._told.items() if told[0] >= since}
        self._workers = {key: told for key, told in self._workers.items() if told[0] >= since}
