"""Attention states of remainders: what the keys that were not selected add.

A remainder approximates the attention to all keys of a partition but those that are attended exactly, as an attention
state that merges with theirs. The exact keys are taken out one by one, so nothing counts twice. Where the partition is
of coarse rows, every key that is left counts by its own approximate logit and value.

Clusters: for one query q (scaled by 1/sqrt(d)) and cluster c with N_c keys, mean key k_c, value sum V_c, and a set S_c
of members that are attended exactly: N' = N_c - |S_c| keys are left, whose values sum to V_c - sum of v_i over S_c.
Every one of them gets the weight w_c; the cluster adds w_c (V_c - sum v_i) to the numerator and N' w_c to the
denominator.

Shape legend: H KV heads, T query positions, G group heads, C clusters, X coarse rows, K exact keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.compiled.launch import on_host
from index_store.selection.budgets import COARSE, DROPPED, MONOPOLE, Remainder
from index_store.selection.ranking import ClusteredKeys, Piece, ScoredClusters, ScoredRows
from index_store.selection.remainders_numba import cluster_sums, leave_out, leave_out_reference


@dataclass(frozen=True, slots=True)
class ExactKeys:
    """Keys that are attended exactly and must leave the pieces.

    ids_HTK: [H, T, K] int32 key ids. valid_HTK: [H, T, K] bool, which entries count. logits_HTGK: [H, T, G, K] float32,
    finite also where not valid. values_HTKD: [H, T, K, d] float32. The last two are empty where ids suffice.
    """

    ids_HTK: Tensor
    valid_HTK: Tensor
    logits_HTGK: Tensor
    values_HTKD: Tensor


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left of the clusters of one piece.

    places: for every set of exact keys its clusters [H, T, K] int64 and whether they are in the piece (1.0 or 0.0).
    counts_HTC: keys left. logit_sums_HTGC: sum of the exact keys' logits, per cluster.
    """

    places: list[tuple[Tensor, Tensor]]
    counts_HTC: Tensor
    logit_sums_HTGC: Tensor


def remainder_state(
    remainder: Remainder, pieces: Sequence[Piece], exact: Sequence[ExactKeys], form: LogitForm = PLAIN
) -> AttentionState | None:
    """Approximate attention to every key of the pieces that is not among the exact ones.

    pieces: of the remainder's kind; their logits may be overwritten. exact: with logits and values where
    `takes_out_rows`. form: its cap is applied to the logits of pieces; all that are given are without it. Returns
    out [H, T, G, d], lse [H, T, G]; None when nothing is approximated at all. Raises TypeError for pieces of
    another kind.
    """
    if remainder is DROPPED:
        return None
    if remainder is COARSE:
        parts = [_coarse_state(piece, exact, form) for piece in _rows(pieces)]
    else:
        parts = [_cluster_state(remainder, _clusters(remainder, piece), exact, form) for piece in pieces]
    return reduce(AttentionState.merge, parts) if parts else None


def _rows(pieces: Sequence[Piece]) -> list[ScoredRows]:
    """The pieces. Raises TypeError for those of another kind."""
    rows = [piece for piece in pieces if isinstance(piece, ScoredRows)]
    if len(rows) < len(pieces):
        raise TypeError(f"the coarse remainder is computed over coarse rows, got {pieces[0].kind.made_of}")
    return rows


def _clusters(remainder: Remainder, piece: Piece) -> ScoredClusters:
    """The piece. Raises TypeError for one of another kind."""
    if not isinstance(piece, ScoredClusters):
        raise TypeError(f"the {remainder.name} remainder is computed over clusters, got {piece.kind.made_of}")
    return piece


def _coarse_state(piece: ScoredRows, exact: Sequence[ExactKeys], form: LogitForm) -> AttentionState:
    """Every key that is left counts by its approximate logit and its approximate value."""
    logits = form.capped(piece.logits_HTGX)
    elsewhere = [_take_away(logits, keys.ids_HTK, keys.valid_HTK, piece.first_id) for keys in exact]
    none = logits.new_full(logits.shape[:-1], -torch.inf)
    return piece.attend(logits, reduce(torch.logaddexp, elsewhere, none))


def _cluster_state(
    remainder: Remainder, piece: ScoredClusters, exact: Sequence[ExactKeys], form: LogitForm
) -> AttentionState:
    """Every key that is left in a cluster gets the same weight.

    MONOPOLE: that of the cluster's mean key (Multipole Attention section 3.2). CENTRED: the mean logit of the keys left
    is exact, and the spread around it counts to second order: mu' = (N_c q.k_c - sum of the exact keys' logits) / N',
    w_c = exp(mu') (1 + v / 2) with the variance of the logits v = q^T diag(var_c) q. The factor is the second-order
    term of the mean of exp() over the cluster; exp(v / 2), its value for normal logits, explodes on clusters with heavy
    tails.
    """
    clusters = piece.clusters
    left = _take_out(piece, exact)
    variances = None if remainder is MONOPOLE else clusters.variances_HCD
    if remainder is not MONOPOLE and variances is None:
        raise ValueError(f"the {remainder.name} remainder needs clusters with variances")
    means = piece.logits_HTGC.clone() if remainder is MONOPOLE else _exact_means(piece, left)
    logits = form.capped(means)
    logits.masked_fill_((left.counts_HTC < 0.5)[:, :, None], -torch.inf)
    base = logits.amax(-1, keepdim=True)
    base = torch.where(torch.isneginf(base), torch.zeros_like(base), base)
    weights_HTGC, total, numerator = cluster_sums(
        logits.sub_(base), left.counts_HTC, piece.queries_HTGD, variances, clusters.value_sums_HCD
    )
    for keys, (cluster_HTK, inside_HTK) in zip(exact, left.places, strict=True):
        index = cluster_HTK[:, :, None].expand(-1, -1, weights_HTGC.shape[2], -1)
        taken = weights_HTGC.gather(-1, index) * inside_HTK[:, :, None]
        if keys.values_HTKD.shape[1] == 1:  # the same for all positions, which are as good as more heads
            taken = taken.flatten(1, 2).unsqueeze(1)
        numerator -= (taken @ keys.values_HTKD).view(numerator.shape)
    empty = total <= 0
    out = numerator / torch.where(empty, torch.ones_like(total), total).unsqueeze(-1)
    lse = base.squeeze(-1) + total.log()
    return AttentionState(out.masked_fill_(empty.unsqueeze(-1), 0.0), lse)


def _exact_means(piece: ScoredClusters, left: _Left) -> Tensor:
    """A new tensor [H, T, G, C]: mean logit of the keys left in a cluster; may be anything where none is left."""
    # 0 * -inf would be nan where a piece does not stand for a cluster; such a low logit has no weight either.
    mean = piece.logits_HTGC.clamp(min=torch.finfo(torch.float32).min / 1e6)
    mean.mul_(piece.clusters.counts_HC[:, None, None]).sub_(left.logit_sums_HTGC)
    return mean.div_(left.counts_HTC[:, :, None].clamp(min=1.0))


def _take_out(piece: ScoredClusters, exact: Sequence[ExactKeys]) -> _Left:
    """Counts and logits of the exact keys, cluster by cluster."""
    clusters: ClusteredKeys = piece.clusters
    heads, positions, group, count = piece.logits_HTGC.shape
    removed = piece.logits_HTGC.new_zeros(heads, positions, count)
    logit_sums = piece.logits_HTGC.new_zeros(heads, positions, group, count)
    places: list[tuple[Tensor, Tensor]] = []
    for keys in exact:
        found = clusters.cluster_of(keys.ids_HTK.flatten(1)).view(keys.ids_HTK.shape)
        inside = ((found >= 0) & keys.valid_HTK).float()
        index = found.clamp_(min=0)
        if index.shape[1] != positions:
            index, inside = (part.expand(-1, positions, -1) for part in (index, inside))
        removed.scatter_add_(-1, index, inside)
        logit_sums.scatter_add_(
            -1, index[:, :, None].expand(-1, -1, group, -1), keys.logits_HTGK * inside[:, :, None]
        )
        places.append((index, inside))
    return _Left(places, clusters.counts_HC[:, None] - removed, logit_sums)


def _take_away(logits_HTGX: Tensor, ids_HTK: Tensor, valid_HTK: Tensor, first_id: int) -> Tensor:
    """Writes -inf to the logits of those keys that are among first_id, first_id + 1, ...

    Of lists for all positions, or of one [H, 1, K] that is the same for all of them. Returns the log-sum-exp of what
    the logits were, [H, T, G].
    """
    _, positions, group, count = logits_HTGX.shape
    shape = (-1, positions, -1)
    columns, valid = (ids_HTK - first_id).expand(shape), valid_HTK.expand(shape)
    inside = (valid & (columns >= 0) & (columns < count))[:, :, None].expand(-1, -1, group, -1)
    if count:
        places = columns.clamp(0, count - 1).long()[:, :, None].expand(inside.shape)
        taken = logits_HTGX.gather(-1, places).masked_fill_(~inside, -torch.inf)
    else:
        taken = logits_HTGX.new_full((*logits_HTGX.shape[:-1], 1), -torch.inf)
    if on_host(logits_HTGX):
        leave_out(logits_HTGX, columns, valid)
    else:
        leave_out_reference(logits_HTGX, columns, valid)
    return taken.logsumexp(-1)
