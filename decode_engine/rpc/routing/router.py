"""The rule by which requests go to replicas, and what it has to know of them.

A request's *key* is the context that it is about: of a child the root of its family, so that children are beside their
parents, whose rows they share. The key's order of replicas (`order_of`) says who holds it. In this order:

1. Nobody goes to a replica that is gone, drains, was excluded, or whose memory can never hold the context.
2. A session stays with the replica that it was on, unless that is more than its bound ahead of the others.
3. A key has one holder, and one more for as many requests at once as a replica runs (`sessions`). The one of them that
   has the least to do is taken, the first of the order where several have.
4. No replica gets more than `BOUND` times its part of all requests, or than it can run at once, whichever is more: then
   the next of the order is asked (consistent hashing with bounded loads, Mirrokni et al., 2018).
5. What has no key goes to the one that has the least to do.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field


def order_of(key: str, names: Iterable[str]) -> list[str]:
    """The names in the order in which they are asked to hold the key: one of its own for every key.

    A name that joins takes only the keys whose first it is; of one that leaves only its own keys move, each to its
    second (rendezvous hashing, Thaler and Ravishankar, 1998). Whoever knows the same names computes the same order.
    """
    return sorted(names, key=lambda name: (_weight(key, name), name), reverse=True)


def _weight(key: str, name: str) -> bytes:
    told = f"{len(key)}:{key}{name}"  # so that no other pair is hashed as the same text
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).digest()


BOUND = 1.25
"""Of a replica's part of all requests."""
REMEMBERED_S = 30.0
"""How long a key keeps the holders that its highest demand gave it: loading a context anew costs more than waiting."""
SUSPECTED_S = 2.0
"""How long a replica that did not answer is asked only where no other one is there."""
MOST_SESSIONS = 100_000
_MOST_KEYS = 100_000


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that can be asked. name: the same for as long as it holds what it holds.

    store: which store it reads; replicas on one store see the same contexts at once, and the same operations. sessions:
    requests that it runs at once. memory_bytes: for contexts; 0: not known. load: requests that it says it has, from
    everywhere. attended: a worker makes what is ordered at its store.
    """

    name: str
    grpc: str
    http: str = ""
    store: str = ""
    sessions: int = 16
    memory_bytes: int = 0
    load: int = 0
    draining: bool = False
    attended: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs. key: "" where it is about no context. session: "" where it has none. need_bytes: of the
    context in memory, 0 where nobody knows. store: the one that has to be read; "": any."""

    key: str = ""
    session: str = ""
    need_bytes: int = 0
    store: str = ""


@dataclass(slots=True)
class _Demand:
    running: int = 0
    holders: int = 1
    until: float = 0.0


@dataclass
class Router:
    """Counts what runs where, and chooses. To be used by one thread or one event loop.

    Every `take` that returned a replica is followed by one `give_back`.
    """

    clock: Callable[[], float] = time.monotonic
    _replicas: dict[str, Replica] = field(default_factory=dict)
    _running: Counter[str] = field(default_factory=Counter)
    _demands: OrderedDict[str, _Demand] = field(default_factory=OrderedDict)
    _sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _suspected: dict[str, float] = field(default_factory=dict)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._replicas.values())

    def update(self, replicas: Iterable[Replica]) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._suspected = {name: until for name, until in self._suspected.items() if name in self._replicas}

    def suspect(self, name: str) -> None:
        self._suspected[name] = self.clock() + SUSPECTED_S

    def load(self, name: str) -> int:
        """Requests that a replica has: those that went through here, or those that it tells of."""
        replica = self._replicas.get(name)
        return max(self._running[name], 0 if replica is None else replica.load)

    def take(self, wanted: Wanted, excluded: Collection[str] = ()) -> Replica | None:
        """Chooses a replica for a request, and counts the request as its own. None: there is none."""
        able = [each for each in self._replicas.values() if each.name not in excluded and _able(each, wanted)]
        now = self.clock()
        trusted = [each for each in able if self._suspected.get(each.name, 0.0) <= now]
        able = trusted or able
        if not able:
            return None
        chosen = self._choose(wanted, {each.name: each for each in able}, now)
        self._running[chosen.name] += 1
        if wanted.key:
            self._demands[wanted.key].running += 1
        if wanted.session:
            self._sessions[wanted.session] = chosen.name
            self._sessions.move_to_end(wanted.session)
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def give_back(self, replica: Replica, wanted: Wanted) -> None:
        """A request has ended there."""
        self._running[replica.name] -= 1
        if not self._running[replica.name]:
            del self._running[replica.name]
        if wanted.key:
            self._demands[wanted.key].running -= 1

    def holders(self, key: str) -> list[str]:
        """The names of the replicas that a key's requests go to now."""
        demand = self._demands.get(key, _Demand())
        return order_of(key, self._replicas)[: demand.holders]

    def _choose(self, wanted: Wanted, able: dict[str, Replica], now: float) -> Replica:
        total = sum(self.load(name) for name in able) + 1
        part = math.ceil(BOUND * total / len(able))

        def free(name: str) -> bool:
            return self.load(name) < max(part, able[name].sessions)

        holders = self._grow(wanted.key, able, now) if wanted.key else 1
        before = self._sessions.get(wanted.session) if wanted.session else None
        if before in able and free(before):
            return able[before]
        if not (wanted.key or wanted.session):
            return able[min(able, key=self.load)]
        order = order_of(wanted.key or wanted.session, able)
        nearest = min(order[:holders], key=self.load)
        return able[nearest if free(nearest) else next(filter(free, order), min(order, key=self.load))]

    def _grow(self, key: str, able: dict[str, Replica], now: float) -> int:
        """How many replicas hold a key, with one request more."""
        demand = self._demands.setdefault(key, _Demand())
        self._demands.move_to_end(key)
        while len(self._demands) > _MOST_KEYS and not next(iter(self._demands.values())).running:
            self._demands.popitem(last=False)
        sessions = max(1, min(each.sessions for each in able.values()))
        wanted = min(1 + demand.running // sessions, len(able))
        if wanted >= demand.holders or now >= demand.until:
            demand.holders, demand.until = wanted, now + REMEMBERED_S
        return demand.holders


def _able(replica: Replica, wanted: Wanted) -> bool:
    fits = not replica.memory_bytes or wanted.need_bytes <= replica.memory_bytes
    return fits and not replica.draining and wanted.store in ("", replica.store)
