"""Decode attention over the keys that query tables select, in one launch after the search.

Every program but the first few of a KV head owns a tile of keys. It adds up their scores, which needs the picked rows
alone and so overlaps the search for the threshold; then it compares them with the threshold, writes the ids of those
that pass into its part of `Workspace.ids`, and attends to them; how many they are is counted. Sinks, recent window and
tail are shared out in runs of a fixed number of rows: to the programs without a tile first, and what they cannot take
in time to all. The group's query heads share one tile of the tensor cores. All leave partial results, which
`merge_partials` merges.

About `keep` keys are kept, not exactly: the threshold comes from a sample. Keys are never sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.kernels import records
from decode_engine.kernels.partials import chained, merge_partials
from decode_engine.kernels.records import field
from decode_engine.kernels.table_device import (
    END,
    FIRST,
    KEYS,
    LOG2E,
    TABLES,
    linear_cut,
    load_picked,
    octave_cut,
    searched,
    searched_range,
    sum_rows,
    tile_count,
    tile_words,
)
from decode_engine.kernels.table_plan import TablePlan, Workspace
from decode_engine.kernels.table_search import search

KV = tl.constexpr(records.KV)
KV_HEAD = tl.constexpr(records.KV_HEAD)
TAIL = tl.constexpr(records.TAIL)
TAIL_HEAD = tl.constexpr(records.TAIL_HEAD)
TAIL_KEYS = tl.constexpr(records.TAIL_KEYS)
COMPACT_WORDS = tl.constexpr(128)
NEAR_RUNS = tl.constexpr(8)  # runs of exact rows that a program without a tile takes before others help
_GROUP_TILE = 16  # the tensor cores' smallest tile; a group has up to 8 heads


@triton.jit
def compact(
    k0: tl.tensor,
    k1: tl.tensor,
    k2: tl.tensor,
    k3: tl.tensor,
    word: tl.tensor,
    ids_ptr: tl.tensor,
    BW: tl.constexpr,
) -> tl.tensor:
    """Writes the ids of the kept keys of every word, ascending, and returns how many there are.

    First the few words of which a key is kept, into the end of the tile's room, then their keys: a store for each key
    of every word would cost more than the scores do. At worst every word is kept: then its place is overwritten only
    by the keys of words up to itself.
    """
    kept = k0.to(tl.int32) | (k1.to(tl.int32) << 1) | (k2.to(tl.int32) << 2) | (k3.to(tl.int32) << 3)
    some = (kept != 0).to(tl.int32)
    words_ptr = ids_ptr + 3 * BW
    tl.store(words_ptr + tl.cumsum(some, 0) - some, word * 16 + kept, mask=kept != 0)
    count = tl.sum(some, 0)
    tl.debug_barrier()
    total = 0
    for start in range(0, count, COMPACT_WORDS):
        n = start + tl.arange(0, COMPACT_WORDS)
        entry = tl.load(words_ptr + n, mask=n < count, other=0)
        tl.debug_barrier()
        m0, m1, m2, m3 = entry & 1, (entry >> 1) & 1, (entry >> 2) & 1, (entry >> 3) & 1
        kept_here = m0 + m1 + m2 + m3
        place = ids_ptr + total + tl.cumsum(kept_here, 0) - kept_here
        key = (entry >> 4) * 4
        tl.store(place, key, mask=m0 > 0)
        tl.store(place + m0, key + 1, mask=m1 > 0)
        tl.store(place + m0 + m1, key + 2, mask=m2 > 0)
        tl.store(place + m0 + m1 + m2, key + 3, mask=m3 > 0)
        total += tl.sum(kept_here, 0)
        tl.debug_barrier()
    return total


@triton.jit
def summed_softmaxes(
    sums: tl.tensor,
    units_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    bh: tl.tensor,
    L: tl.constexpr,
    SHIFT: tl.constexpr,
) -> tl.tensor:
    """Sum over the heads of the softmaxes of two keys of every word; sums: of each head, 16 bits per key."""
    low = tl.zeros(sums[0].shape, tl.float32)
    high = tl.zeros(sums[0].shape, tl.float32)
    for g in tl.static_range(L):
        slot = bh * L + g
        unit = tl.load(units_ptr + slot * 2, cache_modifier=".cg") * (LOG2E * (1 << SHIFT))
        normaliser = tl.load(normalisers_ptr + slot)
        low += tl.exp2(((sums[g] << 16) >> 16).to(tl.float32) * unit - normaliser)
        high += tl.exp2((sums[g] >> 16).to(tl.float32) * unit - normaliser)
    return low, high


@triton.jit
def keep_keys(
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    b: tl.tensor,
    bh: tl.tensor,
    tile: tl.tensor,
    L: tl.constexpr,
    J: tl.constexpr,
    SHIFT: tl.constexpr,
    BW: tl.constexpr,
    POOLED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> tl.tensor:
    """Keeps a tile's keys whose summed rows, or whose softmaxes summed over the heads, reach the threshold.

    Waits for it no sooner than it needs it. Until then sums of several heads are held as 16 bits per key.
    """
    word, mask = tile_words(records_ptr, b, tile, BW)
    first, span = searched_range(records_ptr, b)
    tables = field(records_ptr, b, TABLES)
    if POOLED:
        picked = load_picked(rows_ptr, weights_ptr, bh, J)
        a0, a1, a2, a3 = sum_rows(tables, picked, word, mask, J, ASSEMBLY)
        reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1, cache_modifier=".cg"), 1.0)
        if CHAINED:
            gdc_wait()
        cut = linear_cut(tl.load(limits_ptr + bh), reach)
        k0, k1, k2, k3 = a0 >= cut, a1 >= cut, a2 >= cut, a3 >= cut
    else:
        low = ()
        high = ()
        picked = load_picked(rows_ptr, weights_ptr, bh * L, J)
        for g in tl.static_range(L):
            following = load_picked(rows_ptr, weights_ptr, bh * L + min(g + 1, L - 1), J)
            a0, a1, a2, a3 = sum_rows(tables, picked, word, mask, J, ASSEMBLY)
            picked = following
            low += (((a0 >> SHIFT) & 0xFFFF) | ((a1 >> SHIFT) << 16),)  # type: ignore[assignment]
            high += (((a2 >> SHIFT) & 0xFFFF) | ((a3 >> SHIFT) << 16),)  # type: ignore[assignment]
        if CHAINED:
            gdc_wait()
        least = octave_cut(tl.load(limits_ptr + bh))
        w0, w1 = summed_softmaxes(low, units_ptr, normalisers_ptr, bh, L, SHIFT)
        k0, k1 = w0 >= least, w1 >= least
        w2, w3 = summed_softmaxes(high, units_ptr, normalisers_ptr, bh, L, SHIFT)
        k2, k3 = w2 >= least, w3 >= least
    k0 = k0 & searched(word, 0, first, span)
    k1 = k1 & searched(word, 1, first, span)
    k2 = k2 & searched(word, 2, first, span)
    k3 = k3 & searched(word, 3, first, span)
    return compact(k0, k1, k2, k3, word, ids_ptr, BW)


@triton.jit
def attend_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    count: tl.tensor,
    scale_log2: tl.tensor,
    EXACT: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Attends to the `count` listed keys, and to this program's runs of BN rows of sinks, recent window and tail.

    Runs x, x + EXACT, ... go to the EXACT programs without a tile, NEAR_RUNS to each; of the others every program takes
    its turn. Returns per head of the group the peak in units of log2, the mass relative to it, and the weighted sum of
    values.
    """
    x = tl.program_id(0)
    g = tl.arange(0, BG)
    d = tl.arange(0, D)
    n_keys = field(records_ptr, b, KEYS).to(tl.int32)
    first = field(records_ptr, b, FIRST).to(tl.int32)
    end = field(records_ptr, b, END).to(tl.int32)
    in_context = first + n_keys - end
    exact = in_context + field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    runs = tl.cdiv(exact, BN)
    near = tl.where(x < EXACT, tl.minimum(tl.maximum(tl.cdiv(runs - x, EXACT), 0), NEAR_RUNS), 0)
    far = tl.maximum(tl.cdiv(runs - EXACT * NEAR_RUNS - x, tl.num_programs(0)), 0)
    listed = tl.cdiv(count, BN)
    element = tl.pointer_type(q_ptr.dtype.element_ty)
    item: tl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth // 8
    head_address = field(records_ptr, b, KV) + h * field(records_ptr, b, KV_HEAD)
    kv_ptr = tl.multiple_of(head_address.to(element), 16)
    # Key ids count on into the tail, whose rows are addressed relative to the context's, in elements.
    tail_address = field(records_ptr, b, TAIL) + h * field(records_ptr, b, TAIL_HEAD)
    tail_offset = (tail_address - head_address) // item - n_keys.to(tl.int64) * (2 * D)
    q = tl.load(q_ptr + g[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
    peak = tl.full([BG], float("-inf"), tl.float32)
    mass = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, D], tl.float32)
    for turn in range(0, listed + near + far):
        own = turn - listed
        run = tl.where(own < near, x + own * EXACT, EXACT * NEAR_RUNS + x + (own - near) * tl.num_programs(0))
        n = tl.where(own < 0, turn, run) * BN + tl.arange(0, BN)
        there = n < tl.where(own < 0, count, exact)
        always = tl.where(n < first, n, tl.where(n < in_context, n - first + end, n - in_context + n_keys))
        key = tl.where(own < 0, tl.load(ids_ptr + n, mask=there & (own < 0), other=0), always)
        offset = key.to(tl.int64) * (2 * D) + tl.where(key < n_keys, 0, tail_offset)
        row_ptrs = kv_ptr + tl.multiple_of(offset, 8)[:, None] + d[None, :]
        k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
        v = tl.load(row_ptrs + D, mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(there[None, :], s, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        fade = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        mass = mass * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    return peak, mass, acc


@triton.jit
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    scale_log2: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    SHIFT: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    EXACT: tl.constexpr,
    POOLED: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (x, bh): tile x - EXACT, and a share of what is attended exactly.

    Until it waits it reads only records and what was picked, which are complete when the launch before begins.
    """
    x = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    tile = x - EXACT
    tile_ids_ptr = ids_ptr + (bh.to(tl.int64) * P + tl.maximum(tile, 0)) * (4 * BW)
    count = 0
    if (tile >= 0) & (tile < tile_count(records_ptr, b, BW)):
        count = keep_keys(
            records_ptr, rows_ptr, weights_ptr, units_ptr, normalisers_ptr, limits_ptr, tile_ids_ptr, b, bh, tile,
            L, J, SHIFT, BW, POOLED, ASSEMBLY, CHAINED,
        )  # fmt: skip
    elif CHAINED:
        gdc_wait()
    tl.store(counts_ptr + bh * P + tile, count, mask=tile >= 0)
    tl.debug_barrier()
    if CHAINED:  # not sooner: programs that come early only take the place of those that still have work
        gdc_launch_dependents()
    peak, mass, acc = attend_rows(
        q_ptr + bh * (G * D), records_ptr, tile_ids_ptr, b, bh % H, count, scale_log2,
        EXACT, G, D, BN, BG, PRECISION,
    )  # fmt: skip
    g = tl.arange(0, BG)
    place = (bh * tl.num_programs(0) + x) * G + g
    sums_ptrs = sums_ptr + place.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(sums_ptrs, acc, mask=(g < G)[:, None] & (mass > 0.0)[:, None])
    tl.store(peaks_ptr + place, peak, mask=g < G)
    tl.store(totals_ptr + place, mass, mask=g < G)


@triton.jit
def select_kernel(
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    H: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    SHIFT: tl.constexpr,
    BW: tl.constexpr,
    POOLED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (tile, bh): writes the ids of the tile's kept keys, and how many they are."""
    tile = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    place = bh * tl.num_programs(0) + tile
    count = 0
    if tile < tile_count(records_ptr, b, BW):
        count = keep_keys(
            records_ptr, rows_ptr, weights_ptr, units_ptr, normalisers_ptr, limits_ptr,
            ids_ptr + place.to(tl.int64) * (4 * BW), b, bh, tile,
            L, J, SHIFT, BW, POOLED, ASSEMBLY, CHAINED,
        )  # fmt: skip
    elif CHAINED:
        gdc_wait()
    tl.store(counts_ptr + place, count)
    if CHAINED:
        gdc_launch_dependents()


def attend(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace, counts_BHP: Tensor) -> None:
    """Launches the rest of the selection and the attention of one step after `search`: fills counts, ids, partials."""
    whole = q_BHGD.element_size() == 4
    partials = work.partials
    attend_kernel[(plan.programs, q_BHGD.shape[0] * plan.kv_heads)](
        q_BHGD, records_BF, work.rows, work.weights, work.units, work.normalisers, work.limits, work.ids,
        counts_BHP, partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG, plan.scale * LOG2E.value, plan.tiles,
        H=plan.kv_heads, G=plan.group, D=plan.head_dim, BN=plan.shape.rows, BG=_GROUP_TILE,
        EXACT=plan.shape.exact_programs, PRECISION="ieee" if whole else "tf32", **_search_sizes(q_BHGD, plan),
        **plan.shape.options(), **chained(q_BHGD.device),
    )  # fmt: skip


def select(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace, counts_BHP: Tensor) -> None:
    """Search and selection of one step without the attention: fills ids and counts_BHP [B, H, P] int32."""
    search(q_BHGD, records_BF, plan, work)
    select_kernel[(plan.tiles, q_BHGD.shape[0] * plan.kv_heads)](
        records_BF, work.rows, work.weights, work.units, work.normalisers, work.limits, work.ids, counts_BHP,
        H=plan.kv_heads, **_search_sizes(q_BHGD, plan), num_warps=plan.shape.warps, **chained(q_BHGD.device),
    )  # fmt: skip


def _search_sizes(q_BHGD: Tensor, plan: TablePlan) -> dict[str, int | bool]:
    """What kernels that keep keys are compiled for. A sum of rows, at most 127 * 255 * m, fits 16 bits by the shift."""
    return {
        "L": plan.queries,
        "J": plan.picks,
        "SHIFT": plan.subspaces.bit_length() - 1,
        "BW": plan.shape.tile_keys // 4,
        "POOLED": plan.pooled,
        "ASSEMBLY": q_BHGD.is_cuda,
    }


def table_attention(
    q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace, counts_BHP: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of one decode step to sinks, recent window, tail and the keys that the tables select.

    q_BHGD: [B, H, G, d] contiguous, in the dtype of keys and values, unscaled. records_BF: [B, F] int64. counts_BHP:
    [B, H, P] int32, gets the number of kept keys of every tile. Returns out [B, H, G, d] in the queries' dtype and lse
    [B, H, G] float32; keys that are kept neither by the tables nor always are dropped. Does not wait for the device
    and may be captured in a CUDA graph.
    """
    search(q_BHGD, records_BF, plan, work)
    attend(q_BHGD, records_BF, plan, work, counts_BHP)
    out, lse = merge_partials(work.partials, q_BHGD.dtype)
    return out.view_as(q_BHGD), lse.view(q_BHGD.shape[:3])
