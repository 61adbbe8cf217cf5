"""The calibrated thresholds of an index: which one keeps a wanted fraction of the keys."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from index_store.errors import InvalidArgumentError

_STEPS = 27
_LEAST, _MOST = 0.001, 0.5

KEEP_GRID = (*(_LEAST * (_MOST / _LEAST) ** (step / _STEPS) for step in range(_STEPS)), _MOST)
"""Fractions of the keys that thresholds are stored for, ascending, in equal steps of their logarithm."""


@dataclass(frozen=True, slots=True)
class ThresholdCurve:
    """Thresholds for all of KEEP_GRID, positive and not ascending.

    Raises InvalidArgumentError for another number of them, or another order.
    """

    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not are_thresholds(self.thresholds):
            raise InvalidArgumentError(
                f"thresholds are {self.thresholds}, expected {len(KEEP_GRID)} positive numbers, none above the "
                "one before"
            )

    def __call__(self, keep: float) -> float:
        """The threshold that keeps the fraction `keep` of the keys on average, interpolated in log-log.

        Raises InvalidArgumentError outside of the calibrated fractions.
        """
        if not KEEP_GRID[0] <= keep <= KEEP_GRID[-1]:
            raise InvalidArgumentError(
                f"keep ratio is {keep}, expected {KEEP_GRID[0]} to {KEEP_GRID[-1]}: thresholds are "
                "calibrated for these; give a ratio between them, or the threshold itself",
                keep_ratio=keep,
            )
        right = max(1, bisect.bisect_left(KEEP_GRID, keep))
        low, high = (math.log(KEEP_GRID[place]) for place in (right - 1, right))
        above, below = (math.log(self.thresholds[place]) for place in (right - 1, right))
        return math.exp(above + (below - above) * (math.log(keep) - low) / (high - low))


def are_thresholds(values: tuple[float, ...]) -> bool:
    """Whether these can be the thresholds of a curve."""
    positive = all(0.0 < value < math.inf for value in values)
    ordered = all(left >= right for left, right in itertools.pairwise(values))
    return positive and ordered and len(values) == len(KEEP_GRID)
