"""Pieces of the remainder's kernel: what clusters add, and what keys that left them take away.

Logits are in units of log2; a program's result is a peak, a total and a sum, as in `partials`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh_clusters(
    logits_ptrs: tl.tensor,
    spreads_ptrs: tl.tensor,
    taken_ptrs: tl.tensor,
    at: tl.tensor,
    live: tl.tensor,
    sizes: tl.tensor,
    left: tl.tensor,
    inside: tl.tensor,
    CENTRED: tl.constexpr,
) -> tl.tensor:
    """Logits [rows, clusters] in units of log2 of one key left in a cluster, -inf where none is."""
    logits = tl.load(logits_ptrs[:, None] + at[None, :], mask=inside, other=0.0)
    if CENTRED:
        taken = tl.load(taken_ptrs[:, None] + at[None, :], mask=inside, other=0.0)
        spread = tl.load(spreads_ptrs[:, None] + at[None, :], mask=inside, other=0.0)
        share = 1.0 / tl.maximum(left, 1).to(tl.float32)
        mean = (logits * sizes.to(tl.float32)[None, :] - taken) * share[None, :]
        weighed = mean * 1.4426950408889634 + spread
    else:
        weighed = logits * 1.4426950408889634
    return tl.where(live[None, :], weighed, float("-inf"))


@triton.jit
def add_clusters(
    logits_ptrs: tl.tensor,
    spreads_ptrs: tl.tensor,
    taken_ptrs: tl.tensor,
    left_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    values_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Peaks, totals and sums over clusters first..end-1, as if no value had been taken out."""
    grouped = tl.arange(0, 16) < GROUP
    dims = tl.arange(0, DIM)
    peaks = tl.full([16], float("-inf"), tl.float32)
    totals = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        exists = at < end
        left = tl.load(left_ptr + at, mask=exists, other=0)
        sizes = tl.load(sizes_ptr + at, mask=exists, other=0)
        values = tl.load(values_ptr + at[:, None] * DIM + dims[None, :], mask=exists[:, None], other=0.0)
        live = left > 0
        inside = grouped[:, None] & exists[None, :]
        weighed = weigh_clusters(
            logits_ptrs, spreads_ptrs, taken_ptrs, at, live, sizes, left, inside, CENTRED
        )
        number = tl.maximum(sizes, 1).to(tl.float32)
        weighed += tl.log2(number)[None, :]
        higher = tl.maximum(peaks, tl.max(weighed, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peaks - base)
        weights = tl.exp2(weighed - base[:, None])
        share = left.to(tl.float32) / number
        totals = totals * shrink + tl.sum(weights * share[None, :], 1)
        added = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * shrink[:, None] + added
        peaks = higher
    return peaks, totals, sums


@triton.jit
def take_values(
    logits_ptrs: tl.tensor,
    spreads_ptrs: tl.tensor,
    taken_ptrs: tl.tensor,
    left_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    assignment_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CENTRED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Peaks and sums of the values of entries first..end-1 of a list, to be taken away from their clusters'."""
    grouped = tl.arange(0, 16) < GROUP
    dims = tl.arange(0, DIM)
    peaks = tl.full([16], float("-inf"), tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    for start in tl.range(first, end, TILE):
        entry = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + entry, mask=entry < end, other=-1)
        cluster = tl.load(assignment_ptr + ids, mask=ids >= 0, other=-1)
        member = cluster >= 0
        left = tl.load(left_ptr + cluster, mask=member, other=0)
        sizes = tl.load(sizes_ptr + cluster, mask=member, other=0)
        live = left > 0
        inside = grouped[:, None] & live[None, :]
        weighed = weigh_clusters(
            logits_ptrs, spreads_ptrs, taken_ptrs, cluster, live, sizes, left, inside, CENTRED
        )
        at = ids[:, None] * (2 * DIM) + DIM + dims[None, :]
        values = tl.load(rows_ptr + at, mask=live[:, None], other=0.0)
        higher = tl.maximum(peaks, tl.max(weighed, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(weighed - base[:, None])
        taken = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * tl.exp2(peaks - base)[:, None] - taken
        peaks = higher
    return peaks, sums
