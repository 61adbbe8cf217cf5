"""Pieces of the kernels over clusters: what clusters add, and what keys that leave them take away.

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
) -> tl.tensor:
    """Logits [rows, clusters] in units of log2 of one key left in a cluster, -inf where none is."""
    logits = tl.load(logits_ptrs[:, None] + at[None, :], mask=inside, other=0.0)
    taken = tl.load(taken_ptrs[:, None] + at[None, :], mask=inside, other=0.0)
    spread = tl.load(spreads_ptrs[:, None] + at[None, :], mask=inside, other=0.0)
    share = 1.0 / tl.maximum(left, 1).to(tl.float32)
    mean = (logits * sizes.to(tl.float32)[None, :] - taken) * share[None, :]
    weighed = mean * 1.4426950408889634 + spread
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
        weighed = weigh_clusters(logits_ptrs, spreads_ptrs, taken_ptrs, at, live, sizes, left, inside)
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
        weighed = weigh_clusters(logits_ptrs, spreads_ptrs, taken_ptrs, cluster, live, sizes, left, inside)
        at = ids[:, None] * (2 * DIM) + DIM + dims[None, :]
        values = tl.load(rows_ptr + at, mask=live[:, None], other=0.0)
        higher = tl.maximum(peaks, tl.max(weighed, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(weighed - base[:, None])
        taken = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * tl.exp2(peaks - base)[:, None] - taken
        peaks = higher
    return peaks, sums


@triton.jit
def empty_state(DIM: tl.constexpr) -> tl.tensor:
    """Peaks, totals and sums of nothing."""
    return (
        tl.full([16], float("-inf"), tl.float32),
        tl.zeros([16], tl.float32),
        tl.zeros([16, DIM], tl.float32),
    )


@triton.jit
def take_shares(
    cluster: tl.tensor,
    valid: tl.tensor,
    values_ptrs: tl.tensor,
    sizes: tl.tensor,
    logits_ptrs: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Takes `sizes` keys at the means of clusters, with a value each, away from a running softmax."""
    grouped = tl.arange(0, 16) < GROUP
    dims = tl.arange(0, DIM)
    logits = tl.load(
        logits_ptrs[:, None] + cluster[None, :], mask=grouped[:, None] & valid[None, :], other=0.0
    )
    sized = logits * 1.4426950408889634 + tl.log2(tl.maximum(sizes, 1.0))[None, :]
    sized = tl.where(valid[None, :], sized, float("-inf"))
    values = tl.load(values_ptrs[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
    higher = tl.maximum(peaks, tl.max(sized, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(peaks - base)
    weights = tl.exp2(sized - base[:, None])
    taken = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return higher, totals * shrink - tl.sum(weights, 1), sums * shrink[:, None] - taken


@triton.jit
def list_members(
    members_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    count_ptr: tl.tensor,
    begin: tl.tensor,
    sizes: tl.tensor,
    skip: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    capacity: tl.tensor,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> None:
    """Adds members skip..skip+MEMBERS-1 of some clusters to a list, those that are keys first..end-1."""
    member = skip + tl.arange(0, MEMBERS)
    ids = tl.load(
        members_ptr + begin[:, None] + member[None, :], mask=member[None, :] < sizes[:, None], other=-1
    )
    searched = (ids >= first) & (ids < end)
    flat = tl.reshape(searched.to(tl.int32), [AT_ONCE * MEMBERS])
    place = tl.atomic_add(count_ptr, tl.sum(flat, 0), sem="relaxed")
    place += tl.cumsum(flat, 0) - flat
    tl.store(ids_ptr + place, tl.reshape(ids, [AT_ONCE * MEMBERS]), mask=(flat > 0) & (place < capacity))
