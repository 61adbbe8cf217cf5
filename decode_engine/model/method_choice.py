"""What a request that names no method gets: full attention, or its context's own method, whichever takes less time.

Steps of both are timed at a few shapes while a server has nothing else to do, and again when steps of requests have
come to take another time than they did. Until then it is the context's own. Over a context of N tokens that S sessions
share, a step takes, for either,

    base + token * N + session * S + row * S * N

where `token` is what is read once for all sessions, and `row` what is done for each. Four shapes give the four numbers,
and these the times of all others.

Where that is full attention, its answers come by `exact`, which drafts, if a step that verifies drafts is fast enough
for it to pay when each of them is as often right as wrong. That changes no answer's distribution. What it wins depends
on the answer, which nobody knows before, so it is never taken instead of a method that was timed to be the faster one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context, placements_of
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.store.description.dtypes import INT8
from index_store.store.description.manifest import Manifest

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The name by which a request asks for the choice."""

_TOKENS = {"cpu": (4096, 16384), "cuda": (8192, 65536)}
_SESSIONS = (1, 16)
_STEPS = 5
_LONG_S = 2.0
"""After so long no further steps of a shape are timed."""
_LOOK_S = 0.05

_ROOM = 64  # positions behind a context, for steps

_DRAFTED = 3
"""Tokens that steps of `exact` verify for each session when they are timed: as many as 16 sessions have room for."""
_PAYS = 2 - 0.5**_DRAFTED
"""Tokens of such a step where a draft is right with a chance of a half, if those before it were."""

Shape = tuple[int, int]
"""Tokens of a context, and sessions on it."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a decode step of one method, by the formula above. No part is negative."""

    base: float
    token: float
    session: float
    row: float

    @classmethod
    def of(cls, measured: Mapping[Shape, float]) -> StepTime:
        """From times at two lengths with two numbers of sessions each."""
        (short, few), (long, many) = min(measured), max(measured)
        slopes = [
            max(0.0, measured[long, each] - measured[short, each]) / (long - short) for each in (few, many)
        ]
        row = max(0.0, slopes[1] - slopes[0]) / (many - few)
        token = max(0.0, slopes[0] - row * few)
        rest = [measured[short, each] - (token + row * each) * short for each in (few, many)]
        session = max(0.0, rest[1] - rest[0]) / (many - few)
        return cls(max(0.0, rest[0] - session * few), token, session, row)

    def seconds(self, tokens: int, sessions: int) -> float:
        """Of a step of so many sessions on one context."""
        return self.base + self.token * tokens + (self.session + self.row * tokens) * sessions


_MANY = 16
"""Sessions on one context from which on a GPU takes full attention, while nothing is timed: it reads keys once."""
_STEADY = 50
_CHANGED, _FACTOR = 500, 2.0
"""Steps in a row that differ by that factor from those after the timing, until times count no more."""
_MOST_WANTED = 32


@dataclass(slots=True)
class _Pace:
    """How steps of requests go beside what was timed. usual: their share of it, from the first ones; off: steps in a
    row that were not like these."""

    usual: float = 0.0
    seen: int = 0
    off: int = 0

    def changed(self, share: float) -> bool:
        """Takes in a step; whether the pace is another one for good."""
        self.seen += 1
        if self.seen <= _STEADY:
            self.usual += share / _STEADY
            return False
        like = self.usual / _FACTOR <= share <= self.usual * _FACTOR
        self.off = 0 if like else self.off + 1
        return self.off >= _CHANGED


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Chooses by measured times. Thread-safe.

    times: by method with its budget and by placement; empty where nothing was timed. on_gpu: where steps run. chosen:
    how often what was chosen. wanted: what was to be chosen from, and is to be timed.
    """

    times: dict[tuple[str, Placement], StepTime] = field(default_factory=dict)
    on_gpu: bool = False
    chosen: Counter[str] = field(default_factory=Counter)
    wanted: dict[tuple[str, Placement], Method] = field(default_factory=dict)
    _paces: dict[tuple[str, Placement], _Pace] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def want(self, method: Method, placement: Placement) -> None:
        with self._lock:
            if method.sparse and len(self.wanted) < _MOST_WANTED:
                self.wanted.setdefault((label(method), placement), method)

    def take_wanted(self) -> tuple[Method, Placement] | None:
        with self._lock:
            if not self.wanted:
                return None
            (_, placement), method = self.wanted.popitem()
            return method, placement

    def set(self, measured: Mapping[tuple[str, Placement], StepTime]) -> None:
        with self._lock:
            self.times.update(measured)
            for key in measured:
                self._paces.pop(key, None)

    def note(self, method: Method, placement: Placement, tokens: int, sessions: int, seconds: float) -> None:
        """Takes in how long a step of requests took; has its method timed again where that has changed for long."""
        key = (label(method), placement)
        with self._lock:
            timed = self.times.get(key)
            if timed is None or not self._paces.setdefault(key, _Pace()).changed(
                seconds / max(timed.seconds(tokens, sessions), 1e-9)
            ):
                return
            del self.times[key], self._paces[key]
        logger.info("steps of %s have changed their pace: they are timed again", label(method))

    def choose(
        self,
        own: Method,
        manifest: Manifest,
        placement: Placement,
        sessions: int,
        ready: Callable[[Method], bool] = lambda method: True,
    ) -> tuple[Method, str]:
        """A context's own method, or full attention with drafts or without, and why.

        sessions: on the context, with those of the request. ready: whether a method with drafts need not be waited for.
        """
        if own.sparse and manifest.rows == INT8:
            method, why = own, "the context's own: steps over rows in 8 bits were not timed"
        else:
            method, why = self._choose(own, manifest.token_count, placement, sessions)
            if method is METHODS["full"] and self._drafts_pay(manifest.token_count, placement, sessions):
                drafting = METHODS["exact"]
                method, why = (drafting, f"{why}; with drafts") if ready(drafting) else (method, why)
        with self._lock:
            self.chosen[method.name] += 1
        return method, why

    def _choose(self, own: Method, tokens: int, placement: Placement, sessions: int) -> tuple[Method, str]:
        if not own.sparse:
            return own, "the context has indexes for no other method"
        mine, full = self.times.get((label(own), placement)), self.times.get(("full", placement))
        if mine is None or full is None:
            self.want(own, placement)
            if self.on_gpu and sessions >= _MANY:
                return METHODS["full"], f"{sessions} sessions are on the context; steps were not timed yet"
            return own, f"the context's own: steps of {label(own)} were not timed"
        seconds = {own.name: mine.seconds(tokens, sessions), "full": full.seconds(tokens, sessions)}
        better, other = (
            (own, METHODS["full"]) if seconds[own.name] < seconds["full"] else (METHODS["full"], own)
        )
        return better, (
            f"a step takes about {_milliseconds(seconds[better.name])} ms, by {label(other)} "
            f"{_milliseconds(seconds[other.name])} ms ({tokens} tokens, sessions on the context: {sessions})"
        )

    def _drafts_pay(self, tokens: int, placement: Placement, sessions: int) -> bool:
        """Whether `exact` takes less time than full attention where half of the drafts are right."""
        verified, full = self.times.get(("exact", placement)), self.times.get(("full", placement))
        if verified is None or full is None:
            return False
        return verified.seconds(tokens, sessions) < _PAYS * full.seconds(tokens, sessions)

    def told(self) -> list[str]:
        """What was timed and chosen, for people to read: a line for each method and placement."""
        lines = []
        for (name, placement), found in list(self.times.items()):
            full = self.times.get(("full", placement))
            if name in ("full", "exact") or full is None:
                continue
            alone, together = (_from(found, full, sessions) for sessions in (1, 16))
            where = f"{name} instead of full ({placement.value})"
            lines.append(f"{where}: {alone} with one session on a context, {together} with 16")
        with self._lock:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.chosen.items()))
        return [*lines, f"chosen so far: {counts}"] if counts else lines


def label(method: Method) -> str:
    return method.name if method.budget is None else f"{method.name} {method.budget.label}"


def measure_steps(
    runner: ModelRunner, methods: Iterable[Method], placements: Sequence[Placement]
) -> StepCosts:
    """Times steps of these methods and of full attention on made-up contexts of every placement.

    Methods whose steps fail, as where one does not fit the model, are left out.
    """
    costs = StepCosts()
    for method in {label(each): each for each in methods if each.sparse}.values():
        for placement in placements_of(method, placements):
            for _ in time_steps(runner, costs, method, placement):
                pass
    return costs


class IdleTimer:
    """Times what is wanted, a step at a time, on the thread that feeds tokens, while that has nothing else to do."""

    def __init__(self, runner: ModelRunner, costs: StepCosts) -> None:
        self._runner = runner
        self._costs = costs
        self._running: Iterator[bool] = iter(())

    def advance(self) -> float | None:
        """Takes a step, and returns the seconds until the next one; None where nothing is wanted."""
        waiting = next(self._running, None)
        if waiting is None:
            wanted = self._costs.take_wanted()
            if wanted is None:
                return None
            self._running = time_steps(self._runner, self._costs, *wanted)
            return 0.0
        return _LOOK_S if waiting else 0.0


def time_steps(runner: ModelRunner, costs: StepCosts, method: Method, placement: Placement) -> Iterator[bool]:
    """Times steps of a method and of full attention on made-up contexts; yields after each step.

    True says that a context is being made, and its steps captured, by a thread of its own, for which nobody waits.
    Full attention is timed beside each method, with drafts and without: what the machine does meanwhile adds to all.
    """
    methods = _beside(method, runner)
    measured: dict[str, dict[Shape, float]] = {label(each): {} for each in methods}
    most = runner.identity.max_positions - _ROOM
    short, long = _TOKENS[runner.device.type]
    with ThreadPoolExecutor(1, thread_name_prefix="prepare") as maker:
        for tokens in (min(short, most // 4), min(long, most)):
            making = maker.submit(_make, runner, method, tokens, placement)
            while not making.done():
                yield True
            try:
                context = making.result()
                for sessions in _SESSIONS:
                    times = yield from _step_seconds(runner, context, methods, sessions)
                    for each, seconds in zip(methods, times, strict=True):
                        measured[label(each)][tokens, sessions] = seconds
                context.release()
            except Exception as error:  # without times a server serves all the same
                logger.warning("steps of %s (%s) are not timed: %s", label(method), placement.value, error)
                return
    costs.set({(name, placement): StepTime.of(shapes) for name, shapes in measured.items()})
    for line in costs.told():
        logger.info("steps were timed: %s", line)


def _beside(method: Method, runner: ModelRunner) -> list[Method]:
    drafting = [] if runner.identity.states is not None else [METHODS["exact"]]
    return [METHODS["full"], *drafting, method]


def _make(runner: ModelRunner, method: Method, tokens: int, placement: Placement) -> ResidentContext:
    context = made_up_context(
        runner.identity, runner.kv_dtype, method, tokens, device=runner.device, placement=placement
    )
    for each in _beside(method, runner):
        rows = max(_SESSIONS) * (1 if each.drafts is None else _DRAFTED + 1)
        runner.prepare(each.on(context.manifest), rows, placement, beside=True)
    return context


def _step_seconds(
    runner: ModelRunner, context: ResidentContext, methods: Sequence[Method], count: int
) -> Generator[bool, None, list[float]]:
    """Least seconds of a step of so many sessions by each method: what else runs on the machine only adds to it.

    Methods take turns, so that it adds to all of them alike. On a CPU that others use, steps take longer than this
    process computes; then it is that which counts. Yields after each step.
    """
    samplers = [Sampler(SamplingParameters()) for _ in range(count)]
    batches = [
        [runner.start(context, method.on(context.manifest)) for _ in range(count)] for method in methods
    ]
    try:
        for sessions in batches:
            runner.read(sessions, [[0]] * count)
            yield False
        times: list[list[float]] = [[] for _ in methods]
        spent = 0.0
        for turn in range(1 + _STEPS):
            if turn > 1 and spent > _LONG_S:
                break  # a large model's
            for method, sessions, found in zip(methods, batches, times, strict=True):
                drafts = [] if method.drafts is None else [[0] * _DRAFTED] * count
                begin, computed = time.perf_counter(), time.process_time()
                for result in runner.launch(sessions, [0] * count, samplers, drafts).tokens():
                    if isinstance(result, Exception):
                        raise result
                taken, computed = time.perf_counter() - begin, time.process_time() - computed
                spent += taken
                found.append(min(taken, computed) if runner.device.type == "cpu" else taken)
                yield False
        return [min(found[1:]) for found in times]
    finally:
        for session in (session for sessions in batches for session in sessions):
            session.close()


def _from(own: StepTime, full: StepTime, sessions: int) -> str:
    """From which length on a method takes less time than full attention."""
    ahead = own.seconds(0, sessions) - full.seconds(0, sessions)
    gained = (full.token - own.token) + (full.row - own.row) * sessions
    if gained <= 0:
        return "always" if ahead < 0 else "never"
    return "always" if ahead < 0 else f"from {int(ahead / gained) + 1:,} tokens"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
