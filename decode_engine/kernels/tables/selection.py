"""Which of a tile's keys are kept by query tables, as a list, and attention to these in the same launch.

A program compares the scores of its tile's keys with the threshold and writes the ids of those that pass into its part
of `TableWork.ids`. About `keep` keys are kept, not exactly: the threshold comes from a sample. Of the keys at the
threshold a share is kept (`border`); no key is ever sorted.

With attention every program but the first few of a KV head owns a tile of keys: it selects among them, and attends to
those. Sinks, recent window and tail are shared out in runs of a fixed number of rows: to the programs without a tile
first, and what they cannot take in time to all. The group's query heads share one tile of the tensor cores. All leave
partial results, which `merge_partials` merges.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import (
    LOG2E,
    attend_tile,
    load_group,
    merge_partials,
    no_keys_yet,
    store_partial,
)
from decode_engine.kernels.attention.sparse_attention import distance
from decode_engine.kernels.border import draw, load_cut, passes
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import KEYS, KV, TAIL, TAIL_KEYS, field, head_rows, searched_keys
from decode_engine.kernels.tables.search import (
    bins_of_sums,
    cut_of,
    load_histograms,
    load_sequence,
    search,
    searched,
    sum_histograms,
    sum_rows,
    summed_weights,
    tile_count,
    tile_words,
)
from decode_engine.kernels.tables.sizes import TableConstants, TableSizes, TableWork

COMPACT_WORDS = tl.constexpr(128)


@triton.jit
def compact(
    sequence: tl.tensor,
    scores: tl.tensor,
    cut: tl.tensor,
    head: tl.tensor,
    word: tl.tensor,
    ids_ptr: tl.tensor,
    BW: tl.constexpr,
) -> tl.tensor:
    """Writes the ids of the searched keys that a cut keeps, ascending, and returns how many there are.

    The four keys of a word draw together: a number for every key would double the instructions of their comparison.

    First the few words of which a key is kept, into the end of the tile's room, then their keys: a store for each key
    of every word would cost more than the scores do. At worst every word is kept: then its place is overwritten only
    by the keys of words up to itself.
    """
    s0, s1, s2, s3 = scores
    drawn = draw(word, head)
    k0 = passes(s0.to(tl.int32, bitcast=True), drawn, cut) & searched(word, 0, sequence)
    k1 = passes(s1.to(tl.int32, bitcast=True), drawn, cut) & searched(word, 1, sequence)
    k2 = passes(s2.to(tl.int32, bitcast=True), drawn, cut) & searched(word, 2, sequence)
    k3 = passes(s3.to(tl.int32, bitcast=True), drawn, cut) & searched(word, 3, sequence)
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
    sequence: tl.tensor,
    picked: tl.tensor,
    ids_ptr: tl.tensor,
    counted: tl.tensor,
    bh: tl.tensor,
    tile: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Keeps the keys of a tile whose summed rows pass the cut.

    counted: the cut, if it was found EARLY, or else the histograms to find it from.
    """
    _, _, units_ptr = picked
    word, mask = tile_words(sequence, tile, K.BW)
    sums = sum_rows(sequence, picked, bh, word, mask, K)
    cut = counted
    if not K.EARLY:
        cut = cut_of(sequence, sum_histograms(counted, K.S), bins_of_sums(units_ptr, bh))
    return compact(sequence, sums, cut, bh % K.HEADS, word, ids_ptr, K.BW)


@triton.jit
def keep_per_head(
    sequence: tl.tensor,
    scored: tl.tensor,
    ids_ptr: tl.tensor,
    cut: tl.tensor,
    bh: tl.tensor,
    tile: tl.tensor,
    P: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Keeps the keys of a tile whose softmaxes, summed over the heads, pass the cut."""
    logits_ptr, peaks_ptr, normalisers_ptr = scored
    word, mask = tile_words(sequence, tile, K.BW)
    zero = tl.zeros([K.BW], tl.float32)
    w = (zero, zero, zero, zero)
    for g in tl.static_range(K.L):
        slot = bh * K.L + g
        factor = tl.exp2(tl.load(peaks_ptr + slot * P + tile) - tl.load(normalisers_ptr + slot))
        w = summed_weights(logits_ptr, factor, slot * P + tile, tl.arange(0, K.BW), mask, w, K.BW)
    return compact(sequence, w, cut, bh % K.HEADS, word, ids_ptr, K.BW)


@triton.jit
def keep_keys(
    sequence: tl.tensor,
    found: tl.tensor,
    ids_ptr: tl.tensor,
    bh: tl.tensor,
    tile: tl.tensor,
    P: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Writes the ids of a tile's kept keys, and returns how many there are; none for a tile that is not there."""
    picked, scored, histograms_ptr, cuts_ptr = found
    count = 0
    if (tile >= 0) & (tile < tile_count(sequence, K.BW)):
        # Read first, added up last: the scores are on their way meanwhile.
        counted = load_cut(cuts_ptr + bh * 3, "") if K.EARLY else load_histograms(histograms_ptr, bh, K.S)
        if K.POOLED:
            count = keep_pooled(sequence, picked, ids_ptr, counted, bh, tile, K)
        else:
            count = keep_per_head(sequence, scored, ids_ptr, counted, bh, tile, P, K)
    return count


@triton.jit
def select_kernel(
    records_ptr: tl.tensor,
    found: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    P: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (tile, bh): writes the ids of the tile's kept keys, and how many they are."""
    tile = tl.program_id(0)
    bh = tl.program_id(1)
    sequence = load_sequence(records_ptr, bh // K.HEADS)
    wait_alone(CHAINED)
    place = bh * P + tile
    count = keep_keys(sequence, found, ids_ptr + place.to(tl.int64) * (4 * K.BW), bh, tile, P, K)
    tl.store(counts_ptr + place, count)
    let_next_begin(CHAINED)


def select(
    q_BHGD: Tensor, records_BF: Tensor, sizes: TableSizes, work: TableWork, counts_BHP: Tensor
) -> None:
    """Search and selection of one step without the attention: fills ids and counts_BHP [B, H, P] int32."""
    search(q_BHGD, records_BF, sizes, work)
    select_kernel[(sizes.tiles, q_BHGD.shape[0] * sizes.kv_heads)](
        records_BF, found_by(work), work.ids, counts_BHP, sizes.tiles,
        K=TableConstants.of(q_BHGD, sizes), num_warps=sizes.shape.warps, **chained(q_BHGD.device),
    )  # fmt: skip


def found_by(work: TableWork) -> tuple[Any, ...]:
    """What the search leaves."""
    picked = (work.rows, work.weights, work.units)
    return picked, (work.logits, work.peaks, work.normalisers), work.histograms, work.cuts


NEAR_RUNS = tl.constexpr(8)  # runs of exact rows that a program without a tile takes before others help


@triton.jit
def attend_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    bh: tl.tensor,
    count: tl.tensor,
    scale_log2: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Attends to the `count` listed keys, and to this program's runs of BN rows of sinks, recent window and tail.

    Runs x, x + EXACT, ... go to the EXACT programs without a tile, NEAR_RUNS to each; of the others every program takes
    its turn. Returns peaks, totals and sums of `online_softmax`.
    """
    x = tl.program_id(0)
    b = bh // K.HEADS
    d = tl.arange(0, K.DIM)
    n_keys = field(records_ptr, b, KEYS).to(tl.int32)
    first, end = searched_keys(records_ptr, b)
    in_context = first + n_keys - end
    exact = in_context + field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    runs = tl.cdiv(exact, K.BN)
    near = tl.where(x < K.EXACT, tl.minimum(tl.maximum(tl.cdiv(runs - x, K.EXACT), 0), NEAR_RUNS), 0)
    far = tl.maximum(tl.cdiv(runs - K.EXACT * NEAR_RUNS - x, tl.num_programs(0)), 0)
    listed = tl.cdiv(count, K.BN)
    element: tl.constexpr = q_ptr.dtype.element_ty
    kv_ptr = head_rows(records_ptr, b, bh % K.HEADS, KV, element)
    # Key ids count on into the tail, whose rows are addressed relative to the context's.
    to_tail = distance(kv_ptr, head_rows(records_ptr, b, bh % K.HEADS, TAIL, element), element)
    tail_offset = to_tail - n_keys.to(tl.int64) * (2 * K.DIM)
    q = load_group(q_ptr, bh, K)
    peaks, totals, sums = no_keys_yet(K)
    for turn in range(0, listed + near + far):
        own = turn - listed
        run = tl.where(
            own < near, x + own * K.EXACT, K.EXACT * NEAR_RUNS + x + (own - near) * tl.num_programs(0)
        )
        n = tl.where(own < 0, turn, run) * K.BN + tl.arange(0, K.BN)
        there = n < tl.where(own < 0, count, exact)
        always = tl.where(n < first, n, tl.where(n < in_context, n - first + end, n - in_context + n_keys))
        key = tl.where(own < 0, tl.load(ids_ptr + n, mask=there & (own < 0), other=0), always)
        offset = key.to(tl.int64) * (2 * K.DIM) + tl.where(key < n_keys, 0, tail_offset)
        row_ptrs = kv_ptr + tl.multiple_of(offset, 8)[:, None] + d[None, :]
        k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
        v = tl.load(row_ptrs + K.DIM, mask=there[:, None], other=0.0)
        peaks, totals, larger = attend_tile((q,), (k,), (v,), there, (peaks, totals, (sums,)), scale_log2, K)
        sums = larger[0]
    return peaks, totals, sums


@triton.jit
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    found: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    partials: tl.tensor,
    scale_log2: tl.tensor,
    P: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (x, bh): tile x - EXACT, and a share of what is attended exactly."""
    x = tl.program_id(0)
    bh = tl.program_id(1)
    tile = x - K.EXACT
    sequence = load_sequence(records_ptr, bh // K.HEADS)
    wait_alone(CHAINED)
    tile_ids_ptr = ids_ptr + (bh.to(tl.int64) * P + tl.maximum(tile, 0)) * (4 * K.BW)
    count = keep_keys(sequence, found, tile_ids_ptr, bh, tile, P, K)
    tl.store(counts_ptr + bh * P + tile, count, mask=tile >= 0)
    tl.debug_barrier()
    state = attend_rows(q_ptr, records_ptr, tile_ids_ptr, bh, count, scale_log2, K)
    store_partial(partials, bh, tl.num_programs(0), x, state, K, True)
    # Not sooner: programs that come early take the place of those that still have work.
    let_next_begin(CHAINED)


def attend(
    q_BHGD: Tensor, records_BF: Tensor, sizes: TableSizes, work: TableWork, counts_BHP: Tensor
) -> None:
    """Launches selection and attention of one step after `search`: fills counts, ids and partials."""
    partials = work.partials
    attend_kernel[(sizes.programs, q_BHGD.shape[0] * sizes.kv_heads)](
        q_BHGD, records_BF, found_by(work), work.ids, counts_BHP,
        partials, sizes.scale * LOG2E, sizes.tiles,
        K=TableConstants.of(q_BHGD, sizes),
        **sizes.shape.options(), **chained(q_BHGD.device),
    )  # fmt: skip


def table_attention(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: TableSizes,
    work: TableWork,
    counts_BHP: Tensor,
    sink_HG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one decode step to sinks, recent window, tail and the keys that the tables select.

    q_BHGD: [B, H, G, d] contiguous, in the dtype of keys and values, unscaled. records_BF: [B, F] int64. counts_BHP:
    [B, H, P] int32, gets the number of kept keys of every tile. sink_HG: see `merge_partials`. Returns out [B, H, G,
    d] in the queries' dtype and lse [B, H, G] float32; keys that are kept neither by the tables nor always are
    dropped. Does not wait for the device and may be captured in a CUDA graph.
    """
    search(q_BHGD, records_BF, sizes, work)
    attend(q_BHGD, records_BF, sizes, work, counts_BHP)
    out, lse = merge_partials(work.partials, q_BHGD.dtype, sink_HG)
    return out.view_as(q_BHGD), lse.view(q_BHGD.shape[:3])
