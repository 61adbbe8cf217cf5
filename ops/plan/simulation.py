"""A discrete simulation: requests arrive, go to a replica, find their context in a tier, wait, and are answered."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fleet import TIERS, Fleet, Sample
from numpy.typing import NDArray
from routing import Replica, choose, orders


class Shelf:
    """A tier of one replica: contexts within so many bytes, the least recently used first, as the service evicts."""

    def __init__(self, room: float) -> None:
        self.room, self.used = room, 0.0
        self.held: OrderedDict[int, float] = OrderedDict()

    def touch(self, context: int) -> bool:
        """Whether it is here; it is the last to go now."""
        if context not in self.held:
            return False
        self.held.move_to_end(context)
        return True

    def add(self, context: int, nbytes: float, used: dict[int, int] | None = None) -> bool:
        """Makes room for it; False where contexts in use leave none."""
        if self.used + nbytes > self.room:
            going, needed = [], self.used + nbytes - self.room
            for other, size in self.held.items():
                if needed <= 0:
                    break
                if not (used and used.get(other)):
                    going.append(other)
                    needed -= size
            if needed > 0:
                return False
            for other in going:
                self.used -= self.held.pop(other)
        self.held[context] = nbytes
        self.used += nbytes
        return True

    def clear(self) -> None:
        """All of it is lost."""
        self.held.clear()
        self.used = 0.0


@dataclass
class Request:
    """One request. began_s: its arrival. first_s: when its first token was due, 0.0 before it is let in."""

    number: int
    context: int
    began_s: float
    first_s: float = 0.0


@dataclass
class Server(Replica):
    """A replica at work. free, busy: when the link from each tier is free, and how long it was not."""

    shelves: tuple[Shelf, ...] = ()
    free: list[float] = field(default_factory=lambda: [0.0] * 4)
    busy: list[float] = field(default_factory=lambda: [0.0] * 4)
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[int, Request] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    loading: dict[int, float] = field(default_factory=dict)
    tokens: float = 0.0
    epoch: int = 0
    slot_s: float = 0.0

    def find(self, context: int, nbytes: float) -> int | None:
        """The tier that has it; it is in all above from now on. None where the device has no room for it now."""
        device, host, disk = self.shelves
        if device.touch(context):
            return 0
        if not device.add(context, nbytes, self.users):
            return None
        self.loading.pop(context, None)
        if host.touch(context):
            disk.touch(context)
            return 1
        tier = 2 if disk.touch(context) else 3
        if tier == 3:
            disk.add(context, nbytes)
        host.add(context, nbytes)
        return tier


@dataclass(frozen=True)
class Result:
    """tiers_N: where each answered request found its context, an index of TIERS. first_N: seconds to its first token.
    moved: bytes from each tier. use: share of time that links and sessions were busy. retried, broken: requests of
    replicas that failed, asked again elsewhere before their first token, or ended by an error behind it. refused: when
    nobody was up. arrived: all of them.
    """

    tiers_N: NDArray[Any]
    first_N: NDArray[Any]
    moved: dict[str, float]
    use: dict[str, float]
    arrived: int
    retried: int
    broken: int
    refused: int

    def figures(self) -> dict[str, float]:
        """Shares by tier, quantiles, and how busy everything was."""
        shares = np.bincount(self.tiers_N, minlength=4) / max(1, len(self.tiers_N))
        p50, p99 = np.quantile(self.first_N, [0.5, 0.99])
        return {
            **{tier: float(share) for tier, share in zip(TIERS, shares, strict=True)},
            "p50_s": float(p50),
            "p99_s": float(p99),
            **{f"use_{name}": value for name, value in self.use.items()},
            "broken": self.broken / self.arrived,
            "refused": self.refused / self.arrived,
        }


def simulate(
    fleet: Fleet,
    contexts: Sample,
    times_N: NDArray[Any],
    asked_N: NDArray[Any],
    seed: int = 0,
    warm_N: NDArray[Any] | None = None,
    measured_from: float = 0.0,
    answers_N: NDArray[Any] | None = None,
) -> Result:
    """Lets requests for contexts `asked_N` arrive at `times_N`. warm_N: contexts that were asked for before, which
    fills the tiers and takes no time; before them each context is on the disk of its holder. measured_from: earlier
    arrivals are not counted. answers_N: tokens of each answer.
    """
    random = np.random.default_rng([seed, 1])  # draws of its own, not those of the arrivals
    order = orders(len(contexts.rates_C), fleet.replicas).tolist()
    servers = [
        Server(str(number), shelves=(Shelf(fleet.device), Shelf(fleet.host), Shelf(fleet.disk)))
        for number in range(fleet.replicas)
    ]
    sizes, lengths = contexts.bytes_C.tolist(), contexts.tokens_C.tolist()
    # What so many requests a second keep busy at once has so many holders.
    alone_s = fleet.prompt_s + fleet.answer * (
        fleet.step_s + fleet.token_s * contexts.tokens_C * fleet.sessions / 2
    )
    usual = np.minimum(fleet.replicas, 1 + contexts.rates_C * alone_s // fleet.sessions).astype(int).tolist()
    for context in () if warm_N is None else range(len(sizes) - 1, -1, -1):
        servers[order[context][0]].shelves[2].add(context, sizes[context])
    for context in () if warm_N is None else warm_N.tolist():
        among = order[context][: usual[context]]
        servers[among[int(random.integers(len(among)))] if len(among) > 1 else among[0]].find(
            context, sizes[context]
        )
    answers = random.exponential(fleet.answer, len(times_N)) if answers_N is None else answers_N
    return _Run(fleet, servers, order, sizes, lengths, answers.tolist(), measured_from, random).go(
        times_N, asked_N
    )


class _Run:
    def __init__(
        self,
        fleet: Fleet,
        servers: list[Server],
        order: list[list[int]],
        sizes: list[float],
        lengths: list[float],
        answers: list[float],
        measured_from: float,
        random: np.random.Generator,
    ) -> None:
        self.fleet, self.servers, self.order, self.sizes, self.lengths = fleet, servers, order, sizes, lengths
        self.answers, self.measured_from, self.random = answers, measured_from, random
        self.rates = (float("inf"), fleet.host_rate, fleet.disk_rate, fleet.objects_rate)
        self.events: list[tuple[float, int, str, int, int, int]] = []
        self.total = self.retried = self.broken = self.refused = self.count = 0
        self.demand: dict[int, list[float]] = {}
        self.tiers: dict[int, int] = {}
        self.first: dict[int, float] = {}
        self.moved = [0.0] * 4

    def go(self, times_N: NDArray[Any], asked_N: NDArray[Any]) -> Result:
        end = float(times_N[-1])
        for number, life in enumerate(self.random.exponential(self.fleet.lifetime_s, len(self.servers))):
            self._plan(float(life), "fail", number)
        for number, (now, context) in enumerate(zip(times_N.tolist(), asked_N.tolist(), strict=True)):
            self._until(now)
            self._arrive(Request(number, context, now), now)
        self._until(float("inf"), end)
        counted = [number for number in self.first if times_N[number] >= self.measured_from]
        busy = {
            name: sum(server.busy[tier] for server in self.servers) for tier, name in enumerate(TIERS) if tier
        }
        busy["sessions"] = sum(server.slot_s for server in self.servers) / self.fleet.sessions
        return Result(
            np.array([self.tiers[number] for number in counted], dtype=np.int64),
            np.array([self.first[number] for number in counted]),
            dict(zip(TIERS, self.moved, strict=True)),
            {name: value / (end * len(self.servers)) for name, value in busy.items()},
            len(times_N),
            self.retried,
            self.broken,
            self.refused,
        )

    def _plan(self, when: float, kind: str, server: int, epoch: int = 0, request: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, kind, server, epoch, request))

    def _until(self, now: float, end: float = float("inf")) -> None:
        while self.events and self.events[0][0] <= now:
            when, _, kind, number, epoch, request = heapq.heappop(self.events)
            server = self.servers[number]
            if kind == "end":
                if epoch == server.epoch:
                    self._leave(server, server.running.pop(request))
                    self._let_in(server, when)
            elif kind == "fail":
                if when <= end:
                    self._fail(server, number, when)
            else:
                server.up = True
                self._plan(when + float(self.random.exponential(self.fleet.lifetime_s)), "fail", number)

    def _holders(self, context: int, now: float) -> int:
        """One, and one more for as many requests at once as a replica runs; they are kept for a while."""
        demand = self.demand.setdefault(context, [0, 1, 0.0])
        wanted = 1 + int(demand[0]) // self.fleet.sessions
        if wanted >= demand[1] or now >= demand[2]:
            demand[1], demand[2] = wanted, now + self.fleet.remembered_s
        return int(demand[1])

    def _arrive(self, request: Request, now: float) -> None:
        context = request.context
        number = choose(
            self.order[context],
            self.servers,
            self.total,
            self.fleet.bound,
            self.fleet.sessions,
            self._holders(context, now),
        )
        if number < 0:
            self.refused += 1
            return
        server = self.servers[number]
        server.load += 1
        self.total += 1
        self.demand[context][0] += 1
        server.waiting.append(request)
        self._let_in(server, now)

    def _let_in(self, server: Server, now: float) -> None:
        fleet = self.fleet
        while server.waiting and len(server.running) < fleet.sessions:
            request = server.waiting[0]
            context = request.context
            nbytes = self.sizes[context]
            tier = server.find(context, nbytes)
            if tier is None:
                if not server.users:
                    raise ValueError(
                        f"a context of {nbytes:.3g} bytes, and a device with room for {fleet.device:.3g}"
                    )
                return
            server.waiting.popleft()
            ready = max(now, server.loading.get(context, 0.0))
            for link in (tier, 1) if tier > 1 else (tier,) if tier else ():
                took = nbytes / self.rates[link]
                ready = max(ready, server.free[link]) + took
                server.free[link] = ready
                server.busy[link] += took
                self.moved[link] += nbytes
            if tier:
                server.loading[context] = ready
            server.running[request.number] = request
            server.users[context] = server.users.get(context, 0) + 1
            server.tokens += self.lengths[context]
            step = fleet.step_s + fleet.token_s * server.tokens
            request.first_s = ready + fleet.prompt_s + step
            self.tiers[request.number] = tier
            self.first[request.number] = request.first_s - request.began_s
            done = ready + fleet.prompt_s + step * max(1.0, self.answers[request.number])
            server.slot_s += done - now
            self._plan(done, "end", int(server.name), server.epoch, request.number)

    def _leave(self, server: Server, request: Request) -> None:
        context = request.context
        server.tokens -= self.lengths[context]
        server.users[context] -= 1
        if not server.users[context]:
            del server.users[context]
        self._forget(server, request)

    def _forget(self, server: Server, request: Request) -> None:
        server.load -= 1
        self.total -= 1
        self.demand[request.context][0] -= 1

    def _fail(self, server: Server, number: int, now: float) -> None:
        """Its memory is lost; who had no token yet is asked for elsewhere, the others end with an error."""
        lost = [*server.running.values(), *server.waiting]
        server.up, server.epoch, server.tokens = False, server.epoch + 1, 0.0
        server.running, server.waiting, server.users, server.loading = {}, deque(), {}, {}
        server.free = [now] * 4
        for shelf in server.shelves[:2]:
            shelf.clear()
        self._plan(now + self.fleet.away_s, "back", number)
        for request in lost:
            self._forget(server, request)
        for request in lost:
            if request.first_s and request.first_s <= now:
                self.broken += 1
            else:
                self.retried += 1
                self.tiers.pop(request.number, None)
                self.first.pop(request.number, None)
                request.first_s = 0.0
                self._arrive(request, now)
