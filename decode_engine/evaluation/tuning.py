"""Finding the cheapest method and budget that reach a wanted quality on a stored context.

Quality is the KL divergence from full attention. For each method the smallest budget that is enough is looked for, and
of these the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode_engine.evaluation.scoring import Segment, reference_log_probs, score_segment
from decode_engine.evaluation.settings import CONTINUATION_TOKENS
from decode_engine.model.runner import ModelRunner
from index_store.cli.console import Advance, StartStage
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from index_store.memory.resident import ResidentContext
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import Mass
from index_store.store.description.manifest import Manifest

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


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a method achieved. keys: keys attended exactly, as a share of all, over all layers.

    kl: KL(full || method) in nats per token.
    """

    keys: float
    kl: float


class KlMeter:
    """Judges methods by the KL divergence of their next tokens from full attention's, teacher-forced on texts."""

    def __init__(
        self, runner: ModelRunner, resident: ResidentContext, texts: Sequence[Sequence[int]]
    ) -> None:
        """texts: token ids that follow the context, of at least 2 each."""
        self._runner, self._context = runner, resident
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
        return Measurement(kept / total, float(torch.cat([score.kl_T for score in scores]).mean()))


def continuation(resident: ResidentContext) -> list[int]:
    """The context's own last tokens, to be fed again after it."""
    tokens: list[int] = resident.tokens()[-CONTINUATION_TOKENS - 1 :].tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found for one method: the smallest budget that is enough, or the largest one tried."""

    candidate: Candidate
    measurement: Measurement
    index_bytes: int
    reached: bool


Measure = Callable[[Method], Measurement]


def tune(
    sweeps: Sequence[BudgetSweep], measure: Measure, wanted: float, start_stage: StartStage
) -> list[Outcome]:
    """One outcome per method, the best first: those whose KL is no more than wanted, by cost, then the others, by KL.

    What a method achieves is taken to grow with its budget, so that few budgets have to be measured. Cost is keys
    attended, and at the same number of keys the bytes of the indexes.
    """
    most = max(len(sweep.candidates).bit_length() for sweep in sweeps)
    advance = start_stage("measuring", most * len(sweeps))
    outcomes = []
    for sweep in sweeps:
        outcome, measured = _tune_sweep(sweep, measure, wanted, advance)
        for _ in range(most - measured):
            advance()
        outcomes.append(outcome)
    return sorted(outcomes, key=_rank)


def _rank(outcome: Outcome) -> tuple[bool, float, int]:
    measurement = outcome.measurement
    # Windows differ by a few keys between methods; that alone decides nothing.
    cost = float(f"{measurement.keys:.3g}") if outcome.reached else measurement.kl
    return not outcome.reached, cost, outcome.index_bytes


def _tune_sweep(sweep: BudgetSweep, measure: Measure, wanted: float, advance: Advance) -> tuple[Outcome, int]:
    """The outcome and how many budgets were measured."""
    found: dict[int, Measurement] = {}
    low, high = 0, len(sweep.candidates)
    while low < high:
        middle = (low + high) // 2
        found[middle] = measure(sweep.candidates[middle].method())
        advance()
        if found[middle].kl <= wanted:
            high = middle
        else:
            low = middle + 1
    reached = low < len(sweep.candidates)
    # A search that ends at the end has measured the largest budget.
    place = low if reached else len(sweep.candidates) - 1
    return Outcome(sweep.candidates[place], found[place], sweep.index_bytes, reached), len(found)
