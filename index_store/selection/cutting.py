"""Budgets at work: how they cut a ranking into a selection.

Shape legend: H KV heads, T query positions, G group heads, M ranked items, K kept keys, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from index_store.errors import MethodUnsupportedError
from index_store.selection.budgets import EXACT_KEYS, Budget, Mass, Ratio, Threshold, TokenCount
from index_store.selection.collect_numba import collect, searchable_members
from index_store.selection.ranking import Members, Ranking, Selection, Step
from index_store.selection.top_k_numba import top_k

_WINDOW_CENTRES = (0.1, 0.6)
"""Where the curve is measured, as fractions of all ranks (Tactic section 4.4)."""


def cut_by_mass(budget: Mass, ranking: Ranking, step: Step) -> Selection:
    """Cuts every head where its estimated cumulative weight reaches the target."""
    ranked = _sort(ranking, step.exact_lse_HTG.shape[2])
    limits_HTG = ranked.counts
    if budget.mass < 1.0 and bool(limits_HTG.any()):
        limits_HTG = _measure(budget, ranked, step).first_rank_reaching(budget.mass)
    ids, counts = collect(ranked.order_HTGM, ranked.retrieved_HTG, limits_HTG, ranking.items)
    return Selection(ids, counts)


def _measure(budget: Mass, ranked: _RankedKeys, step: Step) -> _WeightCurve:
    """Measures the head of every curve and fits the rest, all with one read of keys."""
    count_HTG = ranked.counts
    short_HTG = count_HTG <= EXACT_KEYS
    head_HTG = torch.where(short_HTG, count_HTG, (budget.head * count_HTG).ceil().long())
    longest = int(head_HTG.max())
    device = count_HTG.device
    ranks = [torch.arange(longest, device=device).expand(*count_HTG.shape, -1)]
    if not bool(short_HTG.all()):
        for centre in _WINDOW_CENTRES:
            first_HTG = ((centre * count_HTG).long() - budget.window // 2).clamp_(min=0)
            ranks.append(first_HTG[..., None] + torch.arange(budget.window, device=device))
    ranks_HTGR = torch.cat(ranks, dim=-1)
    logits_HTGR = step.read_logits(ranked.keys_at(ranks_HTGR)).double()
    logits_HTGR[..., :longest].masked_fill_(ranks[0] >= head_HTG[..., None], -torch.inf)
    exact_lse_HTG = step.exact_lse_HTG.double()
    top_HTG = torch.maximum(logits_HTGR.amax(-1), exact_lse_HTG)
    # Where nothing is attended at all there is nothing to weigh either.
    top_HTG = top_HTG.masked_fill(torch.isneginf(top_HTG), 0.0)
    weights_HTGR = (logits_HTGR - top_HTG[..., None]).exp()
    slope_HTG, floor_HTG = _fit(ranks_HTGR[..., longest:], weights_HTGR[..., longest:])
    return _WeightCurve(
        count_HTG,
        head_HTG,
        (exact_lse_HTG - top_HTG).exp(),
        weights_HTGR[..., :longest].cumsum(-1),
        slope_HTG.masked_fill(short_HTG, 0.0),
        floor_HTG.masked_fill(short_HTG, 0.0),
    )


@dataclass(frozen=True, slots=True)
class _RankedKeys:
    """Keys of the searched range by rank, without a list of them all.

    order_HTGM: items, best first. retrieved_HTG: how many of them the index retrieved. ends_HTGM: keys of the items up
    to and with each. members: keys of the searched range by item. first_key: of the searched range.
    """

    order_HTGM: Tensor
    retrieved_HTG: Tensor
    ends_HTGM: Tensor
    members: Members
    first_key: int

    @property
    def counts(self) -> Tensor:
        """Keys in all retrieved items, [H, T, G] int64."""
        return self.ends_HTGM[..., -1]

    def keys_at(self, ranks_HTGR: Tensor) -> Tensor:
        """Key ids [H, T, G, R] int64 at the given 0-based ranks; one beyond the last yields some searched key."""
        heads = ranks_HTGR.shape[0]
        count = self.counts[..., None]
        ranks = torch.minimum(ranks_HTGR, (count - 1).clamp(min=0))
        place = torch.searchsorted(self.ends_HTGM, ranks, right=True)
        place = place.clamp_(max=self.ends_HTGM.shape[-1] - 1)
        begin = torch.where(place > 0, self.ends_HTGM.gather(-1, (place - 1).clamp(min=0)), 0)
        item = self.order_HTGM.gather(-1, place)
        offsets = self.members.offsets_HM.long().gather(1, item.view(heads, -1)).view_as(item)
        entry = (offsets + ranks - begin).clamp_(max=self.members.keys_HX.shape[1] - 1)
        keys = self.members.keys_HX.gather(1, entry.view(heads, -1)).view_as(item).long()
        return torch.where(count > 0, keys, self.first_key)


class _WeightCurve(NamedTuple):
    """Weights of a head's keys by rank: measured up to rank head_HTG, then slope / x + floor, at least 0.

    count_HTG, head_HTG: int64. always_HTG: weight of the keys that are attended anyway. head_weights_HTGR: cumulative
    weights of the first ranks; constant after head_HTG. All weights are float64 in a unit of their own per head.
    """

    count_HTG: Tensor
    head_HTG: Tensor
    always_HTG: Tensor
    head_weights_HTGR: Tensor
    slope_HTG: Tensor
    floor_HTG: Tensor

    def first_rank_reaching(self, mass: float) -> Tensor:
        """The smallest number of keys, at least 1, with which the cumulative weight reaches that share of the total."""
        measured_HTG = self.head_weights_HTGR[..., -1]
        total = self.always_HTG + measured_HTG + self._beyond_head(self.count_HTG)
        wanted = mass * total - self.always_HTG
        inside = torch.searchsorted(self.head_weights_HTGR, wanted[..., None])[..., 0] + 1
        beyond = self._bisect(wanted - measured_HTG)
        found = torch.where(inside <= self.head_HTG, inside, beyond)
        return torch.minimum(found.clamp(min=1), self.count_HTG)

    def _bisect(self, wanted_HTG: Tensor) -> Tensor:
        low, high = self.head_HTG, self.count_HTG
        for _ in range(int(self.count_HTG.max() + 1).bit_length()):
            middle = (low + high) // 2
            reached = self._beyond_head(middle) >= wanted_HTG
            low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
            low = torch.minimum(low, high)
        return high

    def _beyond_head(self, ranks_HTG: Tensor) -> Tensor:
        """Sum of the curve over the ranks after the head, up to ranks_HTG."""
        slope, floor = self.slope_HTG, self.floor_HTG
        # The curve is positive on one side of its zero, if it has one: nothing is added on the other.
        zero = torch.where(slope * floor < 0, -slope / floor, 0.0).floor()
        low = torch.where(slope < 0, torch.maximum(self.head_HTG.double(), zero), self.head_HTG.double())
        high = torch.where(floor < 0, torch.minimum(ranks_HTG.double(), zero), ranks_HTG.double())
        high = torch.maximum(low, high)
        # 1 / (low + 1) + ... + 1 / high
        harmonic = torch.digamma(high + 1.0) - torch.digamma(low + 1.0)
        summed = slope * harmonic + floor * (high - low)
        return torch.where((slope <= 0) & (floor <= 0), 0.0, summed)


def _sort(ranking: Ranking, group: int) -> _RankedKeys:
    """Sorts every head's items; heads that were ranked together share an order."""
    logits_HTGM = ranking.logits_HTGM
    heads, positions, _, columns = logits_HTGM.shape
    members = searchable_members(ranking.items, heads, columns, logits_HTGM.device)
    order = logits_HTGM.sort(dim=-1, descending=True, stable=True)
    retrieved_HTGM = ~torch.isneginf(order.values)
    sizes_HM = members.sizes_HM.long()[:, None, None].expand(order.indices.shape)
    ends_HTGM = (sizes_HM.gather(-1, order.indices) * retrieved_HTGM).cumsum(-1)
    shape = (heads, positions, group)
    return _RankedKeys(
        order.indices.expand(*shape, columns),
        retrieved_HTGM.sum(-1).expand(shape),
        ends_HTGM.expand(*shape, columns).contiguous(),
        members,
        ranking.items.first_key,
    )


def _fit(ranks_HTGR: Tensor, weights_HTGR: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b), [H, T, G] each, of the curve a / x + b that has the weights' averages over both windows of 0-based ranks.

    Zeros without windows. Rows too short for two different windows may get anything finite.
    """
    if not ranks_HTGR.shape[-1]:
        zero_HTG = weights_HTGR.sum(-1)
        return zero_HTG, zero_HTG
    windows = (*ranks_HTGR.shape[:-1], 2, -1)
    inverse = (1.0 / (ranks_HTGR + 1).double()).reshape(windows).mean(-1)
    weight = weights_HTGR.reshape(windows).mean(-1)
    slope = (weight[..., 0] - weight[..., 1]) / (inverse[..., 0] - inverse[..., 1])
    slope = slope.masked_fill(~torch.isfinite(slope), 0.0)
    return slope, weight[..., 0] - slope * inverse[..., 0]


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
