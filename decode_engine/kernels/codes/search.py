"""Kernels that search product codes: from codes and lookup tables to lists of kept keys.

Keys are ranked as `ProductCodes.rank` ranks them: by the sum over a group's heads of the softmax of the estimated
logits. `sample_kernel` scores a sample of the keys; a row's last program finds the softmaxes' normalisers, and the
weight from which on keys are kept. `keep_kernel` scores all keys, before it waits for that, and lists those above it,
and a share of those that are at it (`border`).
Keys are never sorted, their scores never leave the multiprocessor, and about as many are kept as wanted.

The floor is lookups, not bytes: a warp's 32 lookups of a word at random take shared memory 3.5 clocks (the fullest of
32 banks), so 131,072 keys of 8 subspaces and 8 KV heads cost 4 us on 132 multiprocessors, where reading them costs 2.

Shape legend: as in `codes.sizes`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.border import load_cut, moved, passes, store_cut, stretch_of
from decode_engine.kernels.codes import sizes as code_sizes
from decode_engine.kernels.codes.lookup_tables import make_tables
from decode_engine.kernels.codes.sizes import CodeSizes, CodeWork
from decode_engine.kernels.launches import arrives_last, chained, wait_for_launch
from decode_engine.kernels.record_fields import CODES, END, KEEP, KEYS, aligned_pointer, field, searched_keys
from decode_engine.kernels.weight_bytes import of_half, to_half

BLOCK = tl.constexpr(code_sizes.BLOCK)
RUN = tl.constexpr(code_sizes.RUN)
_PAIR = tl.constexpr(0x00FF00FF)
_LOW = tl.constexpr(0xFFFF)
_TWO_23 = tl.constexpr(0x4B000000)  # as float32, the number whose mantissa counts in ones
_TWO_23_F = tl.constexpr(8388608.0)


@triton.jit
def load_codes(
    records_ptr: tl.tensor, row: tl.tensor, key: tl.tensor, HEADS: tl.constexpr, M: tl.constexpr
) -> tl.tensor:
    """Codes of keys before END, four in a word, a key's words adjacent; key: [K * M / 4] int32, what a word is of."""
    b = row // HEADS
    before = (row % HEADS) * field(records_ptr, b, KEYS) * (M // 4)
    codes_ptr = aligned_pointer(records_ptr, b, before, CODES, tl.int32)
    at = key * (M // 4) + tl.arange(0, key.shape[0]) % (M // 4)
    return tl.load(codes_ptr + at, mask=key < field(records_ptr, b, END).to(tl.int32), other=0)


@triton.jit
def logit_sums(
    tables_ptr: tl.tensor,
    codes: tl.tensor,
    row_word: tl.tensor,
    M: tl.constexpr,
    W: tl.constexpr,
    WORD_HEADS: tl.constexpr,
) -> tl.tensor:
    """Looks up words of codes and adds the entries over the subspaces, for a word's heads: [K, WORD_HEADS] float32.

    The table is read past the first-level cache, which may hold an earlier layer's: a kernel may come here before the
    launch that it waits for has ended, as long as the one that made the tables has.
    """
    K: tl.constexpr = codes.shape[0] * 4 // M
    at = tables_ptr + row_word * (M * W) + tl.arange(0, M * W)
    table = tl.load(at, cache_modifier=".cg")
    c0, c1, c2, c3 = codes & 255, (codes >> 8) & 255, (codes >> 16) & 255, (codes >> 24) & 255
    code = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [K * M])
    entry = code + (tl.arange(0, K * M) % M) * W
    # Two entries of 7 bits fit a byte.
    pairs = tl.sum(tl.reshape(tl.gather(table, entry, 0), [K, M // 2, 2]), 2)
    even = tl.sum(pairs & _PAIR, 1)
    if WORD_HEADS == 1:
        sums = tl.expand_dims(even, 1)
    else:
        # Each shifted pair is its odd bytes and, between them, the upper even one.
        odd = tl.sum((pairs.to(tl.uint32) >> 8).to(tl.int32), 1) - (even >> 16) * 256
        if WORD_HEADS == 2:
            sums = tl.join(even, odd)
        else:
            sums = tl.join(tl.join(even & _LOW, even >> 16), tl.join(odd & _LOW, odd >> 16))
            sums = tl.reshape(sums, [K, 4])
    # Converted without the conversion unit, which has a quarter of the others' rate.
    return (sums | _TWO_23).to(tl.float32, bitcast=True) - _TWO_23_F


@triton.jit
def sample_kernel(
    records_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    units_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_HEADS: tl.constexpr,
    SAMPLERS: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (s, row): evenly spread runs of the searched keys, or all of them where they are few."""
    row = tl.program_id(1)
    b = row // HEADS
    first, end = searched_keys(records_ptr, b)
    base = first // BLOCK * BLOCK
    # Before the wait: nobody writes codes, and the tables are still being made.
    sampled = sampled_keys(base, end, tl.arange(0, SAMPLE * M // 4) // (M // 4), SAMPLERS, SAMPLE)
    codes = load_codes(records_ptr, row, sampled, HEADS, M)
    wait_for_launch(CHAINED)
    if end > first:
        place = row * SAMPLERS + tl.program_id(0)
        j = tl.arange(0, SAMPLE)
        key = sampled_keys(base, end, j, SAMPLERS, SAMPLE)
        there = (key >= first) & (key < end)
        tl.store(counts_ptr + place * 2, tl.sum(there.to(tl.int32), 0))
        tl.store(counts_ptr + place * 2 + 1, tl.sum((there & (j < SAMPLE // 2)).to(tl.int32), 0))
        i = tl.arange(0, WORD_HEADS)
        pair: tl.constexpr = min(2, WORD_HEADS)
        pairs: tl.constexpr = WORD_HEADS // pair
        for n in tl.static_range(WORDS):
            g = n * WORD_HEADS + i
            unit = tl.load(units_ptr + row * GROUP + g, mask=g < GROUP, other=0.0, cache_modifier=".cg")
            sums = logit_sums(tables_ptr, codes, row * WORDS + n, M, W, WORD_HEADS)
            logits = tl.where(there[:, None], sums * unit[None, :], float("-inf"))
            peak = tl.max(logits, 0)
            weights = tl.exp2(logits - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
            halves = tl.reshape(to_half(weights), [SAMPLE, pairs, pair])
            halves = tl.sum(halves << (16 * tl.arange(0, pair))[None, None, :], 2)
            own = (row * WORDS + n) * pairs + tl.arange(0, pairs)
            at = (own[None, :] * SAMPLERS + tl.program_id(0)) * (SAMPLE // 2) + j[:, None]
            tl.store(sampled_ptr + at, halves, mask=(j < SAMPLE // 2)[:, None])
            tl.store(peaks_ptr + place * GROUP + g, peak, mask=g < GROUP)
            tl.store(masses_ptr + place * GROUP + g, tl.sum(weights, 0), mask=g < GROUP)
        if arrives_last(arrivals_ptr, row):
            find_cut(
                sampled_ptr, peaks_ptr, masses_ptr, counts_ptr, normalisers_ptr, cuts_ptr, row, end - first,
                field(records_ptr, b, KEEP).to(tl.int32), GROUP, WORDS, WORD_HEADS, SAMPLERS, SAMPLE,
            )  # fmt: skip


@triton.jit
def sampled_keys(
    base: tl.tensor, end: tl.tensor, j: tl.tensor, SAMPLERS: tl.constexpr, SAMPLE: tl.constexpr
) -> tl.tensor:
    """The keys that a program samples, by their number: spread runs from `base` on.

    The first halves of all programs are spread too, and hold every key where there is room for that. Where there are
    too few keys for a sample, the others are not below `end`.
    """
    runs = tl.cdiv(end - base, RUN)
    half: tl.constexpr = SAMPLE // RUN // 2
    taken: tl.constexpr = 2 * SAMPLERS * half
    run = j // RUN
    slot = tl.program_id(0) * half + run % half
    stretch = stretch_of(slot, taken // 2)
    other = (run // half + stretch) % 2  # which of two neighbours, in every stretch another
    turn = tl.where(runs > taken // 2, 2 * slot + other, slot + run // half * (taken // 2))
    run = tl.where(runs > taken, moved(turn, taken, runs, stretch), turn)
    return base + run * RUN + j % RUN


@triton.jit
def find_cut(
    sampled_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    row: tl.tensor,
    searched: tl.tensor,
    keep: tl.tensor,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_HEADS: tl.constexpr,
    SAMPLERS: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    """Estimates the normalisers from the sampled keys, and from half of these what a kept key's weight has to reach.

    A few keys may hold most of a softmax. So each program's largest weight stands for itself alone, and its others for
    the keys that were not sampled.
    """
    s = tl.arange(0, SAMPLERS)
    sampled = tl.sum(tl.load(counts_ptr + (row * SAMPLERS + s) * 2, cache_modifier=".cg"), 0)
    counted = tl.sum(tl.load(counts_ptr + (row * SAMPLERS + s) * 2 + 1, cache_modifier=".cg"), 0)
    stands_for = searched.to(tl.float32) / sampled.to(tl.float32)
    # All that other programs wrote is asked for before anything is written: loads do not pass stores.
    j = tl.arange(0, SAMPLE // 2)
    peaks: tl.tensor = ()
    masses: tl.tensor = ()
    words: tl.tensor = ()
    pair: tl.constexpr = min(2, WORD_HEADS)
    for g in tl.static_range(GROUP):
        peaks += (tl.load(peaks_ptr + (row * SAMPLERS + s) * GROUP + g, cache_modifier=".cg"),)
        masses += (tl.load(masses_ptr + (row * SAMPLERS + s) * GROUP + g, cache_modifier=".cg"),)
    for n in tl.static_range(WORDS * WORD_HEADS // pair):
        at = ((row * (WORDS * WORD_HEADS // pair) + n) * SAMPLERS + s)[:, None] * (SAMPLE // 2) + j[None, :]
        words += (tl.load(sampled_ptr + at, cache_modifier=".cg"),)
    total = tl.zeros([SAMPLERS, SAMPLE // 2], tl.float32)
    for g in tl.static_range(GROUP):
        highest = tl.max(peaks[g], 0)
        estimates = tl.maximum(masses[g] - 1.0, 0.0) * stands_for + 1.0
        normaliser = highest + tl.log2(tl.sum(estimates * tl.exp2(peaks[g] - highest), 0))
        tl.store(normalisers_ptr + row * GROUP + g, normaliser)
        weights = of_half(words[g // pair], g % pair)
        total += weights * tl.exp2(peaks[g] - normaliser)[:, None]
    # Halving the range of weights is faster than a histogram, whose time grows with its bins. Positive numbers are
    # ordered as their bits are. Places of the sample without a key are all but 0, and so below every cut.
    bits = tl.reshape(total, [SAMPLERS * SAMPLE // 2]).to(tl.int32, bitcast=True)
    wanted = keep.to(tl.float32) * counted.to(tl.float32) / searched.to(tl.float32)
    store_cut(cuts_ptr + row * 3, bits, counted, wanted, keep, searched)


@triton.jit
def keep_kernel(
    records_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    units_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_HEADS: tl.constexpr,
    BK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (tile, row): lists the tile's keys whose weights, summed over the heads, are at the cut or above."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    b = row // HEADS
    place = row * tl.num_programs(0) + tile
    first, end = searched_keys(records_ptr, b)
    base = first // BLOCK * BLOCK
    tiles = tl.where(end > first, tl.cdiv(end - base, BK), 0)
    count = 0
    if tile >= tiles:
        wait_for_launch(CHAINED)
    else:
        # Before the wait: the launch before is still looking for the cut, and it waited for the tables.
        base += tile * BK
        codes = load_codes(records_ptr, row, base + tl.arange(0, BK * M // 4) // (M // 4), HEADS, M)
        i = tl.arange(0, WORD_HEADS)
        logits: tl.tensor = ()
        for n in tl.static_range(WORDS):
            g = n * WORD_HEADS + i
            unit = tl.load(units_ptr + row * GROUP + g, mask=g < GROUP, other=0.0, cache_modifier=".cg")
            logits += (logit_sums(tables_ptr, codes, row * WORDS + n, M, W, WORD_HEADS) * unit[None, :],)
        wait_for_launch(CHAINED)
        weight = tl.zeros([BK], tl.float32)
        for n in tl.static_range(WORDS):
            g = n * WORD_HEADS + i
            at = normalisers_ptr + row * GROUP + g
            normaliser = tl.load(at, mask=g < GROUP, other=float("inf"), cache_modifier=".cg")
            weight += tl.sum(tl.exp2(logits[n] - normaliser[None, :]), 1)
        key = base + tl.arange(0, BK)
        there = (key - first).to(tl.uint32) < (end - first).to(tl.uint32)
        least, above, draws = load_cut(cuts_ptr + row * 3)
        kept = (passes(weight, key, row % HEADS, least, above, draws) & there).to(tl.int32)
        # Listed column by column: then only the columns' totals have to be added up across threads.
        square = tl.reshape(kept, [BK // COLUMNS, COLUMNS])
        of_column = tl.sum(square, 0)
        before = (tl.cumsum(of_column, 0) - of_column)[None, :] + tl.cumsum(square, 0)
        count = tl.sum(of_column, 0)
        at = place.to(tl.int64) * BK + tl.reshape(before, [BK]) - kept
        tl.store(ids_ptr + at, key, mask=kept > 0)
    tl.store(counts_ptr + place, count)


@triton.jit
def join_kernel(
    own_ids_ptr: tl.tensor,
    own_counts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    width: tl.tensor,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (tile, row): copies a tile's keys to where those of the tiles before it end in the row's one list."""
    wait_for_launch(CHAINED)
    tile = tl.program_id(0)
    row = tl.program_id(1)
    tiles = tl.num_programs(0)
    t = tl.arange(0, TILES)
    counts = tl.load(own_counts_ptr + row * tiles + t, mask=t < tiles, other=0)
    before = tl.sum(tl.where(t < tile, counts, 0), 0)
    count = tl.sum(tl.where(t == tile, counts, 0), 0)
    if tile == 0:
        tl.store(counts_ptr + row, tl.sum(counts, 0))
    from_ptr = own_ids_ptr + (row * tiles + tile).to(tl.int64) * BK
    to_ptr = ids_ptr + row.to(tl.int64) * width + before
    for start in range(0, count, AT_ONCE):
        n = start + tl.arange(0, AT_ONCE)
        tl.store(to_ptr + n, tl.load(from_ptr + n, mask=n < count, other=0), mask=n < count)


def search_codes(
    q_BHGD: Tensor, records_BF: Tensor, sizes: CodeSizes, work: CodeWork, lists: KeyLists
) -> None:
    """Launches the search of one step, which fills `lists`: one segment of sizes.max_keys for each of B * H rows.

    q_BHGD: [B, H, G, d] contiguous, unscaled, fp16, bf16 or float32. records_BF: [B, RECORD_FIELDS] int64. Does not
    wait for the device and may be captured in a CUDA graph.
    """
    make_tables(q_BHGD, records_BF, sizes, work)
    rows, shape = q_BHGD.shape[0] * sizes.kv_heads, sizes.shape
    launch_sizes = {
        "HEADS": sizes.kv_heads,
        "GROUP": sizes.group,
        "M": sizes.subspaces,
        "W": sizes.codewords,
        "WORDS": sizes.words,
        "WORD_HEADS": sizes.word_heads,
    }
    launch_sizes |= chained(q_BHGD.device)
    tables = (records_BF, work.tables_ROX, work.units_RG)
    sample_kernel[(shape.samplers, rows)](
        *tables, work.sampled_RPX, work.peaks_RSG, work.masses_RSG, work.sampled_RSC, work.normalisers_RG,
        work.cuts_RX, work.arrivals_R, SAMPLERS=shape.samplers, SAMPLE=shape.sample_keys,
        **shape.sample_options(), **launch_sizes,
    )  # fmt: skip
    keep_kernel[(sizes.tiles, rows)](
        *tables, work.normalisers_RG, work.cuts_RX, work.ids_RPK, work.counts_RP,
        BK=shape.tile_keys, COLUMNS=32 * shape.warps, **shape.options(), **launch_sizes,
    )  # fmt: skip
    join_kernel[(sizes.tiles, rows)](
        work.ids_RPK, work.counts_RP, lists.ids_RPW, lists.counts_RP, sizes.max_keys, BK=shape.tile_keys,
        TILES=triton.next_power_of_2(sizes.tiles), AT_ONCE=128, num_warps=1 if sizes.tiles <= 64 else 4,
        **chained(q_BHGD.device),
    )  # fmt: skip
