"""Finding the cheapest method and budget that reach a wanted quality on a stored context.

Quality is attention mass captured for the context's own queries, or KL to full attention. For each method the smallest
budget that is enough is looked for, and of these the cheapest is taken.

Shape legend: H KV heads, P sampled rows, T positions, G group heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode_engine.evaluation.probe import sample_layer
from decode_engine.evaluation.scoring import Segment, reference_log_probs, score_segment
from decode_engine.evaluation.settings import CONTINUATION_TOKENS, TUNED_QUERIES
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import LayerAttention, SparseLayer
from decode_engine.model.runner import ModelRunner
from index_store.cli.console import Advance, StartStage
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from index_store.memory.resident import ResidentContext
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import Mass
from index_store.store.description.manifest import Manifest
from index_store.store.stored_context import Context

KEEPS = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2)
"""Fractions of the keys that are tried."""

MASSES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995)
"""Attention masses that are tried, for methods whose budget follows mass."""

_NEVER = frozenset({"full", "oracle"})  # a reference, and a search that reads every key


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method at one budget: keep or mass, whichever the method takes."""

    expression: str
    keep: float | None = None
    mass: float | None = None

    def method(self) -> Method:
        return get_method(self.expression, self.keep, mass=self.mass)

    @property
    def budget(self) -> str:
        """The budget as a text."""
        return f"{self.keep:.2%}" if self.keep is not None else f"mass {self.mass:.4g}"


@dataclass(frozen=True, slots=True)
class BudgetSweep:
    """One method at all budgets, the smallest first. index_bytes: of what it needs stored."""

    expression: str
    candidates: tuple[Candidate, ...]
    index_bytes: int


def find_sweeps(manifest: Manifest, expressions: Sequence[str]) -> list[BudgetSweep]:
    """The methods to try: those named, or all that the context supports.

    Raises MethodUnsupportedError for a named method that is unknown, has no budget or cannot be used with the context,
    and when the context supports none.
    """
    if expressions:
        return [_sweep(manifest, expression) for expression in expressions]
    found = []
    for name in METHODS:
        if name in _NEVER:
            continue
        try:
            found.append(_sweep(manifest, name))
        except SparseKVError:
            continue
    if not found:
        raise MethodUnsupportedError(
            f"context {manifest.id} has no index that a method could be tuned for; prefill the document again with "
            f"--method {DEFAULT_METHOD} or another one",
            context=manifest.id,
        )
    return found


def _sweep(manifest: Manifest, expression: str) -> BudgetSweep:
    method = get_method(expression)
    if not method.sparse:
        raise MethodUnsupportedError(
            f"method {expression!r} attends to every key, there is no budget to tune", method=expression
        )
    needed = {spec.name for spec in method.on(manifest).method.index_specs()}
    nbytes = sum(index.nbytes for index in manifest.indexes if index.name in needed)
    if isinstance(method.budget, Mass):
        candidates = tuple(Candidate(expression, mass=mass) for mass in MASSES)
    else:
        candidates = tuple(Candidate(expression, keep=keep) for keep in KEEPS)
    return BudgetSweep(expression, candidates, nbytes)


LAST_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a method achieved. keys: keys attended exactly, as a share of all, over all layers.

    mass: attention weight of the keys attended exactly, on average over layers, heads and queries. error: relative
    error of the attention output with the remainder, on average over layers and queries. kl: KL(full || method) in
    nats per token. Those that were not measured are None.
    """

    keys: float
    mass: float | None = None
    error: float | None = None
    kl: float | None = None

    def figures(self) -> dict[str, float]:
        """What was measured, by name."""
        named = {"keys": self.keys, "mass": self.mass, "error": self.error, "kl": self.kl}
        return {name: value for name, value in named.items() if value is not None}


class Meter(Protocol):
    """Measures methods, and knows what is enough."""

    def measure(self, method: Method) -> Measurement:
        """Measures a method with its budget."""
        ...

    def reaches(self, measurement: Measurement) -> bool:
        """Whether that is enough."""
        ...

    def shortfall(self, measurement: Measurement) -> float:
        """How far it is from enough, to find the best of those that are not."""
        ...


class MassMeter:
    """Judges methods by the attention mass they capture for queries of the context's own last positions.

    Each query is a decode step of its own, as if the context ended with its token: it sees the keys before it and none
    after it, and its recent window lies before it. Thresholds are therefore cut for single queries, not for prompts.
    Learnt sinks and caps of logits are the model's, which is not asked: mass is the keys' among themselves, uncapped.
    """

    def __init__(self, stored: Context, resident: ResidentContext, target: float) -> None:
        """Raises InvalidArgumentError when the context has no sample of its queries, or none from its end."""
        self._context, self._target = resident, target
        self._layers = resident.manifest.model.full_layers
        samples = [stored.queries(layer) for layer in self._layers]
        if not samples:
            raise InvalidArgumentError(
                "every layer of the model sees a sliding window only: there is nothing to tune"
            )
        rows_P = _late_rows(samples[0].positions_P, resident.manifest.token_count)
        self._positions: list[int] = samples[0].positions_P[rows_P].tolist()
        scale = resident.manifest.model.head_dim**-0.5
        device = resident.device
        self._queries = [(sample.queries_HPGD[:, rows_P] * scale).to(device) for sample in samples]

    def measure(self, method: Method) -> Measurement:
        """Raises MethodUnsupportedError for a method with a period, which single queries cannot judge."""
        if method.period > 1:
            raise MethodUnsupportedError(
                f"method {method.name!r} has a period, which captured mass does not judge; tune for a KL divergence, "
                "or leave the period out",
                method=method.name,
            )
        session = Session(self._context, method.on(self._context.manifest))
        try:
            found = [
                _measure_layer(session.layers[layer], queries_HPGD, self._positions)
                for layer, queries_HPGD in zip(self._layers, self._queries, strict=True)
            ]
        finally:
            session.close()
        attended, available, mass, error = torch.tensor(found, dtype=torch.float64).sum(0).tolist()
        count = len(self._positions) * len(found)
        return Measurement(attended / available, mass=mass / count, error=error / count)

    def reaches(self, measurement: Measurement) -> bool:
        return self.shortfall(measurement) <= 0.0

    def shortfall(self, measurement: Measurement) -> float:
        return self._target - (measurement.mass or 0.0)


class KlMeter:
    """Judges methods by the KL divergence of their next tokens from full attention's, teacher-forced on texts."""

    def __init__(
        self, runner: ModelRunner, resident: ResidentContext, texts: Sequence[Sequence[int]], target: float
    ) -> None:
        """texts: token ids that follow the context, of at least 2 each."""
        self._runner, self._context, self._target = runner, resident, target
        room = resident.manifest.model.max_positions - resident.manifest.token_count
        if any(len(text) > room for text in texts):
            raise InvalidArgumentError(
                f"context {resident.manifest.id[:12]} leaves the model {room} positions, texts of up to "
                f"{max(map(len, texts))} tokens would follow it; give shorter ones with --prompts"
            )
        self._segments = [Segment(tuple(text)) for text in texts]
        self._references = [
            reference_log_probs(runner, resident, METHODS["full"], segment) for segment in self._segments
        ]

    def measure(self, method: Method) -> Measurement:
        scores = [
            score_segment(self._runner, self._context, method, segment, reference)
            for segment, reference in zip(self._segments, self._references, strict=True)
        ]
        kept = sum(score.touched.kept for score in scores)
        total = sum(score.touched.total for score in scores)
        return Measurement(kept / total, kl=float(torch.cat([score.kl_T for score in scores]).mean()))

    def reaches(self, measurement: Measurement) -> bool:
        return self.shortfall(measurement) <= 0.0

    def shortfall(self, measurement: Measurement) -> float:
        return (torch.inf if measurement.kl is None else measurement.kl) - self._target


def continuation(resident: ResidentContext) -> list[int]:
    """The context's own last tokens, to be fed again after it."""
    tokens: list[int] = resident.tokens()[-CONTINUATION_TOKENS - 1 :].tolist()
    return tokens


def _late_rows(positions_P: Tensor, token_count: int) -> Tensor:
    """Up to TUNED_QUERIES rows of the sample, spread over the context's last positions."""
    late = (positions_P >= token_count - LAST_POSITIONS) & (positions_P < token_count)
    rows = late.nonzero().flatten()
    if not len(rows):
        raise InvalidArgumentError(
            "the context has no sample of the queries of its last positions; prefill the document again"
        )
    return rows[torch.linspace(0, len(rows) - 1, min(TUNED_QUERIES, len(rows))).round().long()]


def _measure_layer(
    layer: LayerAttention, queries_HPGD: Tensor, positions: Sequence[int]
) -> tuple[float, float, float, float]:
    """(keys attended, keys there were, mass captured, relative error), each summed over the queries."""
    attended, mass, error = 0.0, 0.0, 0.0
    for row, position in enumerate(positions):
        seen: list[Observation] = []
        if isinstance(layer, SparseLayer):
            layer.observer = seen.append
            layer.replay(queries_HPGD[:, row : row + 1], position)
        if not seen:  # everything is attended
            attended, mass = attended + position + 1, mass + 1.0
            continue
        sample = sample_layer(0, seen[0], torch.tensor([0]))
        outside = seen[0].sinks + position + 1 - seen[0].search_end
        attended += float(seen[0].selection.counts_HT.float().mean()) + outside
        mass += float(sample.mass_HTG.mean())
        error += float(sample.error_T[0])
    return attended, float(sum(positions) + len(positions)), mass, error


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found for one method: the smallest budget that is enough, or the largest one tried."""

    candidate: Candidate
    measurement: Measurement
    index_bytes: int
    reached: bool


def tune(sweeps: Sequence[BudgetSweep], meter: Meter, start_stage: StartStage) -> list[Outcome]:
    """One outcome per method, the best first: those that reach the target, by cost, then the others, by distance.

    What a method achieves is taken to grow with its budget, so that few budgets have to be measured. Cost is keys
    attended, and at the same number of keys the bytes of the indexes.
    """
    most = max(len(sweep.candidates).bit_length() for sweep in sweeps)
    advance = start_stage("measuring", most * len(sweeps))
    outcomes = []
    for sweep in sweeps:
        outcome, measured = _tune_sweep(sweep, meter, advance)
        for _ in range(most - measured):
            advance()
        outcomes.append(outcome)
    return sorted(outcomes, key=lambda outcome: _rank(outcome, meter))


def _rank(outcome: Outcome, meter: Meter) -> tuple[bool, float, int]:
    measurement = outcome.measurement
    # Windows differ by a few keys between methods; that alone decides nothing.
    cost = float(f"{measurement.keys:.3g}") if outcome.reached else meter.shortfall(measurement)
    return not outcome.reached, cost, outcome.index_bytes


def _tune_sweep(sweep: BudgetSweep, meter: Meter, advance: Advance) -> tuple[Outcome, int]:
    """The outcome and how many budgets were measured."""
    found: dict[int, Measurement] = {}
    low, high = 0, len(sweep.candidates)
    while low < high:
        middle = (low + high) // 2
        found[middle] = meter.measure(sweep.candidates[middle].method())
        advance()
        if meter.reaches(found[middle]):
            high = middle
        else:
            low = middle + 1
    reached = low < len(sweep.candidates)
    # A search that ends at the end has measured the largest budget.
    place = low if reached else len(sweep.candidates) - 1
    return Outcome(sweep.candidates[place], found[place], sweep.index_bytes, reached), len(found)
