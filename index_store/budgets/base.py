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

from index_store.errors import InvalidArgumentError
from index_store.kernels.collect import collect
from index_store.kernels.top_k import top_k
from index_store.ranking import GROUP_RULES, Ranking


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
    per_prompt: ClassVar[bool] = False
    """Whether all positions of a prompt share one selection, so that decoding token by token differs."""

    @abstractmethod
    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """The selection of every KV head and position."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A short text for tables: what is kept."""


def best_keys(ranking: Ranking, keep: int, group: str) -> Selection:
    """The `keep` best keys of every row, whole items first; with `union` each head's keep / G best ones."""
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
