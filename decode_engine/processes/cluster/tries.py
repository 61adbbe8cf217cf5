"""The replicas that one call goes to, one after another, until one has taken it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Self

from decode_engine.errors import NotReadyError
from decode_engine.processes.cluster.asked import Asked
from decode_engine.processes.cluster.directory import Directory
from decode_engine.rpc.routing.router import Replica, Router, Wanted

PATIENCE_S = 30.0
"""How long a call waits for a replica that can take it: as long as a replica may take to start again."""
_PART = 0.75
"""Of the time that a caller has left."""
_LOOK_S = 0.05

MOVED_ON = frozenset({"SHUTTING_DOWN", "NOT_READY", "ENGINE_CRASHED"})
"""Reasons of a replica that has not done what was asked; another one may."""
ELSEWHERE = frozenset({"CONTEXT_NOT_FOUND", "OPERATION_NOT_FOUND", "UPLOAD_NOT_FOUND"})
"""Reasons of a replica whose store does not have it (yet); another store may."""


class Tries:
    """Use as a context manager around the whole call. `next` gives the replica to ask; then `failed` or `absent` says
    why the next one is to be asked, if that helps."""

    def __init__(
        self,
        router: Router,
        directory: Directory,
        asked: Asked,
        authorization: str,
        left_s: float | None = None,
    ) -> None:
        """left_s: until the caller's deadline. By then it has heard that no replica is there: who waits for as long, or
        asks again by itself and waits a second time, would hear of its deadline alone."""
        self.asked = asked
        self._router, self._directory, self._authorization = router, directory, authorization
        patience_s = PATIENCE_S if left_s is None else min(PATIENCE_S, _PART * left_s)
        self._until = time.monotonic() + (patience_s if asked.patient else 0.0)
        self._wanted: Wanted | None = None
        self._taken: tuple[Replica, Wanted] | None = None
        self._excluded: set[str] = set()
        self._asked_stores: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    async def next(self) -> Replica:
        """The replica to ask now. Raises NotReadyError where none comes in time."""
        self._end()
        while True:
            wanted = self._wanted or await self._find()
            if wanted is not None:
                self._wanted = wanted
                replica = self._router.take(wanted, self._excluded)
                if replica is not None:
                    self._taken = replica, wanted
                    return replica
                self._excluded.clear()  # who failed may have come back
            if time.monotonic() >= self._until:
                raise NotReadyError(self._why())
            await asyncio.sleep(_LOOK_S)

    def failed(self) -> bool:
        """The replica did not take the call, or did not survive it; whether another one may be asked."""
        if self._taken is not None:
            self._router.suspect(self._taken[0].name)
            self._excluded.add(self._taken[0].name)
        return time.monotonic() < self._until or self._another()

    def absent(self) -> bool:
        """The replica's store does not have what was asked for; whether there is another store to ask."""
        if self._taken is not None:
            replica, wanted = self._taken
            self._asked_stores.add(replica.store or replica.name)
            self._wanted = replace(wanted, store="")
        self._excluded |= {
            each.name for each in self._router.replicas if (each.store or each.name) in self._asked_stores
        }
        return self._another()

    def _another(self) -> bool:
        return any(not each.draining and each.name not in self._excluded for each in self._router.replicas)

    async def _find(self) -> Wanted | None:
        asked, willing = self.asked, [each for each in self._router.replicas if not each.draining]
        if not willing:
            return None
        if asked.context:
            nearest = min(willing, key=lambda each: self._router.load(each.name))
            family = await self._directory.find(asked.context, self._authorization, nearest)
            fits = any(not each.memory_bytes or family.nbytes <= each.memory_bytes for each in willing)
            return Wanted(family.root, asked.session, family.nbytes if fits else 0)  # else a replica says why
        # All orders meet at one store, so that what was uploaded is there when it is ordered.
        attended = sorted({each.store for each in willing if each.attended}) if asked.attended else ()
        return Wanted(session=asked.session, store=next(iter(attended), ""))

    def _end(self) -> None:
        if self._taken is not None:
            self._router.give_back(*self._taken)
        self._taken = None

    def _why(self) -> str:
        count = len(self._router.replicas)
        if not count:
            return "no replica serves yet; try again later"
        return f"none of {count} replicas can take this now: they drain or do not answer"
