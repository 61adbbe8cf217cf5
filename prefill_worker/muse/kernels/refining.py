"""Stage 2: residual queries attend to the summaries of their cluster, and to the dipole; and its backward.

Shape legend: B batch, H query heads, R ranges, N queries of a range, Y = B*H*R, C query clusters, K key clusters,
U places of a cluster, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_worker.muse.kernels.clusters import BoundedClusters
from prefill_worker.muse.kernels.layout import (
    Constants,
    load_rows,
    members_from,
    padded,
    row_ptrs,
    rows_at_a_time,
    rows_in,
    rows_of,
)
from prefill_worker.muse.kernels.reference import QueryGrads, Summaries

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


def attend_summaries(
    queries_BHRND: Tensor,
    clusters: BoundedClusters,
    summaries: Summaries,
    dipoles_YCDD: Tensor | None,
    scale: float,
    out_BHRND: Tensor,
    lse_BHRN: Tensor,
    merge: bool,
) -> None:
    """`prefill_worker.muse.kernels.reference.attend_summaries_into_reference`."""
    heads, ranges, _, dim = queries_BHRND.shape[1:]
    problems, query_clusters, room = clusters.members.shape
    key_clusters, whole = summaries.logits.shape[2], queries_BHRND.dtype != torch.float32
    attend_kernel[(problems * query_clusters,)](
        rows_in(queries_BHRND),
        clusters,
        summaries,
        dipoles_YCDD,
        rows_in(out_BHRND),
        rows_in(lse_BHRN),
        heads,
        ranges,
        query_clusters,
        key_clusters,
        room,
        scale,
        K=Constants.of(queries_BHRND, rows_at_a_time(room, 64 if whole else 32), clusters=key_clusters),
        DIPOLE=dipoles_YCDD is not None,
        MERGE=merge,
        num_warps=4 if dim <= 64 else 8,
        num_stages=2,
    )


@triton.jit
def summaries_of(index: tl.tensor, key_clusters: tl.tensor, K: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Numbers of a query cluster's summaries, where their vectors are, and which of them there are."""
    own = tl.arange(0, K.CLUSTERS)
    exists = own < key_clusters
    row = index * key_clusters + own
    return row, row[:, None] * K.DIM + tl.arange(0, K.DIM)[None, :], exists


@triton.jit
def load_summaries(
    summaries: tl.tensor, index: tl.tensor, key_clusters: tl.tensor, K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys, values and logits (to the base 2; -inf where there are none) that one query cluster attends to."""
    keys_ptr, values_ptr, logits_ptr = summaries
    row, at, exists = summaries_of(index, key_clusters, K)
    keys = tl.load(keys_ptr + at, mask=exists[:, None], other=0.0)
    values = tl.load(values_ptr + at, mask=exists[:, None], other=0.0)
    return keys, values, tl.load(logits_ptr + row, mask=exists, other=float("-inf")) * _LOG2E


@triton.jit(do_not_specialize=["heads", "ranges", "query_clusters", "key_clusters", "room"])
def attend_kernel(
    query_rows: tl.tensor,
    clusters: tl.tensor,
    summaries: tl.tensor,
    dipoles_ptr: tl.tensor,
    out_rows: tl.tensor,
    lse_rows: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    room: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    DIPOLE: tl.constexpr,
    MERGE: tl.constexpr,
) -> None:
    """One program per (query cluster, problem)."""
    members_ptr, counts_ptr, means_ptr = clusters
    index = tl.program_id(0).to(tl.int64)
    problem = tl.program_id(0) // query_clusters
    query_rows = rows_of(query_rows, problem, heads, ranges)
    out_rows = rows_of(out_rows, problem, heads, ranges)
    lse_ptr, lse_of_point = rows_of(lse_rows, problem, heads, ranges)
    members_ptr += index * room
    count = tl.load(counts_ptr + index)
    dims = tl.arange(0, K.DIM)
    keys, values, biases = load_summaries(summaries, index, key_clusters, K)
    mean = tl.load(means_ptr + index * K.DIM + dims).to(tl.float32)
    if DIPOLE:
        dipole = tl.load(dipoles_ptr + index * (K.DIM * K.DIM) + dims[:, None] * K.DIM + dims[None, :])
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        queries = load_rows(query_rows, at, inside, K)
        residuals = (queries.to(tl.float32) - mean[None, :]).to(queries.dtype)
        logits = tl.dot(residuals, tl.trans(keys), input_precision=K.PRECISION) * (scale * _LOG2E)
        logits += biases[None, :]
        peak = tl.max(logits, 1)
        weights = tl.exp2(logits - peak[:, None])
        total = tl.sum(weights, 1)
        out = tl.dot(weights.to(values.dtype), values, input_precision=K.PRECISION) / total[:, None]
        if DIPOLE:
            out += tl.dot(residuals, tl.trans(dipole), input_precision=K.PRECISION) * scale
        lse = (peak + tl.log2(total)) * _LN2
        into = row_ptrs(out_rows, at, K)
        lse_ptrs = lse_ptr + at * lse_of_point
        if MERGE:
            old_lse = tl.load(lse_ptrs, mask=inside, other=0.0)
            old_out = tl.load(into, mask=inside[:, None], other=0.0).to(tl.float32)
            higher = tl.maximum(old_lse, lse)
            old_share = tl.exp2((old_lse - higher) * _LOG2E)
            share = tl.exp2((lse - higher) * _LOG2E)
            out = (old_out * old_share[:, None] + out * share[:, None]) / (old_share + share)[:, None]
            lse = higher + tl.log2(old_share + share) * _LN2
        tl.store(into, out.to(into.dtype.element_ty), mask=inside[:, None])
        tl.store(lse_ptrs, lse, mask=inside)


_BOTH, _SUMMARIES, _DIPOLES = 0, 1, 2
"""Which sums a launch of the backward kernel keeps; wide heads need two launches."""


def attend_summaries_backward(
    queries_BHRND: Tensor,
    clusters: BoundedClusters,
    summaries: Summaries,
    dipoles_YCDD: Tensor | None,
    scale: float,
    out_BHRND: Tensor,
    lse_BHRN: Tensor,
    grad_BHRND: Tensor,
) -> QueryGrads:
    """`prefill_worker.muse.kernels.reference.attend_summaries_backward_reference`."""
    heads, ranges, _, dim = queries_BHRND.shape[1:]
    problems, query_clusters, room = clusters.members.shape
    key_clusters = summaries.logits.shape[2]
    device = queries_BHRND.device
    dipole = dipoles_YCDD is not None
    grads = QueryGrads(
        torch.empty(queries_BHRND.shape, dtype=queries_BHRND.dtype, device=device),
        torch.empty(problems, query_clusters, dim, device=device),
        torch.empty_like(summaries.keys),
        torch.empty_like(summaries.values),
        torch.empty_like(summaries.logits),
        torch.empty_like(dipoles_YCDD) if dipoles_YCDD is not None else None,
    )
    wide = dim > 64 or padded(key_clusters) > 64 or queries_BHRND.dtype == torch.float32
    launches = (_SUMMARIES, _DIPOLES) if wide and dipole else (_BOTH if dipole else _SUMMARIES,)
    for sums in launches:
        attend_backward_kernel[(problems * query_clusters,)](
            rows_in(queries_BHRND),
            clusters,
            summaries,
            dipoles_YCDD,
            rows_in(out_BHRND),
            rows_in(lse_BHRN),
            rows_in(grad_BHRND),
            (rows_in(grads.queries), *grads[1:]),
            heads,
            ranges,
            query_clusters,
            key_clusters,
            room,
            scale,
            K=Constants.of(queries_BHRND, rows_at_a_time(room, 32), clusters=key_clusters),
            DIPOLE=dipole,
            SUMS=sums,
            num_warps=8,
            num_stages=1,
        )
    return grads


def finish_queries(
    grad_queries_BHRND: Tensor, clusters: BoundedClusters, grad_means_YCD: Tensor, sums_YCD: Tensor
) -> None:
    """`prefill_worker.muse.kernels.reference.finish_queries_reference`."""
    heads, ranges = grad_queries_BHRND.shape[1:3]
    problems, query_clusters, room = clusters.members.shape
    finish_kernel[(problems * query_clusters,)](
        rows_in(grad_queries_BHRND),
        clusters,
        grad_means_YCD,
        sums_YCD,
        heads,
        ranges,
        query_clusters,
        room,
        K=Constants.of(grad_queries_BHRND, rows_at_a_time(room, 64)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["heads", "ranges", "query_clusters", "key_clusters", "room"])
def attend_backward_kernel(
    query_rows: tl.tensor,
    clusters: tl.tensor,
    summaries: tl.tensor,
    dipoles_ptr: tl.tensor,
    out_rows: tl.tensor,
    lse_rows: tl.tensor,
    grad_rows: tl.tensor,
    grads: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    room: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    DIPOLE: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    """One program per (query cluster, problem). SUMS: 0 all, 1 all but the dipole's gradient, 2 that alone."""
    members_ptr, counts_ptr, means_ptr = clusters
    into_rows, sums_ptr, grad_keys_ptr, grad_values_ptr, deltas_ptr, grad_dipoles_ptr = grads
    index = tl.program_id(0).to(tl.int64)
    problem = tl.program_id(0) // query_clusters
    query_rows = rows_of(query_rows, problem, heads, ranges)
    out_rows = rows_of(out_rows, problem, heads, ranges)
    lse_ptr, lse_of_point = rows_of(lse_rows, problem, heads, ranges)
    grad_rows = rows_of(grad_rows, problem, heads, ranges)
    into_rows = rows_of(into_rows, problem, heads, ranges)
    members_ptr += index * room
    count = tl.load(counts_ptr + index)
    dims = tl.arange(0, K.DIM)
    at_dipole = index * (K.DIM * K.DIM) + dims[:, None] * K.DIM + dims[None, :]
    keys, values, biases = load_summaries(summaries, index, key_clusters, K)
    mean = tl.load(means_ptr + index * K.DIM + dims).to(tl.float32)
    dipole = tl.load(dipoles_ptr + at_dipole) if DIPOLE else None
    # Of these, the sums that are not kept are not computed either.
    sums = tl.zeros([K.DIM], tl.float32)
    grad_keys = tl.zeros([K.CLUSTERS, K.DIM], tl.float32)
    grad_values = tl.zeros([K.CLUSTERS, K.DIM], tl.float32)
    grad_biases = tl.zeros([K.CLUSTERS], tl.float32)
    grad_dipole = tl.zeros([K.DIM, K.DIM], tl.float32)
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        queries = load_rows(query_rows, at, inside, K)
        by_out = load_rows(grad_rows, at, inside, K)
        lse = tl.load(lse_ptr + at * lse_of_point, mask=inside, other=float("inf")) * _LOG2E
        residuals, shares = share_queries(queries, mean, inside, keys, biases, lse, scale, K)
        if DIPOLE:
            weighted = (tl.sum(shares, 1)[:, None] * by_out.to(tl.float32)).to(queries.dtype)
        if SUMS != 2:
            outs = load_rows(out_rows, at, inside, K)
            by_logit = logit_grads(by_out, outs, values, shares, residuals, dipole, scale, DIPOLE, K)
            grad_biases += tl.sum(by_logit, 0)
            by_logit = by_logit.to(queries.dtype)
            by_residual = tl.dot(by_logit, keys, input_precision=K.PRECISION)
            if DIPOLE:
                by_residual += tl.dot(weighted, dipole, input_precision=K.PRECISION)
            by_residual *= scale
            sums += tl.sum(by_residual, 0)
            grad_keys += tl.dot(tl.trans(by_logit), residuals, input_precision=K.PRECISION)
            grad_values += tl.dot(tl.trans(shares.to(queries.dtype)), by_out, input_precision=K.PRECISION)
            into = row_ptrs(into_rows, at, K)
            tl.store(into, by_residual.to(queries.dtype), mask=inside[:, None])
        if SUMS != 1:
            grad_dipole += tl.dot(tl.trans(weighted), residuals, input_precision=K.PRECISION)
    if SUMS != 2:
        store_summary_grads(
            grad_keys_ptr,
            grad_values_ptr,
            deltas_ptr,
            index,
            key_clusters,
            keys,
            values,
            grad_keys * scale,
            grad_values,
            grad_biases,
            K,
        )
        tl.store(sums_ptr + index * K.DIM + dims, sums)
    if SUMS != 1:
        tl.store(grad_dipoles_ptr + at_dipole, (grad_dipole * scale).to(grad_dipoles_ptr.dtype.element_ty))


@triton.jit
def store_summary_grads(
    grad_keys_ptr: tl.tensor,
    grad_values_ptr: tl.tensor,
    deltas_ptr: tl.tensor,
    index: tl.tensor,
    key_clusters: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    grad_keys: tl.tensor,
    grad_values: tl.tensor,
    grad_biases: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Gradients by the summaries of one query cluster; deltas are of the gradients as they are rounded."""
    by_key = grad_keys.to(grad_keys_ptr.dtype.element_ty)
    by_value = grad_values.to(grad_values_ptr.dtype.element_ty)
    deltas = tl.sum(by_key.to(tl.float32) * keys.to(tl.float32), 1)
    deltas += tl.sum(by_value.to(tl.float32) * values.to(tl.float32), 1)
    row, at, exists = summaries_of(index, key_clusters, K)
    tl.store(grad_keys_ptr + at, by_key, mask=exists[:, None])
    tl.store(grad_values_ptr + at, by_value, mask=exists[:, None])
    tl.store(deltas_ptr + row, deltas - grad_biases, mask=exists)


@triton.jit
def share_queries(
    queries: tl.tensor,
    mean: tl.tensor,
    inside: tl.tensor,
    keys: tl.tensor,
    biases: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Residuals of a tile of queries, zero outside, and the shares of the summaries in the whole softmax."""
    residuals = tl.where(inside[:, None], queries.to(tl.float32) - mean[None, :], 0.0).to(queries.dtype)
    logits = tl.dot(residuals, tl.trans(keys), input_precision=K.PRECISION) * (scale * _LOG2E)
    return residuals, tl.exp2(logits + biases[None, :] - lse[:, None])


@triton.jit
def logit_grads(
    grads: tl.tensor,
    outs: tl.tensor,
    values: tl.tensor,
    shares: tl.tensor,
    residuals: tl.tensor,
    dipole: tl.tensor,
    scale: tl.tensor,
    DIPOLE: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """Gradients by the logits of a tile of queries."""
    moved = tl.dot(grads, tl.trans(values), input_precision=K.PRECISION)
    level = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    if DIPOLE:
        by_dipole = tl.dot(residuals, tl.trans(dipole), input_precision=K.PRECISION) * scale
        level -= tl.sum(grads.to(tl.float32) * by_dipole, 1)
    return shares * (moved - level[:, None])


@triton.jit(do_not_specialize=["heads", "ranges", "query_clusters", "room"])
def finish_kernel(
    into_rows: tl.tensor,
    clusters: tl.tensor,
    grad_means_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    query_clusters: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (query cluster, problem)."""
    members_ptr, counts_ptr, _ = clusters
    index = tl.program_id(0).to(tl.int64)
    problem = tl.program_id(0) // query_clusters
    into_rows = rows_of(into_rows, problem, heads, ranges)
    members_ptr += index * room
    count = tl.load(counts_ptr + index)
    dims = tl.arange(0, K.DIM)
    shift = tl.load(grad_means_ptr + index * K.DIM + dims) - tl.load(sums_ptr + index * K.DIM + dims)
    shift /= tl.maximum(count, 1).to(tl.float32)
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        into = row_ptrs(into_rows, at, K)
        grads = tl.load(into, mask=inside[:, None], other=0.0)
        tl.store(into, (grads.to(tl.float32) + shift[None, :]).to(grads.dtype), mask=inside[:, None])
