"""The stages of MuSe, eagerly: the truth that kernels are compared with, and what runs on a CPU.

A query q in cluster i is q_i + r, the cluster's mean and a residual. Stage 1 attends from every query mean to the keys
of each key cluster j apart (MuSe algorithm 3), which yields a mean key K_ij, a mean value V_ij and a logit u_ij. Stage
2 attends from the residuals to these (algorithm 4): softmax_j(r.K_ij + u_ij) V_ij, and adds the dipole C_i r, where C_i
is the mean of the clusters' covariances of value and key weighted by softmax_j(u_ij) (algorithm 5).

Logits are scaled by `scale` where two vectors meet: q_i.k, r.K_ij and C_i r; vectors are kept as they are.

Every forward function is differentiable by autograd. The backward ones compute the same gradients from what a forward
pass keeps, as kernels do. They serve partial attention too: `out` and `lse` are then those of the whole softmax.

Shape legend: B batch, H query heads, E KV heads (H = E*G), R ranges, N queries and M keys of a range, Y = B*H*R,
Z = B*E*R, C query clusters, K key clusters, U places of a cluster, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from prefill_worker.muse.kernels.clusters import (
    BoundedClusters,
    average_members_reference,
    gather_members,
    scatter_members,
)


class Summaries(NamedTuple):
    """What stage 1 finds for every pair of a query cluster and a key cluster; a logit is -inf where there is no key.

    keys, values: [Y, C, K, D] in the inputs' dtype. logits: [Y, C, K] float32 (float64 for such inputs).
    """

    keys: Tensor
    values: Tensor
    logits: Tensor


class KeyValueMoments(NamedTuple):
    """Means and covariance of the keys and values of every key cluster.

    covariances: [Z, K, D, D], of value (first) and key. keys, values: means [Z, K, D]. All in the inputs' dtype.
    """

    covariances: Tensor
    keys: Tensor
    values: Tensor


class QueryGrads(NamedTuple):
    """What the backward of stage 2 finds.

    queries: [B, H, R, N, D], gradients by the residuals. sums: [Y, C, D] float32, their sums over each cluster. keys,
    values: [Y, C, K, D], gradients by the summaries. deltas: [Y, C, K], keys.K + values.V less the gradient by the
    logit. dipoles: [Y, C, D, D], None without.
    """

    queries: Tensor
    sums: Tensor
    keys: Tensor
    values: Tensor
    deltas: Tensor
    dipoles: Tensor | None


def attend_reference(
    queries_BHRND: Tensor,
    keys_BERMD: Tensor,
    values_BERMD: Tensor,
    query_clusters: BoundedClusters,
    key_clusters: BoundedClusters,
    scale: float,
    dipole: bool = True,
) -> tuple[Tensor, Tensor]:
    """All stages, which autograd can differentiate: out [B, H, R, N, D] and log-sum-exp [B, H, R, N]."""
    group, ranges = queries_BHRND.shape[1] // keys_BERMD.shape[1], keys_BERMD.shape[2]
    members, counts = query_clusters.members, query_clusters.counts
    means = average_members_reference(queries_BHRND, members, counts)
    summaries = summarise_keys_reference(means, keys_BERMD, values_BERMD, key_clusters, scale, group)
    dipoles = None
    if dipole:
        moments = covary_members_reference(keys_BERMD, values_BERMD, key_clusters)
        dipoles = mix_dipoles_reference(summaries.logits, moments.covariances, group, ranges)
    own = query_clusters._replace(centroids=means)
    return attend_summaries_reference(queries_BHRND, own, summaries, dipoles, scale)


def summarise_keys_reference(
    means_YCD: Tensor,
    keys_BERMD: Tensor,
    values_BERMD: Tensor,
    clusters: BoundedClusters,
    scale: float,
    group: int,
) -> Summaries:
    """Stage 1 (MuSe algorithm 3). clusters: of the keys. group: query heads that share a KV head."""
    ranges = keys_BERMD.shape[2]
    keys = _for_queries(gather_members(keys_BERMD, clusters.members, clusters.counts), group, ranges)
    values = _for_queries(gather_members(values_BERMD, clusters.members, clusters.counts), group, ranges)
    filled = _for_queries(clusters.filled, group, ranges)[:, None]
    logits = _wide(torch.einsum("ycd,ykud->ycku", means_YCD, keys)) * scale
    peaks = torch.where(filled, logits, -torch.inf).amax(-1, keepdim=True).detach()
    peaks = torch.where(peaks.isneginf(), 0, peaks)
    weights = torch.where(filled, torch.exp(torch.where(filled, logits - peaks, 0)), 0)
    totals = weights.sum(-1)
    present = totals > 0
    shares = weights / torch.where(present, totals, 1)[..., None]
    lse = torch.where(present, torch.where(present, totals, 1).log() + peaks[..., 0], -torch.inf)
    shares = shares.to(keys.dtype)
    return Summaries(
        torch.einsum("ycku,ykud->yckd", shares, keys).contiguous(),
        torch.einsum("ycku,ykud->yckd", shares, values).contiguous(),
        lse,
    )


def covary_members_reference(
    keys_BERMD: Tensor, values_BERMD: Tensor, clusters: BoundedClusters
) -> KeyValueMoments:
    """Covariances of values and keys in each key cluster, not weighted by any query (MuSe algorithm 3)."""
    keys = _wide(gather_members(keys_BERMD, clusters.members, clusters.counts))
    values = _wide(gather_members(values_BERMD, clusters.members, clusters.counts))
    sizes = clusters.counts.clamp(min=1)[..., None].to(keys.dtype)
    mean_keys, mean_values = keys.sum(2) / sizes, values.sum(2) / sizes
    products = torch.einsum("zkuv,zkud->zkvd", values, keys) / sizes[..., None]
    covariances = products - mean_values[..., None] * mean_keys[..., None, :]
    dtype = keys_BERMD.dtype
    return KeyValueMoments(covariances.to(dtype), mean_keys.to(dtype), mean_values.to(dtype))


def mix_dipoles_reference(logits_YCK: Tensor, covariances_ZKDD: Tensor, group: int, ranges: int) -> Tensor:
    """The dipole [Y, C, D, D] of every query cluster: the covariances, weighted by the softmax of its logits."""
    covariances = _for_queries(covariances_ZKDD, group, ranges)
    shares = logits_YCK.softmax(-1).to(covariances.dtype)
    return torch.einsum("yck,ykvd->ycvd", shares, covariances).contiguous()


def attend_summaries_reference(
    queries_BHRND: Tensor,
    clusters: BoundedClusters,
    summaries: Summaries,
    dipoles_YCDD: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Stage 2 (MuSe algorithm 4): out [B, H, R, N, D] and log-sum-exp [B, H, R, N]. clusters: of the queries."""
    shape = queries_BHRND.shape
    queries = gather_members(queries_BHRND, clusters.members, clusters.counts)
    residuals = queries - clusters.centroids[:, :, None]
    logits = _wide(torch.einsum("ycud,yckd->ycuk", residuals, summaries.keys)) * scale
    logits = logits + summaries.logits[:, :, None]
    shares = logits.softmax(-1).to(queries.dtype)
    out = torch.einsum("ycuk,yckd->ycud", shares, summaries.values)
    if dipoles_YCDD is not None:
        out = out + scale * torch.einsum("ycud,ycvd->ycuv", residuals, dipoles_YCDD)
    lse = logits.logsumexp(-1)[..., None]
    members, counts = clusters.members, clusters.counts
    out_YND = scatter_members(out, members, counts, shape[3])
    lse_YN = scatter_members(lse, members, counts, shape[3])
    return out_YND.view(shape), lse_YN.view(shape[:-1])


def attend_summaries_into_reference(
    queries_BHRND: Tensor,
    clusters: BoundedClusters,
    summaries: Summaries,
    dipoles_YCDD: Tensor | None,
    scale: float,
    out_BHRND: Tensor,
    lse_BHRN: Tensor,
    merge: bool,
) -> None:
    """Stage 2 into `out` and `lse`, in place; with `merge` these hold another part of the softmax, which is kept."""
    out, lse = attend_summaries_reference(queries_BHRND, clusters, summaries, dipoles_YCDD, scale)
    if merge:
        state = AttentionState(_wide(out_BHRND), lse_BHRN).merge(AttentionState(_wide(out), lse))
        out, lse = state.out, state.lse
    out_BHRND.copy_(out)
    lse_BHRN.copy_(lse)


def attend_summaries_backward_reference(
    queries_BHRND: Tensor,
    clusters: BoundedClusters,
    summaries: Summaries,
    dipoles_YCDD: Tensor | None,
    scale: float,
    out_BHRND: Tensor,
    lse_BHRN: Tensor,
    grad_BHRND: Tensor,
) -> QueryGrads:
    """Gradients through stage 2. out, lse: of the whole softmax that the summaries are a part of. grad: by `out`."""
    members, counts = clusters.members, clusters.counts
    filled = clusters.filled[..., None]
    queries = gather_members(queries_BHRND, members, counts)
    grads = gather_members(grad_BHRND, members, counts)
    outs = gather_members(out_BHRND, members, counts)
    lse = gather_members(lse_BHRN[..., None], members, counts)
    residuals = torch.where(filled, queries - clusters.centroids[:, :, None], 0)
    dtype = queries.dtype
    logits = _wide(torch.einsum("ycud,yckd->ycuk", residuals, summaries.keys)) * scale
    shares = torch.where(filled, torch.exp(logits + summaries.logits[:, :, None] - lse), 0)
    moved = _wide(torch.einsum("ycud,yckd->ycuk", grads, summaries.values))
    moved = moved - (_wide(grads) * _wide(outs)).sum(-1, keepdim=True)
    weights = shares.sum(-1, keepdim=True)
    grad_dipoles = None
    grad_residuals = torch.zeros_like(_wide(residuals))
    if dipoles_YCDD is not None:
        dipole_outs = scale * _wide(torch.einsum("ycud,ycvd->ycuv", residuals, dipoles_YCDD))
        moved = moved + (_wide(grads) * dipole_outs).sum(-1, keepdim=True)
        weighted = (weights * _wide(grads)).to(dtype)
        grad_dipoles = scale * torch.einsum("ycuv,ycud->ycvd", weighted, residuals)
        grad_residuals += scale * _wide(torch.einsum("ycuv,ycvd->ycud", weighted, dipoles_YCDD))
    grad_logits = shares * moved
    grad_residuals += scale * _wide(torch.einsum("ycuk,yckd->ycud", grad_logits.to(dtype), summaries.keys))
    grad_keys = scale * torch.einsum("ycuk,ycud->yckd", grad_logits.to(dtype), residuals)
    grad_values = torch.einsum("ycuk,ycud->yckd", shares.to(dtype), grads)
    deltas = (_wide(grad_keys) * _wide(summaries.keys)).sum(-1)
    deltas = deltas + (_wide(grad_values) * _wide(summaries.values)).sum(-1) - grad_logits.sum(2)
    grad_queries = scatter_members(grad_residuals.to(dtype), members, counts, queries_BHRND.shape[3])
    return QueryGrads(
        grad_queries.view(queries_BHRND.shape),
        grad_residuals.sum(2),
        grad_keys.contiguous(),
        grad_values.contiguous(),
        deltas,
        None if grad_dipoles is None else grad_dipoles.contiguous(),
    )


def mix_dipoles_backward_reference(
    logits_YCK: Tensor, covariances_ZKDD: Tensor, grad_YCDD: Tensor, group: int, ranges: int
) -> tuple[Tensor, Tensor]:
    """Gradients by the logits [Y, C, K] and, for each query head apart, by the covariances [Y, K, D, D]."""
    covariances = _for_queries(covariances_ZKDD, group, ranges)
    shares = logits_YCK.softmax(-1)
    by_share = _wide(torch.einsum("ycvd,ykvd->yck", grad_YCDD, covariances))
    by_logit = shares * (by_share - (shares * by_share).sum(-1, keepdim=True))
    return by_logit, torch.einsum("yck,ycvd->ykvd", shares.to(grad_YCDD.dtype), grad_YCDD).contiguous()


def summarise_keys_backward_reference(
    means_YCD: Tensor,
    keys_BERMD: Tensor,
    values_BERMD: Tensor,
    clusters: BoundedClusters,
    logits_YCK: Tensor,
    grads: QueryGrads,
    scale: float,
    group: int,
    moments: KeyValueMoments | None = None,
    grad_covariances_ZKDD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through stage 1 and the covariances: by keys and by values, for each query head apart, [B, H, R, M, D]
    (through the covariances with the first head of a group only), and by the query means [Y, C, D] float32."""
    batch, kv_heads, ranges, count, dim = keys_BERMD.shape
    members = _for_queries(clusters.members, group, ranges)
    counts = _for_queries(clusters.counts, group, ranges)
    keys = _for_queries(gather_members(keys_BERMD, clusters.members, clusters.counts), group, ranges)
    values = _for_queries(gather_members(values_BERMD, clusters.members, clusters.counts), group, ranges)
    filled = _for_queries(clusters.filled, group, ranges)[:, None]
    dtype = keys.dtype
    logits = _wide(torch.einsum("ycd,ykud->ycku", means_YCD, keys)) * scale
    past = torch.where(logits_YCK.isneginf(), 0, logits_YCK)[..., None]
    shares = torch.where(filled, torch.exp(torch.where(filled, logits - past, 0)), 0)
    moved = _wide(torch.einsum("yckd,ykud->ycku", grads.keys, keys))
    moved = moved + _wide(torch.einsum("yckd,ykud->ycku", grads.values, values))
    grad_logits = (shares * (moved - grads.deltas[..., None])).to(dtype)
    shares = shares.to(dtype)
    grad_keys = scale * _wide(torch.einsum("ycku,ycd->ykud", grad_logits, means_YCD))
    grad_keys = grad_keys + _wide(torch.einsum("ycku,yckd->ykud", shares, grads.keys))
    grad_values = _wide(torch.einsum("ycku,yckd->ykud", shares, grads.values))
    grad_means = scale * _wide(torch.einsum("ycku,ykud->ycd", grad_logits, keys))
    if moments is not None and grad_covariances_ZKDD is not None:
        first = torch.arange(batch * kv_heads * group * ranges, device=keys.device)
        first = (first // ranges % group == 0).to(grad_keys.dtype)[:, None, None, None]
        share = first / counts.clamp(min=1)[..., None, None]
        apart_keys = keys - _for_queries(moments.keys, group, ranges)[:, :, None]
        apart_values = values - _for_queries(moments.values, group, ranges)[:, :, None]
        by_covariance = _for_queries(grad_covariances_ZKDD, group, ranges)
        grad_keys = grad_keys + share * _wide(torch.einsum("ykvd,ykuv->ykud", by_covariance, apart_values))
        grad_values = grad_values + share * _wide(torch.einsum("ykvd,ykud->ykuv", by_covariance, apart_keys))
    shape = (batch, kv_heads * group, ranges, count, dim)
    return (
        scatter_members(grad_keys.to(dtype), members, counts, count).view(shape),
        scatter_members(grad_values.to(dtype), members, counts, count).view(shape),
        grad_means,
    )


def finish_queries_reference(
    grad_queries_BHRND: Tensor, clusters: BoundedClusters, grad_means_YCD: Tensor, sums_YCD: Tensor
) -> None:
    """Adds, in place, the gradient through the cluster means to those by the residuals."""
    sizes = clusters.counts.clamp(min=1)[..., None]
    shift = ((grad_means_YCD - sums_YCD) / sizes)[:, :, None].expand(-1, -1, clusters.members.shape[2], -1)
    count = grad_queries_BHRND.shape[3]
    added = scatter_members(shift, clusters.members, clusters.counts, count).view(grad_queries_BHRND.shape)
    grad_queries_BHRND.copy_(grad_queries_BHRND + added)


def _for_queries(of_keys: Tensor, group: int, ranges: int) -> Tensor:
    """What belongs to the problems of KV heads [Z, ...], for the problems of query heads [Y, ...]."""
    if group == 1:
        return of_keys
    split = of_keys.view(-1, 1, ranges, *of_keys.shape[1:])
    return split.expand(-1, group, *split.shape[2:]).flatten(0, 2)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
