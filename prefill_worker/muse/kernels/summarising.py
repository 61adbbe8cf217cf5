"""Stage 1: query means attend to the keys of each key cluster; forward and backward.

Shape legend: B batch, H query heads, E KV heads, R ranges, M keys of a range, Y = B*H*R, Z = B*E*R, C query clusters,
K key clusters, U places of a cluster, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_worker.muse.kernels.clusters import BoundedClusters
from prefill_worker.muse.kernels.layout import (
    Constants,
    key_problem,
    load_rows,
    members_from,
    padded,
    rows_at_a_time,
    rows_in,
    rows_of,
)
from prefill_worker.muse.kernels.reference import KeyValueMoments, QueryGrads, Summaries

_MEANS = 64  # query means of one program

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


def summarise_keys(
    means_YCD: Tensor,
    keys_BERMD: Tensor,
    values_BERMD: Tensor,
    clusters: BoundedClusters,
    scale: float,
    group: int,
) -> Summaries:
    """`prefill_worker.muse.kernels.reference.summarise_keys_reference`."""
    problems, query_clusters, dim = means_YCD.shape
    ranges = keys_BERMD.shape[2]
    _, key_clusters, room = clusters.members.shape
    shape = (problems, query_clusters, key_clusters)
    keys, values = (
        torch.empty(*shape, dim, dtype=x.dtype, device=x.device) for x in (keys_BERMD, values_BERMD)
    )
    summaries = Summaries(keys, values, torch.empty(shape, device=keys.device))
    tile = min(_MEANS, padded(query_clusters))
    summarise_kernel[(problems * key_clusters, triton.cdiv(query_clusters, tile))](
        means_YCD,
        rows_in(keys_BERMD),
        rows_in(values_BERMD),
        clusters,
        summaries,
        keys_BERMD.shape[1] * group,
        group,
        ranges,
        query_clusters,
        key_clusters,
        room,
        scale,
        K=Constants.of(keys, rows_at_a_time(room, 64 if keys.dtype != torch.float32 else 32), tile),
        num_warps=4 if dim <= 64 else 8,
        num_stages=2,
    )
    return summaries


def summarise_keys_backward(
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
    """`prefill_worker.muse.kernels.reference.summarise_keys_backward_reference`.

    Every key cluster has its own sums over keys for the query means; they are added up in order.
    """
    problems, query_clusters, dim = means_YCD.shape
    batch, kv_heads, ranges, count, _ = keys_BERMD.shape
    _, key_clusters, room = clusters.members.shape
    heads = kv_heads * group
    shape = (batch, heads, ranges, count, dim)
    grad_keys, grad_values = (
        torch.empty(shape, dtype=x.dtype, device=x.device) for x in (keys_BERMD, values_BERMD)
    )
    grad_means = torch.empty(problems, key_clusters, query_clusters, dim, device=means_YCD.device)
    width = padded(query_clusters)
    dipole = moments is not None and grad_covariances_ZKDD is not None
    most = 32 if width > 64 or dim > 64 or keys_BERMD.dtype == torch.float32 else 64
    summarise_backward_kernel[(problems * key_clusters,)](
        means_YCD,
        rows_in(keys_BERMD),
        rows_in(values_BERMD),
        clusters,
        logits_YCK,
        (grads.keys, grads.values, grads.deltas),
        (None, None) if moments is None else moments[1:],
        grad_covariances_ZKDD,
        (grad_keys, grad_values, grad_means),
        heads,
        group,
        ranges,
        count,
        query_clusters,
        key_clusters,
        room,
        scale,
        K=Constants.of(keys_BERMD, rows_at_a_time(room, most), width),
        DIPOLE=dipole,
        num_warps=8,
        num_stages=1 if dim > 64 or width > 64 else 2,
    )
    return grad_keys, grad_values, grad_means.sum(1)


@triton.jit(do_not_specialize=["heads", "group", "ranges", "query_clusters", "key_clusters", "room"])
def summarise_kernel(
    means_ptr: tl.tensor,
    key_rows: tl.tensor,
    value_rows: tl.tensor,
    clusters: tl.tensor,
    summaries: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    ranges: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    room: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (key cluster, problem; MEANS query means)."""
    members_ptr, counts_ptr, _ = clusters
    out_keys_ptr, out_values_ptr, logits_ptr = summaries
    problem = tl.program_id(0) // key_clusters
    cluster = tl.program_id(0) % key_clusters
    source = key_problem(problem, heads, group, ranges)
    key_rows = rows_of(key_rows, source, heads // group, ranges)
    value_rows = rows_of(value_rows, source, heads // group, ranges)
    own_cluster = source.to(tl.int64) * key_clusters + cluster
    members_ptr += own_cluster * room
    count = tl.load(counts_ptr + own_cluster)
    dims = tl.arange(0, K.DIM)
    own = tl.program_id(1) * K.MEANS + tl.arange(0, K.MEANS)
    exists = own < query_clusters
    row = problem.to(tl.int64) * query_clusters + own
    means = tl.load(means_ptr + row[:, None] * K.DIM + dims[None, :], mask=exists[:, None], other=0.0)
    peak = tl.full([K.MEANS], float("-inf"), tl.float32)
    total = tl.zeros([K.MEANS], tl.float32)
    sum_keys = tl.zeros([K.MEANS, K.DIM], tl.float32)
    sum_values = tl.zeros([K.MEANS, K.DIM], tl.float32)
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        keys = load_rows(key_rows, at, inside, K)
        values = load_rows(value_rows, at, inside, K)
        logits = tl.dot(means, tl.trans(keys), input_precision=K.PRECISION) * (scale * _LOG2E)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(logits - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(keys.dtype)
        sum_keys = sum_keys * shrink[:, None] + tl.dot(weights, keys, input_precision=K.PRECISION)
        sum_values = sum_values * shrink[:, None] + tl.dot(weights, values, input_precision=K.PRECISION)
        peak = higher
    into = row * key_clusters + cluster
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    at_dims = into[:, None] * K.DIM + dims[None, :]
    element = out_keys_ptr.dtype.element_ty
    tl.store(out_keys_ptr + at_dims, (sum_keys * share[:, None]).to(element), mask=exists[:, None])
    tl.store(out_values_ptr + at_dims, (sum_values * share[:, None]).to(element), mask=exists[:, None])
    lse = tl.where(total > 0.0, (peak + tl.log2(tl.where(total > 0.0, total, 1.0))) * _LN2, float("-inf"))
    tl.store(logits_ptr + into, lse, mask=exists)


@triton.jit
def logit_grads(
    by_key: tl.tensor,
    by_value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    delta: tl.tensor,
    shares: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Gradients by the logits of a tile of keys, in the keys' dtype."""
    moved = tl.dot(by_key, tl.trans(keys), input_precision=K.PRECISION)
    moved += tl.dot(by_value, tl.trans(values), input_precision=K.PRECISION)
    return (shares * (moved - delta[:, None])).to(keys.dtype)


@triton.jit
def less_mean(rows: tl.tensor, mean: tl.tensor) -> tl.tensor:
    """Rows relative to their mean, in their dtype."""
    return (rows.to(tl.float32) - mean.to(tl.float32)[None, :]).to(rows.dtype)


@triton.jit(
    do_not_specialize=["heads", "group", "ranges", "keys_count", "query_clusters", "key_clusters", "room"]
)
def summarise_backward_kernel(  # noqa: PLR0915 - what a program does stands in one place
    means_ptr: tl.tensor,
    key_rows: tl.tensor,
    value_rows: tl.tensor,
    clusters: tl.tensor,
    logits_ptr: tl.tensor,
    by_summary: tl.tensor,
    means_of_rows: tl.tensor,
    by_covariance_ptr: tl.tensor,
    grads: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    ranges: tl.tensor,
    keys_count: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    room: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    DIPOLE: tl.constexpr,
) -> None:
    """One program per (key cluster, problem) for all query means."""
    members_ptr, counts_ptr, _ = clusters
    by_key_ptr, by_value_ptr, deltas_ptr = by_summary
    mean_keys_ptr, mean_values_ptr = means_of_rows
    grad_keys_ptr, grad_values_ptr, grad_means_ptr = grads
    problem = tl.program_id(0) // key_clusters
    cluster = tl.program_id(0) % key_clusters
    source = key_problem(problem, heads, group, ranges)
    key_rows = rows_of(key_rows, source, heads // group, ranges)
    value_rows = rows_of(value_rows, source, heads // group, ranges)
    grad_keys_ptr += problem.to(tl.int64) * keys_count * K.DIM
    grad_values_ptr += problem.to(tl.int64) * keys_count * K.DIM
    own_cluster = source.to(tl.int64) * key_clusters + cluster
    members_ptr += own_cluster * room
    count = tl.load(counts_ptr + own_cluster)
    dims = tl.arange(0, K.DIM)
    own = tl.arange(0, K.MEANS)
    exists = own < query_clusters
    row = problem.to(tl.int64) * query_clusters + own
    means = tl.load(means_ptr + row[:, None] * K.DIM + dims[None, :], mask=exists[:, None], other=0.0)
    pair = row * key_clusters + cluster
    at_pair = pair[:, None] * K.DIM + dims[None, :]
    by_key = tl.load(by_key_ptr + at_pair, mask=exists[:, None], other=0.0)
    by_value = tl.load(by_value_ptr + at_pair, mask=exists[:, None], other=0.0)
    lse = tl.load(logits_ptr + pair, mask=exists, other=float("inf")) * _LOG2E
    delta = tl.load(deltas_ptr + pair, mask=exists, other=0.0)
    grad_means = tl.zeros([K.MEANS, K.DIM], tl.float32)
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        keys = load_rows(key_rows, at, inside, K)
        values = load_rows(value_rows, at, inside, K)
        logits = tl.dot(means, tl.trans(keys), input_precision=K.PRECISION) * (scale * _LOG2E)
        shares = tl.exp2(logits - lse[:, None])
        shares = tl.where(inside[None, :], shares, 0.0)
        by_logit = logit_grads(by_key, by_value, keys, values, delta, shares, K)
        shares = shares.to(keys.dtype)
        grad_means += tl.dot(by_logit, keys, input_precision=K.PRECISION)
        grad_keys = tl.dot(tl.trans(by_logit), means, input_precision=K.PRECISION) * scale
        grad_keys += tl.dot(tl.trans(shares), by_key, input_precision=K.PRECISION)
        grad_values = tl.dot(tl.trans(shares), by_value, input_precision=K.PRECISION)
        if DIPOLE:  # noqa: SIM102 - the first is decided when the kernel is compiled
            if (problem // ranges) % heads % group == 0:
                by_covariance = tl.load(
                    by_covariance_ptr + own_cluster * (K.DIM * K.DIM) + dims[:, None] * K.DIM + dims[None, :]
                )
                mean_key = tl.load(mean_keys_ptr + own_cluster * K.DIM + dims)
                mean_value = tl.load(mean_values_ptr + own_cluster * K.DIM + dims)
                part = 1.0 / count.to(tl.float32)
                grad_keys += part * tl.dot(
                    less_mean(values, mean_value), by_covariance, input_precision=K.PRECISION
                )
                grad_values += part * tl.dot(
                    less_mean(keys, mean_key), tl.trans(by_covariance), input_precision=K.PRECISION
                )
        into = at[:, None] * K.DIM + dims[None, :]
        tl.store(grad_keys_ptr + into, grad_keys.to(keys.dtype), mask=inside[:, None])
        tl.store(grad_values_ptr + into, grad_values.to(keys.dtype), mask=inside[:, None])
    row = tl.program_id(0).to(tl.int64) * query_clusters + own
    tl.store(grad_means_ptr + row[:, None] * K.DIM + dims[None, :], grad_means * scale, mask=exists[:, None])
