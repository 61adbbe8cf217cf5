"""What a request that names no method gets: full attention, or its context's own method, whichever takes less time.

Steps of both are timed at a few shapes when a server starts. Over a context of N tokens that S sessions share, a step
takes, for either,

    base + token * N + session * S + row * S * N

where `token` is what is read once for all sessions, and `row` what is done for each. Four shapes give the four numbers,
and these the times of all others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
_LONGEST_S = 20.0
"""After so long no further method is timed."""

_ROOM = 64  # positions behind a context, for steps

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


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Chooses by measured times. times: by method with its budget and by placement; empty where nothing was timed.

    chosen: how often what was chosen. Thread-safe.
    """

    times: Mapping[tuple[str, Placement], StepTime] = field(default_factory=dict)
    chosen: Counter[str] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def choose(
        self, own: Method, manifest: Manifest, placement: Placement, sessions: int
    ) -> tuple[Method, str]:
        """A context's own method or full attention, and why. sessions: on the context, with those of the request."""
        if own.sparse and manifest.rows == INT8:
            method, why = own, "the context's own: steps over rows in 8 bits were not timed"
        else:
            method, why = self._choose(own, manifest.token_count, placement, sessions)
        with self._lock:
            self.chosen[method.name] += 1
        return method, why

    def _choose(self, own: Method, tokens: int, placement: Placement, sessions: int) -> tuple[Method, str]:
        if not own.sparse:
            return own, "the context has indexes for no other method"
        mine, full = self.times.get((label(own), placement)), self.times.get(("full", placement))
        if mine is None or full is None:
            return own, f"the context's own: steps of {label(own)} were not timed"
        seconds = {own.name: mine.seconds(tokens, sessions), "full": full.seconds(tokens, sessions)}
        better, other = (
            (own, METHODS["full"]) if seconds[own.name] < seconds["full"] else (METHODS["full"], own)
        )
        return better, (
            f"a step takes about {_milliseconds(seconds[better.name])} ms, by {label(other)} "
            f"{_milliseconds(seconds[other.name])} ms ({tokens} tokens, sessions on the context: {sessions})"
        )

    def told(self) -> list[str]:
        """What was timed and chosen, for people to read: a line for each method and placement."""
        lines = []
        for (name, placement), found in self.times.items():
            full = self.times.get(("full", placement))
            if name == "full" or full is None:
                continue
            alone, together = (_from(found, full, sessions) for sessions in (1, 16))
            where = f"{name} instead of full ({placement.value})"
            lines.append(f"{where}: {alone} with one session on a context, {together} with 16")
        with self._lock:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.chosen.items()))
        return [*lines, f"chosen so far: {counts}"] if counts else lines


def label(method: Method) -> str:
    """A method with its budget."""
    return method.name if method.budget is None else f"{method.name} {method.budget.label}"


def measure_steps(
    runner: ModelRunner, methods: Iterable[Method], placements: Sequence[Placement]
) -> StepCosts:
    """Times steps of these methods and of full attention on made-up contexts of every placement.

    Methods whose steps fail, as where one does not fit the model, or that come after _LONGEST_S are left out.
    """
    times: dict[tuple[str, Placement], StepTime] = {}
    begin = time.monotonic()
    for method in {label(each): each for each in methods if each.sparse}.values():
        for placement in placements_of(method, placements):
            if time.monotonic() - begin > _LONGEST_S:
                logger.info(
                    "steps of %s (%s) are not timed: it took too long", label(method), placement.value
                )
                continue
            new = [each for each in (METHODS["full"], method) if (label(each), placement) not in times]
            try:
                measured = _measure(runner, method, new, placement)
            except Exception as error:  # without times a server serves all the same
                logger.warning("steps of %s (%s) are not timed: %s", label(method), placement.value, error)
                continue
            times |= {(name, placement): StepTime.of(shapes) for name, shapes in measured.items()}
    if Placement.HOST in placements:  # where the host does not search, it is as in `hybrid`
        alike = {
            (name, Placement.HOST): time for (name, where), time in times.items() if where is Placement.HYBRID
        }
        times = alike | times
    return StepCosts(times)


def _measure(
    runner: ModelRunner, method: Method, timed: Sequence[Method], placement: Placement
) -> dict[str, dict[Shape, float]]:
    """Times of some methods by shape, on contexts with the indexes of one of them."""
    measured: dict[str, dict[Shape, float]] = {label(each): {} for each in timed}
    most = runner.identity.max_positions - _ROOM
    short, long = _TOKENS[runner.device.type]
    for tokens in (min(short, most // 4), min(long, most)):
        context = made_up_context(
            runner.identity, runner.kv_dtype, method, tokens, device=runner.device, placement=placement
        )
        for sessions in _SESSIONS:
            found = _step_seconds(runner, context, timed, sessions)
            for each, seconds in zip(timed, found, strict=True):
                measured[label(each)][tokens, sessions] = seconds
        context.release()
    return measured


def _step_seconds(
    runner: ModelRunner, context: ResidentContext, methods: Sequence[Method], count: int
) -> list[float]:
    """Least seconds of a step of so many sessions by each method: what else runs on the machine only adds to it.

    Methods take turns, so that it adds to all of them alike. On a CPU that others use, steps take longer than this
    process computes; then it is that which counts.
    """
    samplers = [Sampler(SamplingParameters()) for _ in range(count)]
    batches = [
        [runner.start(context, method.on(context.manifest)) for _ in range(count)] for method in methods
    ]
    for sessions in batches:
        runner.read(sessions, [[0]] * count)
    times: list[list[float]] = [[] for _ in methods]
    began = time.monotonic()
    for turn in range(1 + _STEPS):
        if turn > 1 and time.monotonic() - began > _LONG_S:
            break  # a large model's
        for sessions, found in zip(batches, times, strict=True):
            begin, computed = time.perf_counter(), time.process_time()
            for result in runner.decode(sessions, [0] * count, samplers):
                if isinstance(result, Exception):
                    raise result
            taken, computed = time.perf_counter() - begin, time.process_time() - computed
            found.append(min(taken, computed) if runner.device.type == "cpu" else taken)
    for session in (session for sessions in batches for session in sessions):
        session.close()
    return [min(found[1:]) for found in times]


def _from(own: StepTime, full: StepTime, sessions: int) -> str:
    """From which length on a method takes less time than full attention."""
    ahead = own.seconds(0, sessions) - full.seconds(0, sessions)
    gained = (full.token - own.token) + (full.row - own.row) * sessions
    if gained <= 0:
        return "always" if ahead < 0 else "never"
    return "always" if ahead < 0 else f"from {int(ahead / gained) + 1:,} tokens"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
