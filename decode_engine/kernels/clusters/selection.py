"""Selection of clusters up to a token budget, as lists of their keys.

A cluster's weight is the mean over the group's heads of S = exp(q.c) / sum_j N_j exp(q.c_j) (Squeezed Attention eq. 1,
Multipole Attention section 3.2). The weight from which on clusters are selected is bisected, so a budget is never
exceeded and nothing is sorted; by how little it is missed is a matter of the last cluster. Where the heaviest cluster
alone exceeds it, none is selected. Clusters of equal weight are selected all or not at all by that; where it would
leave much of a budget unused, a second bisection goes over the numbers that they draw (`border`).

What clusters count against the budget are those of their keys that are searched. Clusters are of all keys of a context.
While a session is near the context's end, its recent window covers the last of them; they are attended anyway and must
not use up what is meant for others. Each program then counts for itself, before it waits for the launch before. Once
the window has left the context, nothing is counted, copied or read twice.

A row's programs all find the same threshold, each on its own: that takes less time than to wait for one that does.
Then each lists the members of its share of the clusters, at a place that follows from those before it.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, P programs per row, W keys of a list,
O clusters that a program owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import Partials
from decode_engine.kernels.attention.sparse_attention import ClusterScores, KeyLists
from decode_engine.kernels.border import draw, halve, passes
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import (
    ASSIGNMENT,
    CLUSTERS,
    END,
    FIRST,
    KEEP,
    KEYS,
    MEMBERS,
    OFFSETS,
    SIZES,
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
UNUSED = 8
"""Part of the budget that may be left unused before clusters of equal weight are told apart."""


@triton.jit
def keys_from(
    row: tl.tensor, cut: tl.tensor, head: tl.tensor, K: tl.constexpr, EVERY: tl.constexpr
) -> tl.tensor:
    """Keys of the clusters that a cut keeps; without EVERY of those that earlier programs own.

    row: weights and sizes of its first BLOCK clusters, pointers to those of all, and how many there are.
    """
    weights, sizes, weights_ptr, sizes_ptr, clusters = row
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, K.BLOCK)
    if K.SINGLE:
        counted = passes(weights, draw(at, head), cut)
        if not EVERY:
            counted = counted & ((at // 16) % programs < program)
        return tl.sum(tl.where(counted, sizes, 0), 0)
    total = tl.zeros([K.BLOCK], tl.int32)
    for start in range(0, clusters, K.BLOCK):
        some = tl.load(weights_ptr + start + at, mask=start + at < clusters, other=0)
        number = tl.load(sizes_ptr + start + at, mask=start + at < clusters, other=0)
        counted = passes(some, draw(start + at, head), cut)
        if not EVERY:
            counted = counted & (((start + at) // 16) % programs < program)
        total += tl.where(counted, number, 0)
    return tl.sum(total, 0)


@triton.jit
def too_many(held: tl.tensor, place: tl.tensor, width: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Whether clusters from the next weight on hold more keys than are to be kept."""
    row, keep, head = held
    return (keys_from(row, (place + width, place + width, 0), head, K, True) > keep).to(tl.int32)


@triton.jit
def few_enough(held: tl.tensor, place: tl.tensor, width: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Whether with what draws less than the next number, in 256ths, no more keys are held than are to be kept."""
    row, keep, head, least, above = held
    return (keys_from(row, (least, above, (place + width) << 8), head, K, True) <= keep).to(tl.int32)


@triton.jit
def cut_of(
    row: tl.tensor, heaviest: tl.tensor, keep: tl.tensor, head: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """Which clusters are selected: a cut (`border`)."""
    lightest = heaviest + 1 - (K.RANGE << 23)
    least = halve(too_many, (row, keep, head), lightest, K.RANGE << 23, K.TURNS, 2, K)
    above = least + (K.RANGE << 23 - K.TURNS)
    if least == lightest:
        least = lightest * 0
        above = tl.where(keys_from(row, (0, 0, 0), head, K, True) > keep, above, 0)
    draws = lightest * 0 - (1 << 23)
    unused = keep - keys_from(row, (above, above, 0), head, K, True)
    if (above > 0) & (unused * K.UNUSED > keep):
        draws = halve(few_enough, (row, keep, head, least, above), draws, 1 << 24, K.DRAW_TURNS, 2, K)
    return least, above, draws << 8


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


_WEIGHED_AT_ONCE = 8192
"""Clusters that a program weighs at once; more take more registers than it has."""
_LISTED_AT_ONCE = 128
"""Clusters whose members a program lists at once."""
_AT_ONCE = 16384
"""Clusters of a row that a program holds in registers; of more, weights are read again in every turn."""


class SelectionConstants(NamedTuple):
    """What the kernel is compiled for. Of clusters, BLOCK are held at once, which are all of them where SINGLE; CHUNK
    are weighed at once, of AT_ONCE the members listed, AT_MEMBER of each; OWN is room for a program's own ones."""

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    HEADS_TILE: tl.constexpr
    SPLITS: tl.constexpr
    BLOCK: tl.constexpr
    SINGLE: tl.constexpr
    OWN: tl.constexpr
    CHUNK: tl.constexpr
    AT_ONCE: tl.constexpr
    AT_MEMBER: tl.constexpr
    RANGE: tl.constexpr
    TURNS: tl.constexpr
    DRAW_TURNS: tl.constexpr
    UNUSED: tl.constexpr


@dataclass(frozen=True, slots=True)
class SelectionBuffers:
    """What programs of a row leave for themselves. chosen_RPO, places_RPO: [R, P, O] int32, selected clusters and where
    their members go. weights_RC: [R, C] int32, the bits of float32 weights, in the same order. searched_RPC: [R, P, C]
    int32, searched keys of every cluster, used while there are others."""

    chosen_RPO: Tensor
    places_RPO: Tensor
    weights_RC: Tensor
    searched_RPC: Tensor

    @staticmethod
    def allocate(rows: int, width: int, device: torch.device | str) -> SelectionBuffers:
        programs = max(1, min(8, 64 // rows, triton.cdiv(width, 16)))
        own = max(16, int(triton.next_power_of_2(triton.cdiv(width, programs * 16))) * 16)
        return SelectionBuffers(
            torch.empty(rows, programs, own, dtype=torch.int32, device=device),
            torch.empty(rows, programs, own, dtype=torch.int32, device=device),
            torch.empty(rows, width, dtype=torch.int32, device=device),
            torch.empty(rows, programs, width, dtype=torch.int32, device=device),
        )


def select_clusters(
    records_BF: Tensor,
    scores: ClusterScores,
    partials: Partials,
    splits: int,
    buffers: SelectionBuffers,
    lists: KeyLists,
) -> None:
    """Fills `lists`, one segment a row, with the members of selected clusters.

    partials: the first `splits` slots are those of the lookup that filled `scores`. Members outside the searched range
    are -1, and do not count for the budget.
    """
    rows, width, group = scores.logits_RCG.shape
    _, programs, own = buffers.chosen_RPO.shape
    block = min(int(triton.next_power_of_2(width)), _AT_ONCE)
    constants = (
        rows // len(records_BF), group, triton.next_power_of_2(group), triton.next_power_of_2(splits), block,
        width <= block, own, block if width <= block <= _WEIGHED_AT_ONCE else min(block, 2048), _LISTED_AT_ONCE, 32,
        RANGE, TURNS, DRAW_TURNS, UNUSED,
    )  # fmt: skip
    select_kernel[(programs, rows)](
        records_BF,
        scores.logits_RCG,
        partials[1:],
        (buffers.weights_RC, buffers.chosen_RPO, buffers.places_RPO, buffers.searched_RPC),
        (lists.ids_RPW, lists.counts_RP),
        width,
        partials.peaks_RSG.shape[1],
        splits,
        lists.ids_RPW.shape[2],
        K=SelectionConstants(*map(tl.constexpr, constants)),
        num_warps=max(4, min(16, block // 512)),
        **chained(records_BF.device),
    )


@triton.jit
def normalisers(
    sums: tl.tensor, row: tl.tensor, slots: tl.tensor, splits: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """Log2 of every head's sum over all clusters [HEADS_TILE]; 0 without clusters. sums: peaks and totals."""
    peaks_ptr, totals_ptr = sums
    heads = tl.arange(0, K.HEADS_TILE)
    split = tl.arange(0, K.SPLITS)
    at = (row.to(tl.int64) * slots + split)[:, None] * K.GROUP + heads[None, :]
    inside = (split < splits)[:, None] & (heads < K.GROUP)[None, :]
    peaks = tl.load(peaks_ptr + at, mask=inside, other=float("-inf"))
    totals = tl.load(totals_ptr + at, mask=inside, other=0.0)
    highest = tl.max(peaks, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(totals * tl.exp2(peaks - base[None, :]), 0)
    return base + tl.log2(tl.where(total > 0.0, total, 1.0))


@triton.jit
def weigh(
    logits_ptr: tl.tensor, normaliser: tl.tensor, at: tl.tensor, clusters: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """Bits of the summed weights of clusters: their order, and about evenly spread on a logarithmic scale."""
    heads = tl.arange(0, K.HEADS_TILE)
    inside = (at < clusters)[:, None] & (heads < K.GROUP)[None, :]
    logits = tl.load(logits_ptr + at[:, None] * K.GROUP + heads[None, :], mask=inside, other=float("-inf"))
    return tl.sum(tl.exp2(logits - normaliser[None, :]), 1).to(tl.int32, bitcast=True)


@triton.jit
def weigh_all(
    logits_ptr: tl.tensor, weights_ptr: tl.tensor, normaliser: tl.tensor, clusters: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """Writes the weights of a row's clusters; returns those of the first BLOCK, and the largest of all.

    All programs of a row write the same numbers.
    """
    at = tl.arange(0, K.BLOCK)
    if K.SINGLE and K.CHUNK == K.BLOCK:
        weights = weigh(logits_ptr, normaliser, at, clusters, K)
        tl.store(weights_ptr + at, weights, mask=at < clusters)
        heaviest = tl.max(weights, 0)
        tl.debug_barrier()
    else:
        highest = tl.zeros([K.CHUNK], tl.int32)
        for start in range(0, clusters, K.CHUNK):
            some = start + tl.arange(0, K.CHUNK)
            weighed = weigh(logits_ptr, normaliser, some, clusters, K)
            tl.store(weights_ptr + some, weighed, mask=some < clusters)
            highest = tl.maximum(highest, weighed)
        tl.debug_barrier()
        heaviest = tl.max(highest, 0)
        weights = tl.load(weights_ptr + at, mask=at < clusters, other=0)
    return weights, heaviest


@triton.jit
def list_chosen(
    chosen_ptr: tl.tensor,
    places_ptr: tl.tensor,
    number: tl.tensor,
    offsets_ptr: tl.tensor,
    members_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Lists the members of a program's selected clusters; -1 instead of those that are not searched."""
    for some in range(0, number, K.AT_ONCE):
        turn = some + tl.arange(0, K.AT_ONCE)
        cluster = tl.load(chosen_ptr + turn, mask=turn < number, other=0)
        places = tl.load(places_ptr + turn, mask=turn < number, other=0)
        begin = tl.load(offsets_ptr + cluster, mask=turn < number, other=0)
        held = tl.load(offsets_ptr + cluster + 1, mask=turn < number, other=0) - begin
        for skip in range(0, tl.max(held, 0), K.AT_MEMBER):
            member = skip + tl.arange(0, K.AT_MEMBER)
            inside = member[None, :] < held[:, None]
            ids = tl.load(members_ptr + begin[:, None] + member[None, :], mask=inside, other=-1)
            ids = tl.where((ids >= first) & (ids < end), ids, -1)
            place = places[:, None] + member[None, :]
            tl.store(ids_ptr + place, ids, mask=inside & (place < room))


@triton.jit(do_not_specialize=["width", "slots", "splits", "room"])
def select_kernel(
    records_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    sums: tl.tensor,
    buffers: tl.tensor,
    lists: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    splits: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of the clusters, row); shares are runs of 16 from all over the context."""
    weights_ptr, chosen_ptr, places_ptr, searched_ptr = buffers
    ids_ptr, counts_ptr = lists
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = tl.program_id(1)
    b = row // K.HEADS
    head = (row % K.HEADS).to(tl.int64)
    clusters = field(records_ptr, b, CLUSTERS).to(tl.int32)
    keys = field(records_ptr, b, KEYS)
    first, end = searched_keys(records_ptr, b)
    keep = field(records_ptr, b, KEEP)
    sizes_ptr = field(records_ptr, b, SIZES).to(tl.pointer_type(tl.int32)) + head * clusters
    offsets_ptr = field(records_ptr, b, OFFSETS).to(tl.pointer_type(tl.int32)) + head * (clusters + 1)
    members_ptr = field(records_ptr, b, MEMBERS).to(tl.pointer_type(tl.int32)) + head * keys
    counted_ptr = searched_ptr + (row.to(tl.int64) * programs + program) * width
    differ = any_outside(records_ptr, b)
    if differ:
        count_searched(records_ptr, b, head, sizes_ptr, counted_ptr, clusters, K.AT_ONCE)
    else:
        counted_ptr = sizes_ptr
    at = tl.arange(0, K.BLOCK)
    sizes = tl.load(counted_ptr + at, mask=at < clusters, other=0)
    wait_for_launch(CHAINED)
    logits_row = logits_ptr + row.to(tl.int64) * width * K.GROUP
    weights_row = weights_ptr + row.to(tl.int64) * width
    normaliser = normalisers(sums, row, slots, splits, K)
    weights, heaviest = weigh_all(logits_row, weights_row, normaliser, clusters, K)
    counted = (weights, sizes, weights_row, counted_ptr, clusters)
    cut = cut_of(counted, heaviest, keep, row % K.HEADS, K)
    if differ:
        sizes = tl.load(sizes_ptr + at, mask=at < clusters, other=0)
    # What programs before this one list.
    whole = (weights, sizes, weights_row, sizes_ptr, clusters)
    before = keys_from(whole, cut, row % K.HEADS, K, False)
    lane = tl.arange(0, K.OWN)
    owned = ((lane // 16) * programs + program) * 16 + lane % 16
    own_weights = tl.load(weights_row + owned, mask=owned < clusters, other=0)
    own_sizes = tl.load(sizes_ptr + owned, mask=owned < clusters, other=0)
    chosen = passes(own_weights, draw(owned, row % K.HEADS), cut) & (own_sizes > 0)
    # Number and keys of the selected clusters in one sum.
    both = tl.where(chosen, own_sizes.to(tl.int64) + (1 << 32), 0)
    ahead = tl.cumsum(both, 0) - both
    rank = (ahead >> 32).to(tl.int32)
    scratch = (row.to(tl.int64) * programs + program) * K.OWN
    tl.store(chosen_ptr + scratch + rank, owned, mask=chosen)
    tl.store(places_ptr + scratch + rank, before + (ahead & 0xFFFFFFFF).to(tl.int32), mask=chosen)
    both = tl.sum(both, 0)
    if program == programs - 1:
        tl.store(counts_ptr + row, tl.minimum(before + (both & 0xFFFFFFFF).to(tl.int32), room))
    tl.debug_barrier()
    list_chosen(
        chosen_ptr + scratch, places_ptr + scratch, (both >> 32).to(tl.int32), offsets_ptr, members_ptr,
        ids_ptr + row.to(tl.int64) * room, first, end, room, K
    )  # fmt: skip
