"""Who serves now, as replicas tell it of themselves. Front doors read it, and who chooses how many there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from decode_engine.processes.cluster.scaling import Load
from decode_engine.rpc.routing.router import Replica

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
