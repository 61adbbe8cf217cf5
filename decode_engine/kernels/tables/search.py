"""Kernels that find which keys to keep by query tables (CSAttention section 3.3, with projection weights).

The table rows of every query are picked. A row is read as 32-bit words of four keys. Programs take strided blocks of 64
words, so that neighbouring keys, which tend to be kept together, are spread over programs. Rows are added by `dp4a`:
weights are rounded to 8 bits relative to the largest, which is finer than the tables themselves, and the sum is exact.

Pooled, a sample of the keys is scored and counted by score; the attention kernel scores the keys itself. Per head, a
key's score is the sum of the heads' softmaxes: `score_kernel` leaves a byte per key and head with each tile's peak and
mass, and `combine_kernel` turns the tiles' masses into the softmaxes' normalisers, and a sample of the bytes into
counts. The counts give the threshold: found by the last of a head's programs to end, or by whoever compares with it.
What is counted and what is kept agree to the last bit: keys of one score, which may be all, are in one bin for both.

Suffix free names are scalars; `*_ptr` are addresses of the buffers in `TableWork` and of the records.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention import online_softmax
from decode_engine.kernels.border import EVERY, NONE, draws_below, sampled_run, store_cut
from decode_engine.kernels.launches import arrives_last, chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import (
    CENTROIDS,
    KEEP,
    KEYS,
    SCALES,
    TABLE_ROW,
    TABLES,
    aligned_pointer,
    field,
    searched_keys,
)
from decode_engine.kernels.tables import sizes as table_sizes
from decode_engine.kernels.tables.sizes import TableConstants, TableSizes, TableWork
from decode_engine.kernels.weight_bytes import of_byte, to_byte

LOG2E = tl.constexpr(online_softmax.LOG2E)
MINI_WORDS = tl.constexpr(table_sizes.MINI_KEYS // 4)
SAMPLE_WORDS = tl.constexpr(table_sizes.SAMPLE_KEYS // 4)
SAMPLE_RUN = tl.constexpr(table_sizes.SAMPLE_RUN_KEYS // 4)  # words
_PICK_SIZE = tl.constexpr(8192)  # centroid values that are compared at once

# Four words of table rows, keys 0..3 in bytes 0..3, are transposed into four words of a key each, and multiplied with
# four weights at once.
_ADD_FOUR_ROWS = tl.constexpr(
    """{
    .reg .b32 t0, t1, u0, u1, k0, k1, k2, k3;
    prmt.b32 t0, $4, $5, 0x5140;
    prmt.b32 t1, $4, $5, 0x7362;
    prmt.b32 u0, $6, $7, 0x5140;
    prmt.b32 u1, $6, $7, 0x7362;
    prmt.b32 k0, t0, u0, 0x5410;
    prmt.b32 k1, t0, u0, 0x7632;
    prmt.b32 k2, t1, u1, 0x5410;
    prmt.b32 k3, t1, u1, 0x7632;
    dp4a.s32.u32 $0, k0, $8, $9;
    dp4a.s32.u32 $1, k1, $8, $10;
    dp4a.s32.u32 $2, k2, $8, $11;
    dp4a.s32.u32 $3, k3, $8, $12;
    }"""
)
_ADD_FOUR_OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r,r")


@triton.jit
def load_centroids(
    records_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    first: tl.constexpr,
    K: tl.constexpr,
    CB: tl.constexpr,
    W: tl.constexpr,
) -> tl.tensor:
    """CB centroids of every subspace, from `first` on: [M, CB, W]."""
    c = first + tl.arange(0, CB)
    offsets = ((h * K.M + tl.arange(0, K.M))[:, None] * K.C + c[None, :]) * W
    places = offsets[:, :, None] + tl.arange(0, W)[None, None, :]
    places_ptr = aligned_pointer(records_ptr, b, places, CENTROIDS, tl.float32)
    return tl.load(places_ptr, mask=(c < K.C)[None, :, None], other=0.0)


@triton.jit
def load_query(q_ptr: tl.tensor, slot: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """A searched query by subspaces, [M, W] float32: a head's, or the sum of the group's heads.

    Read as it lies and rearranged afterwards: gathered by subspace, it would take more loads than the centroids. The
    sum, also over a single head, keeps the compiler from gathering.
    """
    W: tl.constexpr = K.DIM // K.M
    HEADS: tl.constexpr = K.GROUP if K.POOLED else 1
    g = tl.arange(0, K.GP if K.POOLED else 2)
    places = (slot * HEADS + g)[:, None] * K.DIM + tl.arange(0, K.DIM)[None, :]
    q = tl.sum(tl.load(q_ptr + places, mask=(g < HEADS)[:, None], other=0.0).to(tl.float32), 0)
    return tl.trans(tl.reshape(q, [W, K.M])) if K.STRIDED else tl.reshape(q, [K.M, W])


@triton.jit
def pick_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    picked: tl.tensor,
    slot: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Writes where the nearest centroid's row of every subspace begins, and its weight max(0, q_b . c_b) * table scale.

    Of equals the first is nearest. Kernels add four rows at a time: where there are fewer, the others are the same ones
    again, with weight 0. What does not depend on the launch before is read before it has ended.
    """
    rows_ptr, weights_ptr, units_ptr = picked
    b, h = slot // K.L // K.HEADS, slot // K.L % K.HEADS
    W: tl.constexpr = K.DIM // K.M
    J: tl.constexpr = max(4, K.M)
    CB: tl.constexpr = min(K.CP, _PICK_SIZE // K.DIM)
    s = tl.arange(0, K.M)
    row_blocks = (field(records_ptr, b, TABLE_ROW) // (4 * MINI_WORDS)).to(tl.int32)
    scales_ptr = field(records_ptr, b, SCALES).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales_ptr + h * K.M + s) * scale
    centroids = load_centroids(records_ptr, b, h, 0, K, CB, W)
    wait_alone(CHAINED)
    q = load_query(q_ptr, slot, K)
    best = tl.full([K.M], float("-inf"), tl.float32)
    nearest = tl.zeros([K.M], tl.int32)
    for first in tl.static_range(0, K.CP, CB):
        if first > 0:
            centroids = load_centroids(records_ptr, b, h, first, K, CB, W)
        products = tl.sum(centroids * q[:, None, :], 2)
        products = tl.where((first + tl.arange(0, CB) < K.C)[None, :], products, float("-inf"))
        largest = tl.max(products, 1)
        nearest = tl.where(largest > best, first + tl.argmax(products, 1).to(tl.int32), nearest)
        best = tl.maximum(best, largest)
    weights = tl.maximum(best, 0.0) * scales
    largest = tl.max(weights, 0)
    small = tl.floor(weights * tl.where(largest > 0.0, 255.0 / largest, 0.0) + 0.5).to(tl.int32)
    rows = (h * (K.M * K.C) + s * K.C + nearest) * row_blocks
    for repeat in tl.static_range(J // K.M):
        tl.store(rows_ptr + slot * J + repeat * K.M + s, rows)
    if K.M < 4:
        tl.store(weights_ptr + slot, tl.sum(small << (8 * s), 0))
    else:
        k = tl.arange(0, J // 4)
        packed = tl.sum(tl.reshape(small, [J // 4, 4]) << (8 * tl.arange(0, 4))[None, :], 1)
        tl.store(weights_ptr + slot * (J // 4) + k, packed)
    tl.store(units_ptr + slot * 2, largest / 255.0)
    tl.store(units_ptr + slot * 2 + 1, 127.0 * tl.sum(small, 0).to(tl.float32))


@triton.jit
def signed_byte(words: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Byte `index` of 32-bit words, sign-extended."""
    return (words << (24 - 8 * index)) >> 24


@triton.jit
def weighted_bytes(x: tl.tensor, w: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Byte `index` of four rows' words, added up by the four weights of 8 bits in w."""
    x0, x1, x2, x3 = x
    upper = (w & 255) * signed_byte(x0, index) + ((w >> 8) & 255) * signed_byte(x1, index)
    lower = ((w >> 16) & 255) * signed_byte(x2, index) + ((w >> 24) & 255) * signed_byte(x3, index)
    return upper + lower


@triton.jit
def add_four_rows(x: tl.tensor, w: tl.tensor, a: tl.tensor, ASSEMBLY: tl.constexpr) -> tl.tensor:
    """Adds four weighted rows to the sums of a word's four keys; w holds four weights of 8 bits."""
    a0, a1, a2, a3 = a
    x0, x1, x2, x3 = x
    if ASSEMBLY:
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            _ADD_FOUR_ROWS,
            _ADD_FOUR_OPERANDS,
            [x0, x1, x2, x3, w, a0, a1, a2, a3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        a0 += weighted_bytes(x, w, 0)
        a1 += weighted_bytes(x, w, 1)
        a2 += weighted_bytes(x, w, 2)
        a3 += weighted_bytes(x, w, 3)
    return a0, a1, a2, a3


@triton.jit
def sum_rows(
    sequence: tl.tensor, picked: tl.tensor, slot: tl.tensor, word: tl.tensor, mask: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """Weighted sums of a query's picked rows for the four keys of every word, int32."""
    _, _, _, _, tables = sequence
    rows_ptr, weights_ptr, _ = picked
    # All of these loads are under way before the first row's: one by one they would cost most of a step.
    rows = ()
    weights = ()
    for j in tl.static_range(K.J):
        rows += (tl.load(rows_ptr + slot * K.J + j),)  # type: ignore[assignment]
    for j in tl.static_range(K.J // 4):
        weights += (tl.load(weights_ptr + slot * (K.J // 4) + j),)  # type: ignore[assignment]
    zero = tl.zeros_like(word)
    a = (zero, zero, zero, zero)
    for j in tl.static_range(0, K.J, 4):
        x0 = load_row(tables, rows[j], word, mask)
        x1 = load_row(tables, rows[j + 1], word, mask)
        x2 = load_row(tables, rows[j + 2], word, mask)
        x3 = load_row(tables, rows[j + 3], word, mask)
        a = add_four_rows((x0, x1, x2, x3), weights[j // 4], a, K.ASSEMBLY)
    return a


@triton.jit
def load_row(tables: tl.tensor, row: tl.tensor, word: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Words of a table row."""
    row_ptr = (tables + row.to(tl.int64) * (4 * MINI_WORDS)).to(tl.pointer_type(tl.int32))
    return tl.load(tl.multiple_of(row_ptr, 16) + word, mask=mask, other=0)


@triton.jit
def load_sequence(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """What a record says about the search: keys of a table row, the first searched key, how many are searched, how many
    of them to keep, and where the tables are.

    Keys are 0 where none is searched, for then no row is picked. No launch of a step writes records, so they are read
    before the launch before has ended.
    """
    first, end = searched_keys(records_ptr, b)
    span = end - first
    keys = tl.where(span > 0, field(records_ptr, b, KEYS), 0).to(tl.int32)
    return keys, first, span, field(records_ptr, b, KEEP).to(tl.int32), field(records_ptr, b, TABLES)


@triton.jit
def tile_words(sequence: tl.tensor, tile: tl.tensor, BW: tl.constexpr) -> tl.tensor:
    """Words of a tile, and which of them exist: blocks tile, tile + T, tile + 2T, ... of the sequence's T tiles."""
    keys, _, _, _, _ = sequence
    blocks = tl.cdiv(keys, 4 * MINI_WORDS)
    tiles = tl.cdiv(blocks, BW // MINI_WORDS)
    j = tl.arange(0, BW)
    block = (j // MINI_WORDS) * tiles + tile
    return block * MINI_WORDS + j % MINI_WORDS, block < blocks


@triton.jit
def tile_count(sequence: tl.tensor, BW: tl.constexpr) -> tl.tensor:
    """Tiles of a sequence."""
    keys, _, _, _, _ = sequence
    return tl.cdiv(tl.cdiv(keys, 4 * MINI_WORDS), BW // MINI_WORDS)


@triton.jit
def sampled_words(sequence: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Words that this one of S sampling programs scores, and which of them exist: spread runs, or all."""
    keys, _, _, _, _ = sequence
    runs = tl.cdiv(keys, 4 * SAMPLE_RUN)
    sampled = S * (SAMPLE_WORDS // SAMPLE_RUN)
    j = tl.arange(0, SAMPLE_WORDS)
    turn = tl.program_id(0) * (SAMPLE_WORDS // SAMPLE_RUN) + j // SAMPLE_RUN
    run = sampled_run(turn, sampled, runs)
    return run * SAMPLE_RUN + j % SAMPLE_RUN, run < runs


@triton.jit
def searched(word: tl.tensor, index: tl.constexpr, sequence: tl.tensor) -> tl.tensor:
    """Whether key `index` of every word is in the searched range: one comparison, keys before it wrap around."""
    _, first, span, _, _ = sequence
    return (word * 4 + (index - first)).to(tl.uint32) < span.to(tl.uint32)


BINS = tl.constexpr(table_sizes.BINS)
_PART = tl.constexpr(table_sizes.BINS // 4)  # the numbers of keys of four parts fit into 64 bits
_PART_BITS = tl.constexpr((table_sizes.BINS // 4).bit_length() - 1)
PAIRS = tl.constexpr(table_sizes.BINS // 2)
_BIN_SHIFT, _LEAST_BIN = tl.constexpr(table_sizes.BIN_SHIFT), tl.constexpr(table_sizes.LEAST_BIN)
_SUM_SHIFT = tl.constexpr(127 + table_sizes.BINS.bit_length() - 3)
_EVERY, _NONE = tl.constexpr(EVERY), tl.constexpr(NONE)


@triton.jit
def bins_of_sums(units_ptr: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """How a pooled query's sums make bins (`bin_or_none`): those that there can be fill more than half of all bins."""
    reach = tl.load(units_ptr + slot * 2 + 1)
    return tl.maximum((reach.to(tl.int32, bitcast=True) >> 23) - _SUM_SHIFT, 0), -BINS // 2


@triton.jit
def bin_or_none(score: tl.tensor, there: tl.tensor, bins: tl.tensor) -> tl.tensor:
    """The bin where a key is counted, its score's upper bits; -1 for a key that is not there.

    bins: bits below those of a bin, and the upper bits of the first bin's scores.
    """
    shift, first = bins
    bin = (score.to(tl.int32, bitcast=True) >> shift) - first
    return tl.where(there, tl.minimum(tl.maximum(bin, 0), BINS - 1), -1)


@triton.jit
def least_score(bin: tl.tensor, bins: tl.tensor) -> tl.tensor:
    """Of a bin; the first holds all small ones, too, and the last all large ones."""
    shift, first = bins
    return tl.where(bin >= BINS, _NONE, tl.where(bin > 0, (bin + first) << shift, _EVERY))


@triton.jit
def bins_of_keys(
    sequence: tl.tensor, word: tl.tensor, mask: tl.tensor, scores: tl.tensor, bins: tl.tensor
) -> tl.tensor:
    """The bins of all keys of the words, by the scores of every word's four; -1 for those that are not searched."""
    s0, s1, s2, s3 = scores
    b0 = bin_or_none(s0, searched(word, 0, sequence) & mask, bins)
    b1 = bin_or_none(s1, searched(word, 1, sequence) & mask, bins)
    b2 = bin_or_none(s2, searched(word, 2, sequence) & mask, bins)
    b3 = bin_or_none(s3, searched(word, 3, sequence) & mask, bins)
    return tl.reshape(tl.join(tl.join(b0, b1), tl.join(b2, b3)), [4 * SAMPLE_WORDS])


@triton.jit
def store_counts(sequence: tl.tensor, histogram_ptr: tl.tensor, bins: tl.tensor, MOST: tl.constexpr) -> None:
    """Writes how many of a program's keys are in each bin, down to where the border cannot be any more.

    MOST: keys that all programs of the head sample together, at most. The border is above a part of the bins if in the
    parts over it this program alone finds as many keys as are wanted of all of them: then those of the part are counted
    as one number, in its first bin. A histogram takes time for its bins, and for their square where warps add theirs
    up. With a quarter of the bins at a time, of which most often two are counted, that is an eighth of the square.
    """
    _, _, span, keep, _ = sequence
    wanted = keep.to(tl.float32) * MOST / tl.maximum(span, 1).to(tl.float32) + 1.0
    part_of = bins >> _PART_BITS
    one = (bins >= 0).to(tl.int64)
    tally = tl.sum(one << (tl.maximum(part_of, 0) * 16), 0)
    n = tl.arange(0, _PART)
    above = 0
    for turn in range(BINS // _PART):
        part = BINS // _PART - 1 - turn
        count = (tally >> (16 * part)).to(tl.int32) & 0xFFFF
        part_ptr = histogram_ptr + part * _PART + n
        if (count > 0) & (above < wanted):
            tl.store(part_ptr, tl.histogram(bins & (_PART - 1), _PART, mask=part_of == part))
        else:
            tl.store(part_ptr, tl.where(n == 0, count, 0))
        above += count


@triton.jit
def load_histograms(histograms_ptr: tl.tensor, bh: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """The histograms of a head's S sampling programs, S times [BINS / 2], past the first-level cache: two bins in a
    word.

    One by one, so that a thread holds the same bins of all, and adds them up without other warps.
    """
    places = histograms_ptr.to(tl.pointer_type(tl.int32)) + bh * S * PAIRS + tl.arange(0, PAIRS)
    loaded = ()
    for s in tl.static_range(S):
        loaded += (tl.load(places + s * PAIRS, cache_modifier=".cg"),)  # type: ignore[assignment]
    return loaded


@triton.jit
def sum_histograms(loaded: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """The sum of what `load_histograms` returns, two bins in a word.

    It has room in 16 bits, too: a sample has less than 2^16 keys (MAX_SAMPLERS).
    """
    total = loaded[0]
    for s in tl.static_range(1, S):
        total += loaded[s]
    return total


@triton.jit
def cut_of(sequence: tl.tensor, counts: tl.tensor, bins: tl.tensor) -> tl.tensor:
    """The cut (`border`) that about `keep` keys pass, around a bin.

    It is read from the histogram of a sample of the keys, two bins in a word. What is needed of the pair of bins with
    the border comes in one sum over all pairs: every other sum would be a wait of all warps more.
    """
    _, _, span, keep, _ = sequence
    pairs = tl.arange(0, PAIRS)
    of_pair = (counts & 0xFFFF) + ((counts >> 16) & 0xFFFF)
    total = tl.sum(of_pair, 0)
    at_least = total - tl.cumsum(of_pair, 0) + of_pair
    wanted = keep * total.to(tl.float32) / tl.maximum(span, 1).to(tl.float32)
    over = (at_least - of_pair).to(tl.float32)
    here = (at_least.to(tl.float32) >= wanted) & ((over < wanted) | (pairs == PAIRS - 1))
    place = ((pairs << 16) + at_least).to(tl.int64) << 32
    found = tl.sum(tl.where(here, place | (counts.to(tl.int64) & 0xFFFFFFFF), 0), 0)
    lower, upper = found.to(tl.int32) & 0xFFFF, (found >> 16).to(tl.int32) & 0xFFFF
    reaching, pair = (found >> 32).to(tl.int32) & 0xFFFF, (found >> 48).to(tl.int32)
    in_upper = (reaching - lower).to(tl.float32) >= wanted
    inside = tl.where(in_upper, upper, lower)
    above = reaching - lower - tl.where(in_upper, upper, 0)
    draws = draws_below((wanted - above.to(tl.float32)) / tl.maximum(inside, 1).to(tl.float32))
    bin = tl.where(keep >= span, -1, 2 * pair + in_upper.to(tl.int32))
    return least_score(bin, bins), least_score(bin + 1, bins), draws


@triton.jit
def pick_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    picked: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per query: see `pick_rows`. Records are not written by the launch before, so they are read early."""
    slot = tl.program_id(0)
    bh = slot // K.L
    b = bh // K.HEADS
    first, end = searched_keys(records_ptr, b)
    if end > first:
        pick_rows(q_ptr, records_ptr, picked, slot, scale, K, CHAINED)
    else:
        wait_alone(CHAINED)
    # Late, here and below: programs that come early only wait, in places that others need.
    let_next_begin(CHAINED)


@triton.jit
def sample_pooled_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    picked: tl.tensor,
    counted_in: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Every program leaves a histogram of the pooled query's scores; EARLY: the last makes the threshold of them all.

    With PICK every program picks for itself first and writes the same rows: where there are few programs, that costs
    less than another launch.
    """
    bh = tl.program_id(1)
    b = bh // K.HEADS
    sequence = load_sequence(records_ptr, b)
    _, _, span, _, _ = sequence
    # Which keys are sampled is worked out while the launch before still runs, here and below.
    word, mask = sampled_words(sequence, K.S)
    if K.PICK:
        if span > 0:
            pick_rows(q_ptr, records_ptr, picked, bh, scale, K, CHAINED)
        else:
            wait_alone(CHAINED)
        tl.debug_barrier()
    else:
        wait_alone(CHAINED)
    sums = sum_rows(sequence, picked, bh, word, mask, K)
    store_histogram(sequence, counted_in, word, mask, sums, bins_of_sums(picked[2], bh), bh, K)
    let_next_begin(CHAINED)


@triton.jit
def store_histogram(
    sequence: tl.tensor,
    counted_in: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    scores: tl.tensor,
    bins: tl.tensor,
    bh: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Leaves one of a head's S histograms; the last program, if EARLY, reads the cut off their sum."""
    histograms_ptr, arrivals_ptr, cuts_ptr = counted_in
    own_ptr = histograms_ptr + (bh * K.S + tl.program_id(0)) * BINS
    store_counts(sequence, own_ptr, bins_of_keys(sequence, word, mask, scores, bins), K.S * 4 * SAMPLE_WORDS)
    if K.EARLY:
        last = arrives_last(arrivals_ptr, bh)
        if last:
            total = sum_histograms(load_histograms(histograms_ptr, bh, K.S), K.S)
            store_cut(cuts_ptr + bh * 3, cut_of(sequence, total, bins))


@triton.jit
def score_kernel(
    records_ptr: tl.tensor, picked: tl.tensor, scored: tl.tensor, K: tl.constexpr, CHAINED: tl.constexpr
) -> None:
    """Scores one tile for one head; see `TableWork.logits` for what is left. Byte 0 is weight 0."""
    logits_ptr, peaks_ptr, masses_ptr = scored
    _, _, units_ptr = picked
    tile = tl.program_id(0) // K.L
    bh = tl.program_id(1)
    sequence = load_sequence(records_ptr, bh // K.HEADS)
    wait_alone(CHAINED)
    slot = bh * K.L + tl.program_id(0) % K.L
    if tile < tile_count(sequence, K.BW):
        word, mask = tile_words(sequence, tile, K.BW)
        a0, a1, a2, a3 = sum_rows(sequence, picked, slot, word, mask, K)
        unit = tl.load(units_ptr + slot * 2) * LOG2E
        x0 = tl.where(searched(word, 0, sequence), a0.to(tl.float32) * unit, float("-inf"))
        x1 = tl.where(searched(word, 1, sequence), a1.to(tl.float32) * unit, float("-inf"))
        x2 = tl.where(searched(word, 2, sequence), a2.to(tl.float32) * unit, float("-inf"))
        x3 = tl.where(searched(word, 3, sequence), a3.to(tl.float32) * unit, float("-inf"))
        peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        w0, w1, w2, w3 = tl.exp2(x0 - base), tl.exp2(x1 - base), tl.exp2(x2 - base), tl.exp2(x3 - base)
        packed = to_byte(w0) | (to_byte(w1) << 8) | (to_byte(w2) << 16) | (to_byte(w3) << 24)
        place = slot * (tl.num_programs(0) // K.L) + tile
        tl.store(logits_ptr + place.to(tl.int64) * K.BW + tl.arange(0, K.BW), packed)
        tl.store(peaks_ptr + place, peak)
        tl.store(masses_ptr + place, tl.sum(w0 + w1 + w2 + w3, 0))
    let_next_begin(CHAINED)


@triton.jit
def summed_weights(
    logits_ptr: tl.tensor,
    factor: tl.tensor,
    place: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    w: tl.tensor,
    BW: tl.constexpr,
) -> tl.tensor:
    """Adds one head's softmax of the four keys of every word to w; factor: a peak's share of all weights."""
    w0, w1, w2, w3 = w
    x = tl.load(logits_ptr + place.to(tl.int64) * BW + word, mask=mask, other=0)
    w0 += of_byte(x, 0) * factor
    w1 += of_byte(x, 1) * factor
    w2 += of_byte(x, 2) * factor
    w3 += of_byte(x, 3) * factor
    return w0, w1, w2, w3


@triton.jit
def combine_kernel(
    records_ptr: tl.tensor,
    scored: tl.tensor,
    normalisers_ptr: tl.tensor,
    counted_in: tl.tensor,
    P: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Normalisers of the softmaxes, and a histogram of their sums: of all keys, or of one run in several, in every
    stretch of runs another."""
    logits_ptr, peaks_ptr, masses_ptr = scored
    bh = tl.program_id(1)
    sequence = load_sequence(records_ptr, bh // K.HEADS)
    tiles = tile_count(sequence, K.BW)
    apart = tl.maximum(tl.cdiv(tiles * K.BW, K.S * SAMPLE_WORDS), 1)
    j = tl.arange(0, SAMPLE_WORDS)
    turn = tl.program_id(0) * (SAMPLE_WORDS // SAMPLE_RUN) + j // SAMPLE_RUN
    run = turn * apart + (turn + turn // apart) % apart
    tile = run // (K.BW // SAMPLE_RUN)
    within = run % (K.BW // SAMPLE_RUN) * SAMPLE_RUN + j % SAMPLE_RUN
    inside = tile < tiles
    wait_alone(CHAINED)
    normalisers = merge_masses(peaks_ptr, masses_ptr, tiles, bh, P, K)
    heads = tl.arange(0, K.LP)
    tl.store(normalisers_ptr + bh * K.L + heads, normalisers, mask=heads < K.L)
    zero = tl.zeros([SAMPLE_WORDS], tl.float32)
    w = (zero, zero, zero, zero)
    for g in tl.static_range(K.L):
        slot = bh * K.L + g
        peak = tl.load(peaks_ptr + slot * P + tile, mask=inside, other=float("-inf"))
        factor = tl.exp2(peak - tl.sum(tl.where(heads == g, normalisers, 0.0), 0))
        w = summed_weights(logits_ptr, factor, slot * P + tile, within, inside, w, K.BW)
    keys, _, _, _, _ = sequence
    blocks = tl.cdiv(keys, 4 * MINI_WORDS)
    block = within // MINI_WORDS * tiles + tile
    word = block * MINI_WORDS + within % MINI_WORDS
    inside = inside & (block < blocks)
    store_histogram(sequence, counted_in, word, inside, w, (_BIN_SHIFT, _LEAST_BIN), bh, K)
    let_next_begin(CHAINED)


@triton.jit
def merge_masses(
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    tiles: tl.tensor,
    bh: tl.tensor,
    P: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """log2 of every head's sum of weights over all tiles, [LP]."""
    g = tl.arange(0, K.LP)[:, None]
    p = tl.arange(0, K.PP)[None, :]
    there = (g < K.L) & (p < tiles)
    peaks = tl.load(peaks_ptr + (bh * K.L + g) * P + p, mask=there, other=float("-inf"))
    masses = tl.load(masses_ptr + (bh * K.L + g) * P + p, mask=there, other=0.0)
    highest = tl.max(peaks, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(masses * tl.exp2(peaks - highest[:, None]), 1)
    return highest + tl.log2(tl.where(total > 0.0, total, 1.0))


def search(q_BHGD: Tensor, records_BF: Tensor, sizes: TableSizes, work: TableWork) -> None:
    """Launches the search of one step up to the threshold, or where it is not wanted early up to the histograms.

    q_BHGD: [B, H, G, d] contiguous, unscaled, in a float dtype. Does not wait for the device.
    """
    rows, shape = q_BHGD.shape[0] * sizes.kv_heads, sizes.shape
    if not sizes.pooled or shape.pick_apart:
        pick(q_BHGD, records_BF, sizes, work)
    constants, options = TableConstants.of(q_BHGD, sizes), chained(q_BHGD.device)
    picked = (work.rows, work.weights, work.units)
    found = (work.histograms, work.arrivals, work.cuts)
    if sizes.pooled:
        sample_pooled_kernel[(sizes.samplers, rows)](
            q_BHGD, records_BF, picked, found, _pick_scale(sizes), K=constants, num_warps=8, **options
        )
        return
    scored = (work.logits, work.peaks, work.masses)
    score_kernel[(sizes.queries * sizes.tiles, rows)](records_BF, picked, scored, K=constants, **options)
    combine_kernel[(sizes.samplers, rows)](
        records_BF, scored, work.normalisers, found, sizes.tiles, K=constants,
        maxnreg=64, **options,  # eight programs fit into a multiprocessor
    )  # fmt: skip


def pick(q_BHGD: Tensor, records_BF: Tensor, sizes: TableSizes, work: TableWork) -> None:
    """Launches the choice of the nearest centroids alone: fills rows, weights and units of `work`."""
    pick_kernel[(q_BHGD.shape[0] * sizes.kv_heads * sizes.queries,)](
        q_BHGD, records_BF, (work.rows, work.weights, work.units), _pick_scale(sizes),
        K=TableConstants.of(q_BHGD, sizes), num_warps=8, **chained(q_BHGD.device),
    )  # fmt: skip


def _pick_scale(sizes: TableSizes) -> float:
    """Of a head's query, or of the sum of the group's that a pooled query is."""
    return sizes.scale / (sizes.group // sizes.queries)
