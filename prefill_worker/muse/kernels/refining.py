"""Stage 2, forward: residual queries attend to the summaries of their cluster, and to the dipole.

Shape legend: B batch, H query heads, R ranges, N queries of a range, Y = B*H*R, C query clusters, K key clusters,
U places of a cluster, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_worker.muse.kernels.clusters import BoundedClusters
from prefill_worker.muse.kernels.layout import padded, precision, problem_offset, rows_at_a_time, strides
from prefill_worker.muse.kernels.reference import Summaries

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
    key_clusters = summaries.logits.shape[2]
    attend_kernel[(problems * query_clusters,)](
        queries_BHRND,
        clusters.members,
        clusters.counts,
        clusters.centroids,
        summaries.keys,
        summaries.values,
        summaries.logits,
        dipoles_YCDD,
        out_BHRND,
        lse_BHRN,
        heads,
        ranges,
        *strides(queries_BHRND),
        *strides(out_BHRND),
        *strides(lse_BHRN),
        query_clusters,
        key_clusters,
        room,
        scale,
        DIM=dim,
        SUMMARIES=padded(key_clusters),
        TILE=rows_at_a_time(room, 64 if queries_BHRND.dtype != torch.float32 else 32),
        DIPOLE=dipoles_YCDD is not None,
        MERGE=merge,
        PRECISION=precision(queries_BHRND),
        num_warps=4 if dim <= 64 else 8,
        num_stages=2,
    )


@triton.jit
def load_summaries(
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    index: tl.tensor,
    key_clusters: tl.tensor,
    DIM: tl.constexpr,
    SUMMARIES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys, values and logits (to the base 2; -inf where there are none) that one query cluster attends to."""
    own = tl.arange(0, SUMMARIES)
    exists = own < key_clusters
    row = index * key_clusters + own
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    keys = tl.load(keys_ptr + at, mask=exists[:, None], other=0.0)
    values = tl.load(values_ptr + at, mask=exists[:, None], other=0.0)
    return keys, values, tl.load(logits_ptr + row, mask=exists, other=float("-inf")) * _LOG2E


@triton.jit(do_not_specialize=["heads", "ranges", "query_clusters", "key_clusters", "room"])
def attend_kernel(
    queries_ptr: tl.tensor,
    members_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    means_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    dipoles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    queries_of_batch: tl.tensor,
    queries_of_head: tl.tensor,
    queries_of_range: tl.tensor,
    queries_of_point: tl.tensor,
    out_of_batch: tl.tensor,
    out_of_head: tl.tensor,
    out_of_range: tl.tensor,
    out_of_point: tl.tensor,
    lse_of_batch: tl.tensor,
    lse_of_head: tl.tensor,
    lse_of_range: tl.tensor,
    lse_of_point: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    room: tl.tensor,
    scale: tl.tensor,
    DIM: tl.constexpr,
    SUMMARIES: tl.constexpr,
    TILE: tl.constexpr,
    DIPOLE: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (query cluster, problem)."""
    index = tl.program_id(0).to(tl.int64)
    problem = tl.program_id(0) // query_clusters
    queries_ptr += problem_offset(problem, heads, ranges, queries_of_batch, queries_of_head, queries_of_range)
    out_ptr += problem_offset(problem, heads, ranges, out_of_batch, out_of_head, out_of_range)
    lse_ptr += problem_offset(problem, heads, ranges, lse_of_batch, lse_of_head, lse_of_range)
    members_ptr += index * room
    count = tl.load(counts_ptr + index)
    dims = tl.arange(0, DIM)
    keys, values, biases = load_summaries(
        keys_ptr, values_ptr, logits_ptr, index, key_clusters, DIM, SUMMARIES
    )
    mean = tl.load(means_ptr + index * DIM + dims).to(tl.float32)
    if DIPOLE:
        dipole = tl.load(dipoles_ptr + index * (DIM * DIM) + dims[:, None] * DIM + dims[None, :])
    for start in range(0, count, TILE):
        line = start + tl.arange(0, TILE)
        inside = line < count
        at = tl.load(members_ptr + line, mask=inside, other=0).to(tl.int64)
        queries = tl.load(
            queries_ptr + at[:, None] * queries_of_point + dims[None, :], mask=inside[:, None], other=0.0
        )
        residuals = (queries.to(tl.float32) - mean[None, :]).to(queries.dtype)
        logits = tl.dot(residuals, tl.trans(keys), input_precision=PRECISION) * (scale * _LOG2E)
        logits += biases[None, :]
        peak = tl.max(logits, 1)
        weights = tl.exp2(logits - peak[:, None])
        total = tl.sum(weights, 1)
        out = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION) / total[:, None]
        if DIPOLE:
            out += tl.dot(residuals, tl.trans(dipole), input_precision=PRECISION) * scale
        lse = (peak + tl.log2(total)) * _LN2
        into = out_ptr + at[:, None] * out_of_point + dims[None, :]
        if MERGE:
            old_lse = tl.load(lse_ptr + at * lse_of_point, mask=inside, other=0.0)
            old_out = tl.load(into, mask=inside[:, None], other=0.0).to(tl.float32)
            higher = tl.maximum(old_lse, lse)
            old_share = tl.exp2((old_lse - higher) * _LOG2E)
            share = tl.exp2((lse - higher) * _LOG2E)
            out = (old_out * old_share[:, None] + out * share[:, None]) / (old_share + share)[:, None]
            lse = higher + tl.log2(old_share + share) * _LN2
        tl.store(into, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(lse_ptr + at * lse_of_point, lse, mask=inside)
