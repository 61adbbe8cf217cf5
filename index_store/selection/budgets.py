"""What every budget is, and what several of them share: the rule that cuts a ranking into a selection.

Shape legend: H KV heads, T query positions, G group heads, M ranked items, K kept keys, d head dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.selection.collect_numba import collect
from index_store.selection.ranking import GROUP_RULES, Ranking
from index_store.selection.top_k_numba import top_k

_MOST_KEYS = 2**31 - 1
"""Keys that any context may have; more of them are as many."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Keys kept for every (KV head, query position) of one layer.

    ids_HTK: [H, T, K] int32 key ids, ascending and unique within the first `counts` entries of a row; entries
        beyond are undefined but valid ids.
    counts_HT: [H, T] int32, how many entries of a row count.
    """

    ids_HTK: Tensor
    counts_HT: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What a budget may know besides the ranking.

    length: tokens of sinks, searched keys and recent window together. thresholds: for a wanted fraction of the keys,
        the threshold that was calibrated offline for this context and index; None without a calibration.
    read_logits: exact q.k for key ids [H, T, G, K] of the searched range -> [H, T, G, K] float32.
    exact_lse_HTG: [H, T, G] float32, log-sum-exp of the logits of all keys outside the searched range (sinks, recent
        window, tail).
    """

    length: int
    thresholds: Callable[[float], float] | None
    read_logits: Callable[[Tensor], Tensor]
    exact_lse_HTG: Tensor


class Budget(ABC):
    """How much of a ranking is kept. `group`: one of GROUP_RULES.

    needs_logits: the ranking's logits must approximate q.k.
    """

    needs_logits: ClassVar[bool] = False
    needs_exact: ClassVar[bool] = False
    """Whether it asks for `Step.exact_lse_HTG`; otherwise those may be anything."""

    per_prompt: ClassVar[bool] = False
    """Whether all positions of a prompt share one selection, so that decoding token by token differs."""

    @abstractmethod
    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """The selection of every KV head and position."""

    def best(self, length: int) -> int | None:
        """How many of the keys with the best average are kept, where that is all there is to it; otherwise None.

        length: as `Step.length`.
        """
        return None

    @property
    @abstractmethod
    def label(self) -> str:
        """A short text for tables: what is kept."""


def best_keys(ranking: Ranking, keep: int, group: str) -> Selection:
    """The `keep` best keys of every row, whole items first; with `union` each head's keep / G best ones."""
    keep = min(keep, _MOST_KEYS)
    items = ranking.items
    if group == "union":
        log_weights = ranking.log_weights_HTGM()
        share = math.ceil(keep / log_weights.shape[2])
        limits = torch.full(log_weights.shape[:3], share, device=log_weights.device)
        return take_in_order(ranking, log_weights, limits)
    scores = ranking.scores(group)
    if not items.groups:
        ids, counts = top_k(scores, min(scores.shape[-1], keep))
        return Selection(ids.add_(items.first_key), counts)
    limits = torch.full((*scores.shape[:2], 1), keep, device=scores.device)
    return take_in_order(ranking, scores[:, :, None], limits)


def take_in_order(ranking: Ranking, scores_HTGM: Tensor, limits_HTG: Tensor) -> Selection:
    """Walks every head's items from the highest score on until its limit of keys; -inf is never taken."""
    order = scores_HTGM.sort(dim=-1, descending=True, stable=True)
    retrieved = (~torch.isneginf(order.values)).sum(-1)
    ids, counts = collect(order.indices, retrieved, limits_HTG, ranking.items)
    return Selection(ids, counts)


def check_fraction(label: str, value: float, **details: object) -> None:
    """Raises InvalidArgumentError unless the value is above 0 and at most 1."""
    if not 0.0 < value <= 1.0:
        raise InvalidArgumentError(f"{label} is {value}, expected a number above 0 and at most 1", **details)


def check_group_rule(rule: str) -> None:
    """Raises InvalidArgumentError for an unknown rule."""
    if rule not in GROUP_RULES:
        raise InvalidArgumentError(f"group rule is {rule!r}, expected one of {', '.join(GROUP_RULES)}")


@dataclass(frozen=True, slots=True)
class Ratio(Budget):
    """Keep the best ceil(keep * length) keys of every ranking (CSAttention section 3.3: Top-K, K = rho * N).

    Items of several keys are taken whole, best first; the last one is cut where the budget ends (Multipole Attention
    section 4). group: `average` or `max` ranks once for the group; with `union` each of G heads chooses its share of
    K / G keys. least: so many keys are kept where the ratio is fewer, over short contexts. Raises InvalidArgumentError
    unless 0 < keep <= 1 and the rule is known.
    """

    keep: float
    group: str = "average"
    least: int = 0

    def __post_init__(self) -> None:
        check_fraction("keep ratio", self.keep, keep_ratio=self.keep)
        check_group_rule(self.group)

    @property
    def label(self) -> str:
        return f"{self.keep:.2%}"

    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """Cuts to the budget for a sequence of `step.length` tokens."""
        return best_keys(ranking, self.count(step.length), self.group)

    def best(self, length: int) -> int | None:
        return self.count(length) if self.group == "average" else None

    def count(self, length: int) -> int:
        """How many of so many keys are kept; over very short contexts there may be fewer."""
        return max(math.ceil(self.keep * length), self.least)


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

    def best(self, length: int) -> int | None:
        return self.tokens if self.group == "average" else None


@dataclass(frozen=True, slots=True)
class Threshold(Budget):
    """Keep the keys of every item with S_i > T (Squeezed Attention sections 3.2 and 4.1, eq. 1).

    One T serves all layers and heads, so heads with flat attention keep more keys than peaked ones. All positions of a
    prompt share one selection, made from the average of their S_i; a decode step has its own.

    keep: wanted fraction of the keys, turned into T by what was calibrated for the context's index.
    threshold: T itself. Exactly one of the two is given.
    group: S_i is the `average` or `max` over the group's heads; with `union` an item is kept when it exceeds T for any
        head by itself, in a decode step the same as `max`. Calibration is by the average: at the same `keep` the other
        two keep more keys.

    Raises InvalidArgumentError unless one of keep and threshold is given, above 0 and at most 1, and the rule is known.
    """

    keep: float | None = None
    threshold: float | None = None
    group: str = "average"

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
        check_group_rule(self.group)

    @property
    def label(self) -> str:
        return f"S > {self.threshold:.3g}" if self.threshold is not None else f"{self.keep:.2%} by threshold"

    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """Cuts at the threshold, which may leave nothing.

        Raises MethodUnsupportedError when a keep ratio is wanted of a context without calibration, and
        InvalidArgumentError when the ratio is outside of what was calibrated.
        """
        threshold = self._find_threshold(step)
        weights_H1GM = self._weights(ranking).mean(1, keepdim=True)
        above_H1GM = weights_H1GM > threshold
        groups = ranking.items.groups
        kept_H1GM: Tensor = above_H1GM
        if groups:
            kept_H1GM = above_H1GM * torch.cat([group.sizes_HM for group in groups], dim=1)[:, None, None]
        scores_H1GM = weights_H1GM.masked_fill(~above_H1GM, -torch.inf)
        shared = take_in_order(ranking, scores_H1GM, kept_H1GM.sum(-1))
        positions = ranking.logits_HTGM.shape[1]
        return Selection(shared.ids_HTK.expand(-1, positions, -1), shared.counts_HT.expand(-1, positions))

    def _find_threshold(self, step: Step) -> float:
        if self.threshold is not None:
            return self.threshold
        if step.thresholds is None or self.keep is None:
            raise MethodUnsupportedError(
                f"a keep ratio of {self.keep} was asked of a threshold budget, but this context's index has no "
                "calibrated thresholds; prefill the document again, or give the threshold itself",
                keep_ratio=self.keep,
            )
        return step.thresholds(self.keep)

    def _weights(self, ranking: Ranking) -> Tensor:
        """[H, T, 1, M], with `union` [H, T, G, M]."""
        if self.group == "union":
            return ranking.log_weights_HTGM().exp_()
        return ranking.weights(self.group)[:, :, None]
