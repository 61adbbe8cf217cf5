"""The weight from which on clusters are selected: bisected, so that a budget is never exceeded and nothing is sorted.

Clusters of equal weight are selected all or not at all by that. Where it would leave much of a budget unused, a second
bisection goes over the numbers that they draw (`border`).

What clusters count against the budget are those of their keys that are searched. Clusters are of all keys of a context.
While a session is near the context's end, its recent window covers the last of them; they are attended anyway and must
not use up what is meant for others. Each program then counts for itself, before it waits for the launch before. Once
the window has left the context, nothing is counted, copied or read twice.

Shape legend: C clusters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.border import draw
from decode_engine.kernels.record_fields import (
    ASSIGNMENT,
    END,
    FIRST,
    KEYS,
    UNCLUSTERED,
    field,
    searched_keys,
)

RANGE = 24
"""Distance from the heaviest cluster, in units of log2, beyond which clusters are not told apart: what is lighter by
2^-24 would not change a float32 sum."""
TURNS = 16
"""Of the bisection: weights are told apart up to a 2^-16 of that range."""
DRAW_TURNS = 24
"""Of that among clusters of equal weight; few rows have such."""
LEAST_DRAW = -(2**31)
UNUSED = 8
"""Part of the budget that may be left unused before clusters of equal weight are told apart."""

_LEAST_DRAW = tl.constexpr(LEAST_DRAW)


@triton.jit
def passing(
    weights: tl.tensor,
    cluster: tl.tensor,
    least: tl.tensor,
    above: tl.tensor,
    draws: tl.tensor,
    head: tl.tensor,
) -> tl.tensor:
    """Whether clusters' weights reach `above`, or `least` and they draw less than `draws`."""
    passes = weights >= above
    if draws > _LEAST_DRAW:
        passes = passes | ((weights >= least) & (draw(cluster, head) < draws))
    return passes


@triton.jit
def keys_from(
    weights: tl.tensor,
    sizes: tl.tensor,
    weights_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    clusters: tl.tensor,
    least: tl.tensor,
    above: tl.tensor,
    draws: tl.tensor,
    head: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    EVERY: tl.constexpr,
) -> tl.tensor:
    """Keys of the clusters that pass (`passing`); without EVERY of those that earlier programs own."""
    at = tl.arange(0, BLOCK)
    if SINGLE:
        counted = passing(weights, at, least, above, draws, head)
        if not EVERY:
            counted = counted & ((at // 16) % programs < program)
        return tl.sum(tl.where(counted, sizes, 0), 0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, clusters, BLOCK):
        some = tl.load(weights_ptr + start + at, mask=start + at < clusters, other=0)
        number = tl.load(sizes_ptr + start + at, mask=start + at < clusters, other=0)
        counted = passing(some, start + at, least, above, draws, head)
        if not EVERY:
            counted = counted & (((start + at) // 16) % programs < program)
        total += tl.where(counted, number, 0)
    return tl.sum(total, 0)


@triton.jit
def cut(
    weights: tl.tensor,
    sizes: tl.tensor,
    weights_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    clusters: tl.tensor,
    heaviest: tl.tensor,
    keep: tl.tensor,
    head: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    RANGE: tl.constexpr,
    TURNS: tl.constexpr,
    DRAW_TURNS: tl.constexpr,
    UNUSED: tl.constexpr,
) -> tl.tensor:
    """Which clusters are selected: `least`, `above` and `draws` of `passing`."""
    above = heaviest + 1
    below = tl.maximum(above - (RANGE << 23), 0)
    lowest = below * 0
    none = lowest + _LEAST_DRAW
    every = keys_from(
        weights, sizes, weights_ptr, sizes_ptr, clusters, lowest, lowest, none, head, program, programs,
        BLOCK, SINGLE, True,
    )  # fmt: skip
    least, used = lowest, lowest
    for _ in range(TURNS):
        middle = below + (above - below) // 2
        number = keys_from(
            weights, sizes, weights_ptr, sizes_ptr, clusters, middle, middle, none, head, program, programs,
            BLOCK, SINGLE, True,
        )  # fmt: skip
        over = number > keep
        below = tl.where(over, middle, below)
        least = tl.where(over, middle, least)
        above = tl.where(over, above, middle)
        used = tl.where(over, used, number)
    above = tl.where(every <= keep, lowest, above)
    draws = none
    if (every > keep) & ((keep - used) * UNUSED > keep):
        span = lowest.to(tl.int64) + (1 << 32)
        for _ in range(DRAW_TURNS):
            span = span // 2
            more = (draws + span).to(tl.int32)
            number = keys_from(
                weights, sizes, weights_ptr, sizes_ptr, clusters, least, above, more, head, program, programs,
                BLOCK, SINGLE, True,
            )  # fmt: skip
            draws = tl.where(number > keep, draws, more)
    return least, above, draws


@triton.jit
def any_outside(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Whether a sequence's clusters hold keys that are not searched: recent ones, or sinks that are not left out."""
    before = field(records_ptr, b, FIRST) > field(records_ptr, b, UNCLUSTERED)
    return before | (field(records_ptr, b, END) < field(records_ptr, b, KEYS))


@triton.jit
def count_searched(
    records_ptr: tl.tensor,
    b: tl.tensor,
    head: tl.tensor,
    sizes_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    clusters: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> None:
    """Writes how many keys of each of a row's clusters [C] are searched; sizes are of all of them."""
    for start in range(0, clusters, 8 * AT_ONCE):
        at = start + tl.arange(0, 8 * AT_ONCE)
        sizes = tl.load(sizes_ptr + at, mask=at < clusters, other=0)
        tl.store(counts_ptr + at, sizes, mask=at < clusters)
    tl.debug_barrier()
    keys = field(records_ptr, b, KEYS)
    assignment_ptr = field(records_ptr, b, ASSIGNMENT).to(tl.pointer_type(tl.int32)) + head * keys
    unclustered = field(records_ptr, b, UNCLUSTERED).to(tl.int32)
    first, end = searched_keys(records_ptr, b)
    count_off(assignment_ptr, counts_ptr, unclustered, first, AT_ONCE)
    count_off(assignment_ptr, counts_ptr, end, keys.to(tl.int32), AT_ONCE)
    tl.debug_barrier()


@triton.jit
def count_off(
    assignment_ptr: tl.tensor, counts_ptr: tl.tensor, begin: tl.tensor, end: tl.tensor, AT_ONCE: tl.constexpr
) -> None:
    """Takes keys begin..end-1 off the counts of their clusters."""
    for start in range(begin, end, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        cluster = tl.load(assignment_ptr + at, mask=at < end, other=-1)
        tl.atomic_add(
            counts_ptr + cluster, tl.full([AT_ONCE], -1, tl.int32), mask=cluster >= 0, sem="relaxed"
        )
