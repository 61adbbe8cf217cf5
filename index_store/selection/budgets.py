"""Budgets and remainders: rules that cut a ranking into a selection, and what becomes of the other keys.

No torch here: `cutting` does it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

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


@dataclass(frozen=True, slots=True)
class PieceKind:
    """What an index that covers every key divides keys into, so that a remainder can be computed over it.

    made_of: what pieces consist of, in the plural. keys_each: keys that one of those stands for, about, at least.
    """

    made_of: str
    keys_each: int


CLUSTERS, COARSE_ROWS = PieceKind("clusters", 16), PieceKind("coarse rows", 1)

MOMENTS = ("none", "diagonal")
"""Moments that clusters may hold besides means and sums: nothing, variances of keys."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """How the attention to the keys left in pieces is approximated.

    pieces: what it is computed over; None where nothing is. moments: what the clusters must hold, one of MOMENTS.
    takes_out_rows: whether logits and values of exact keys are taken out, and not only their ids.
    """

    name: str
    summary: str
    pieces: PieceKind | None = None
    moments: str = "none"
    takes_out_rows: bool = False


DROPPED = Remainder("dropped", "Keys that were not selected are left out.")
MONOPOLE = Remainder(
    "monopole",
    "Keys that were not selected count as the mean key of their cluster.",
    CLUSTERS,
    takes_out_rows=True,
)
CENTRED = Remainder(
    "centred",
    "Clusters stand for what was not selected: exact mean logit, variance to second order.",
    CLUSTERS,
    "diagonal",
    takes_out_rows=True,
)
COARSE = Remainder(
    "coarse", "Keys that were not selected count by their coarse copies, each for itself.", COARSE_ROWS
)
REMAINDERS: Mapping[str, Remainder] = MappingProxyType(
    {each.name: each for each in (DROPPED, MONOPOLE, CENTRED, COARSE)}
)


EXACT_KEYS = 512
"""Up to so many keys all of them are measured: a curve would save next to nothing."""


class Budget(ABC):
    """How much of a ranking is kept, by the average of the weights that a group's heads give.

    needs_logits: the ranking's logits must approximate q.k.
    """

    needs_logits: ClassVar[bool] = False
    needs_exact: ClassVar[bool] = False
    """Whether it asks for `Step.exact_lse_HTG`; otherwise those may be anything."""

    per_prompt: ClassVar[bool] = False
    """Whether all positions of a prompt share one selection, so that decoding token by token differs."""

    def best(self, length: int) -> int | None:
        """How many of the keys with the best average are kept, where that is all there is to it; otherwise None.

        length: as `Step.length`.
        """
        return None

    @property
    @abstractmethod
    def label(self) -> str:
        """A short text for tables: what is kept."""


def check_fraction(label: str, value: float, **details: object) -> None:
    """Raises InvalidArgumentError unless the value is above 0 and at most 1."""
    if not 0.0 < value <= 1.0:
        raise InvalidArgumentError(f"{label} is {value}, expected a number above 0 and at most 1", **details)


@dataclass(frozen=True, slots=True)
class Ratio(Budget):
    """Keep the best ceil(keep * length) keys of every ranking (CSAttention section 3.3: Top-K, K = rho * N).

    Items of several keys are taken whole, best first; the last one is cut where the budget ends (Multipole Attention
    section 4). least: so many keys are kept where the ratio is fewer, over short contexts. Raises InvalidArgumentError
    unless 0 < keep <= 1.
    """

    keep: float
    least: int = 0

    def __post_init__(self) -> None:
        check_fraction("keep ratio", self.keep, keep_ratio=self.keep)

    @property
    def label(self) -> str:
        return f"{self.keep:.2%}"

    def best(self, length: int) -> int | None:
        return self.count(length)

    def count(self, length: int) -> int:
        """How many of so many keys are kept; over very short contexts there may be fewer."""
        return max(math.ceil(self.keep * length), self.least)


@dataclass(frozen=True, slots=True)
class TokenCount(Budget):
    """Keep the best `tokens` keys whatever the context's length (Multipole Attention section 3.1: token budget).

    Items as in `Ratio`. Raises InvalidArgumentError unless tokens is at least 1.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidArgumentError(
                f"token budget is {self.tokens}, expected at least 1", tokens=self.tokens
            )

    @property
    def label(self) -> str:
        return f"{self.tokens} keys"

    def best(self, length: int) -> int | None:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Threshold(Budget):
    """Keep the keys of every item with S_i > T (Squeezed Attention sections 3.2 and 4.1, eq. 1).

    One T serves all layers and heads, so heads with flat attention keep more keys than peaked ones. All positions of a
    prompt share one selection, made from the average of their S_i; a decode step has its own.

    keep: wanted fraction of the keys, turned into T by what was calibrated for the context's index.
    threshold: T itself. Exactly one of the two is given.

    Raises InvalidArgumentError unless one of keep and threshold is given, above 0 and at most 1.
    """

    keep: float | None = None
    threshold: float | None = None

    needs_logits: ClassVar[bool] = True
    per_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.threshold is None):
            raise InvalidArgumentError(
                f"keep ratio is {self.keep} and threshold is {self.threshold}, expected one of the two"
            )
        if self.keep is not None:
            check_fraction("keep ratio", self.keep, keep_ratio=self.keep)
        if self.threshold is not None:
            check_fraction("threshold", self.threshold, threshold=self.threshold)

    @property
    def label(self) -> str:
        return f"S > {self.threshold:.3g}" if self.threshold is not None else f"{self.keep:.2%} by threshold"


@dataclass(frozen=True, slots=True)
class Mass(Budget):
    """Keep the fewest keys of each query head that hold the share `mass` of its attention weight (Tactic section 4).

    Items in the order of the head's own scores list the keys by rank x = 1, 2, ... The weights of the first ranks are
    measured exactly; beyond them they follow y = a / x + b, fitted to the average weights of two windows of ranks.
    Sinks, recent window and tail are always attended, so their weight counts as reached from the start. A KV head keeps
    the union of what its query heads need (section 4.5), and no head keeps less than one key.

    mass: P, above 0 and at most 1; 1 keeps every key that the index retrieved. head: fraction of the ranks that is
    measured. window: keys in each of the windows around 10 % and 60 % of the ranks. Raises InvalidArgumentError for
    anything else.
    """

    mass: float
    head: float = 0.02
    window: int = 64

    needs_exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction("attention mass", self.mass, mass=self.mass)
        check_fraction("measured head of the curve", self.head, head=self.head)
        if not 1 <= self.window <= EXACT_KEYS // 8:
            raise InvalidArgumentError(
                f"window is {self.window} keys, expected 1 to {EXACT_KEYS // 8}", window=self.window
            )

    @property
    def label(self) -> str:
        return f"{self.mass:.4g} of the mass"
