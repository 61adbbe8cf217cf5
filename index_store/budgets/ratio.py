"""Budgets of a fixed size: a fraction of the keys, or a number of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from index_store.budgets.base import Budget, Selection, Step, best_keys, check_fraction, check_group_rule
from index_store.errors import InvalidArgumentError
from index_store.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Ratio(Budget):
    """Keep the best ceil(keep * length) keys of every ranking (CSAttention section 3.3: Top-K, K = rho * N).

    Items of several keys are taken whole, best first; the last one is cut where the budget ends (Multipole Attention
    section 4). group: `average` or `max` ranks once for the group; with `union` each of G heads chooses its share of
    K / G keys. Raises InvalidArgumentError unless 0 < keep <= 1 and the rule is known.
    """

    keep: float
    group: str = "average"

    def __post_init__(self) -> None:
        check_fraction("keep ratio", self.keep, keep_ratio=self.keep)
        check_group_rule(self.group)

    @property
    def label(self) -> str:
        return f"{self.keep:.2%}"

    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """Cuts to the budget for a sequence of `step.length` tokens."""
        return best_keys(ranking, math.ceil(self.keep * step.length), self.group)


@dataclass(frozen=True, slots=True)
class TokenCount(Budget):
    """Keep the best `tokens` keys whatever the context's length (Multipole Attention section 3.1: token budget).

    Items and group rule as in `Ratio`. Raises InvalidArgumentError unless tokens is at least 1.
    """

    tokens: int
    group: str = "average"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidArgumentError(
                f"token budget is {self.tokens}, expected at least 1", tokens=self.tokens
            )
        check_group_rule(self.group)

    @property
    def label(self) -> str:
        return f"{self.tokens} keys"

    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """Cuts to the number of tokens."""
        return best_keys(ranking, self.tokens, self.group)
