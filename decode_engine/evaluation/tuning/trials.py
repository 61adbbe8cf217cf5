"""The search itself: per method the smallest budget that is enough, and of these the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_engine.evaluation.tuning.candidates import BudgetSweep, Candidate
from decode_engine.evaluation.tuning.meters import Measurement, Meter
from index_store.cli.console import Advance, StartStage


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
