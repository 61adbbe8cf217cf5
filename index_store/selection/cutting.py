"""Budgets at work: how they cut a ranking into a selection.

Shape legend: H KV heads, T query positions, G group heads, M ranked items, K kept keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import MethodUnsupportedError
from index_store.selection.budgets import Budget, Mass, Ratio, Threshold, TokenCount
from index_store.selection.collect_numba import collect
from index_store.selection.mass import cut_by_mass
from index_store.selection.ranking import Ranking
from index_store.selection.selected import Selection, Step
from index_store.selection.top_k_numba import top_k

_MOST_KEYS = 2**31 - 1
"""Keys that any context may have; more of them are as many."""


def cut(budget: Budget, ranking: Ranking, step: Step) -> Selection:
    """The selection of every KV head and position. Raises TypeError for a budget of another kind."""
    match budget:
        case Ratio():
            return best_keys(ranking, budget.count(step.length))
        case TokenCount():
            return best_keys(ranking, budget.tokens)
        case Threshold():
            return _cut_at_threshold(budget, ranking, step)
        case Mass():
            return cut_by_mass(budget, ranking, step)
    raise TypeError(f"a ranking cannot be cut by {type(budget).__name__}")


def best_keys(ranking: Ranking, keep: int) -> Selection:
    """The `keep` best keys of every row, whole items first."""
    keep = min(keep, _MOST_KEYS)
    items = ranking.items
    scores = ranking.scores()
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


def _cut_at_threshold(budget: Threshold, ranking: Ranking, step: Step) -> Selection:
    """Cuts at the threshold, which may leave nothing.

    Raises MethodUnsupportedError when a keep ratio is wanted of a context without calibration, and
    InvalidArgumentError when the ratio is outside of what was calibrated.
    """
    threshold = _find_threshold(budget, step)
    weights_H1GM = ranking.weights()[:, :, None].mean(1, keepdim=True)
    above_H1GM = weights_H1GM > threshold
    groups = ranking.items.groups
    kept_H1GM: Tensor = above_H1GM
    if groups:
        kept_H1GM = above_H1GM * torch.cat([group.sizes_HM for group in groups], dim=1)[:, None, None]
    scores_H1GM = weights_H1GM.masked_fill(~above_H1GM, -torch.inf)
    shared = take_in_order(ranking, scores_H1GM, kept_H1GM.sum(-1))
    positions = ranking.logits_HTGM.shape[1]
    return Selection(shared.ids_HTK.expand(-1, positions, -1), shared.counts_HT.expand(-1, positions))


def _find_threshold(budget: Threshold, step: Step) -> float:
    if budget.threshold is not None:
        return budget.threshold
    if step.thresholds is None or budget.keep is None:
        raise MethodUnsupportedError(
            f"a keep ratio of {budget.keep} was asked of a threshold budget, but this context's index has no "
            "calibrated thresholds; prefill the document again, or give the threshold itself",
            keep_ratio=budget.keep,
        )
    return step.thresholds(budget.keep)
