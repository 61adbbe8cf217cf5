"""Decode attention over the keys that query tables select, in one launch after the search.

Programs 0 .. exact_programs-1 of a KV head attend to its sinks, recent window and tail. Every other one owns a tile of
keys: it compares their scores with the threshold, writes the ids of those that pass into its part of `Workspace.ids`,
and attends to them; how many they are is counted. The group's query heads share one tile of the tensor cores. All
leave partial attention states, which `merge_states` merges.

About `keep` keys are kept, not exactly: the threshold comes from a sample. Keys are never sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.merge_states import merge_into
from decode_engine.kernels.table_batch import TableBatch, TablePlan, Workspace
from decode_engine.kernels.table_device import (
    BIN_FLOOR,
    BIN_STEPS,
    BINS,
    END,
    FIRST,
    KEYS,
    KV,
    KV_HEAD,
    LOG2E,
    TAIL,
    TAIL_HEAD,
    TAIL_KEYS,
    field,
    let_successor_start,
    linear_cut,
    load_histograms,
    searched,
    searched_range,
    sum_rows,
    threshold,
    tile_count,
    tile_words,
    wait_for_predecessor,
)
from decode_engine.kernels.table_search import search, summed_weights

COMPACT_WORDS = tl.constexpr(128)
_GROUP_TILE = 16  # the tensor cores' smallest tile; a group has up to 8 heads
_LN2 = tl.constexpr(0.6931471805599453)


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
def keep_pooled(
    records_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counted: tl.tensor,
    b: tl.tensor,
    bh: tl.tensor,
    tile: tl.tensor,
    J: tl.constexpr,
    BW: tl.constexpr,
    EARLY: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:
    """Keeps the keys of a tile whose summed rows reach the threshold. counted: see `keep_per_head`."""
    word, mask = tile_words(records_ptr, b, tile, BW)
    a0, a1, a2, a3 = sum_rows(addresses_ptr, weights_ptr, bh, word, mask, J, ASSEMBLY)
    reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1), 1.0)
    limit = counted if EARLY else threshold(records_ptr, counted, b)
    cut = linear_cut(limit, reach)
    first, span = searched_range(records_ptr, b)
    k0 = (a0 >= cut) & searched(word, 0, first, span)
    k1 = (a1 >= cut) & searched(word, 1, first, span)
    k2 = (a2 >= cut) & searched(word, 2, first, span)
    k3 = (a3 >= cut) & searched(word, 3, first, span)
    return compact(k0, k1, k2, k3, word, ids_ptr, BW)


@triton.jit
def keep_per_head(
    records_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counted: tl.tensor,
    b: tl.tensor,
    bh: tl.tensor,
    tile: tl.tensor,
    P: tl.tensor,
    L: tl.constexpr,
    BW: tl.constexpr,
    EARLY: tl.constexpr,
) -> tl.tensor:
    """Keeps the keys of a tile whose softmaxes, summed over the heads, reach the threshold.

    counted: the threshold, if it was found EARLY, or else the histograms to find it from.
    """
    word, mask = tile_words(records_ptr, b, tile, BW)
    zero = tl.zeros([BW], tl.float32)
    w = (zero, zero, zero, zero)
    for g in tl.static_range(L):
        slot = bh * L + g
        factor = tl.exp2(tl.load(peaks_ptr + slot * P + tile) - tl.load(normalisers_ptr + slot))
        w = summed_weights(logits_ptr, factor, slot * P + tile, tl.arange(0, BW), mask, w, BW)
    w0, w1, w2, w3 = w
    limit = counted if EARLY else threshold(records_ptr, counted, b)
    first, span = searched_range(records_ptr, b)
    least = tl.where(limit > 0.0, tl.exp2(limit / BIN_STEPS - BIN_FLOOR), -1.0)
    k0 = (w0 >= least) & searched(word, 0, first, span)
    k1 = (w1 >= least) & searched(word, 1, first, span)
    k2 = (w2 >= least) & searched(word, 2, first, span)
    k3 = (w3 >= least) & searched(word, 3, first, span)
    return compact(k0, k1, k2, k3, word, ids_ptr, BW)


@triton.jit
def always_attended(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Keys of sinks, recent window and tail together."""
    context = field(records_ptr, b, KEYS) - field(records_ptr, b, END) + field(records_ptr, b, FIRST)
    return (context + field(records_ptr, b, TAIL_KEYS)).to(tl.int32)


@triton.jit
def attend_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    listed: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    step: tl.tensor,
    scale_log2: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
) -> tl.tensor:
    """Attends to blocks begin, begin + step, ... of `count` keys: those listed, or else sinks, recent window and tail.

    Returns per head of the group the peak in units of log2, the mass relative to it, and the weighted sum of values.
    """
    g = tl.arange(0, BG)
    d = tl.arange(0, D)
    n_keys = field(records_ptr, b, KEYS).to(tl.int32)
    first = field(records_ptr, b, FIRST).to(tl.int32)
    end = field(records_ptr, b, END).to(tl.int32)
    in_context = first + n_keys - end
    head_address = field(records_ptr, b, KV) + h * field(records_ptr, b, KV_HEAD) * 2
    kv_ptr = tl.multiple_of(head_address.to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
    # Key ids count on into the tail, whose rows are addressed relative to the context's, in elements.
    tail_address = field(records_ptr, b, TAIL) + h * field(records_ptr, b, TAIL_HEAD) * 2
    tail_offset = (tail_address - head_address) // 2 - n_keys.to(tl.int64) * (2 * D)
    q = tl.load(q_ptr + g[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
    peak = tl.full([BG], float("-inf"), tl.float32)
    mass = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, D], tl.float32)
    for start in range(begin, count, step):
        n = start + tl.arange(0, BN)
        there = n < count
        always = tl.where(n < first, n, tl.where(n < in_context, n - first + end, n - in_context + n_keys))
        key = tl.where(listed, tl.load(ids_ptr + n, mask=there & listed, other=0), always)
        offset = key.to(tl.int64) * (2 * D) + tl.where(key < n_keys, 0, tail_offset)
        row_ptrs = kv_ptr + tl.multiple_of(offset, 8)[:, None] + d[None, :]
        k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
        v = tl.load(row_ptrs + D, mask=there[:, None], other=0.0)
        s = tl.where(there[None, :], tl.dot(q, tl.trans(k)) * scale_log2, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        fade = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        mass = mass * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        peak = higher
    return peak, mass, acc


@triton.jit
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    outs_ptr: tl.tensor,
    lses_ptr: tl.tensor,
    scale_log2: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
    NS: tl.constexpr,
    NH: tl.constexpr,
    POOLED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (x, bh): the exact keys for x < EXACT, otherwise tile x - EXACT."""
    wait_for_predecessor(DEPENDENT)
    x = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    selected = x >= EXACT
    begin = x * BN
    step = EXACT * BN
    count = always_attended(records_ptr, b)
    tile_ids_ptr = ids_ptr
    if selected:
        tile = x - EXACT
        begin = 0
        step = BN
        count = 0
        tile_ids_ptr = ids_ptr + (bh.to(tl.int64) * P + tile) * (4 * BW)
        if tile < tile_count(records_ptr, b, BW):
            # Read first, added up last: the scores are on their way meanwhile.
            own_ptr = histograms_ptr + bh * NS * BINS
            counted = tl.load(limits_ptr + bh) if EARLY else load_histograms(own_ptr, NS, NH)
            if POOLED:
                count = keep_pooled(
                    records_ptr, addresses_ptr, weights_ptr, units_ptr, tile_ids_ptr, counted, b, bh, tile,
                    J, BW, EARLY, ASSEMBLY,
                )  # fmt: skip
            else:
                count = keep_per_head(
                    records_ptr, logits_ptr, peaks_ptr, normalisers_ptr, tile_ids_ptr, counted, b, bh, tile, P,
                    L, BW, EARLY,
                )  # fmt: skip
        tl.store(counts_ptr + bh * P + tile, count)
        tl.debug_barrier()
    let_successor_start(DEPENDENT)
    peak, mass, acc = attend_rows(
        q_ptr + bh * (G * D),
        records_ptr,
        tile_ids_ptr,
        b,
        h,
        selected,
        begin,
        count,
        step,
        scale_log2,
        G,
        D,
        BN,
        BG,
    )
    g = tl.arange(0, BG)
    place = (bh * tl.num_programs(0) + x) * G + g
    out = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    d = tl.arange(0, D)
    tl.store(outs_ptr + place.to(tl.int64)[:, None] * D + d[None, :], out, mask=(g < G)[:, None])
    tl.store(lses_ptr + place, (peak + tl.log2(tl.maximum(mass, 1e-30))) * _LN2, mask=g < G)


def attend(q_BHGD: Tensor, batch: TableBatch, plan: TablePlan, work: Workspace) -> None:
    """Launches selection and attention of one step after `search`; fills ids, counts, outs and lses of `work`."""
    dependent = plan.shape.dependent_launch
    attend_kernel[(plan.partials, q_BHGD.shape[0] * plan.kv_heads)](
        q_BHGD, batch.records_BF, work.addresses, work.weights, work.units, work.logits, work.peaks, work.normalisers,
        work.histograms, work.limits, work.ids, work.counts, work.outs, work.lses, plan.scale * LOG2E.value, plan.tiles,
        H=plan.kv_heads, G=plan.group, D=plan.head_dim, L=plan.queries,
        J=plan.subspaces, BW=plan.shape.tile_keys // 4, BN=plan.shape.rows, BG=_GROUP_TILE,
        EXACT=plan.shape.exact_programs, EARLY=plan.shape.early_threshold, NS=plan.samplers,
        NH=triton.next_power_of_2(plan.samplers), POOLED=plan.pooled, ASSEMBLY=q_BHGD.is_cuda, DEPENDENT=dependent,
        num_warps=plan.shape.warps, num_stages=plan.shape.stages,
        **plan.shape.options(),
    )  # fmt: skip


def table_attention(
    q_BHGD: Tensor, batch: TableBatch, plan: TablePlan, work: Workspace
) -> tuple[Tensor, Tensor]:
    """Attention of one decode step to sinks, recent window, tail and the keys that the tables select.

    q_BHGD: [B, H, G, d] contiguous, in the dtype of keys and values, unscaled. Returns out [B, H, G, d] in that dtype
    and lse [B, H, G] float32, both in `work`; keys that are kept neither by the tables nor always are dropped.
    Does not wait for the device and may be captured in a CUDA graph. `plan.check(batch)` is the caller's.
    """
    search(q_BHGD, batch, plan, work)
    attend(q_BHGD, batch, plan, work)
    merge_into(work.outs, work.lses, work.out, work.lse, dependent=plan.shape.dependent_launch)
    return work.out, work.lse
