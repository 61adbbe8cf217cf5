"""Kernels that find which keys to keep by query tables (CSAttention section 3.3, with projection weights).

The table rows of every query are picked. Pooled, a sample of the keys is scored and counted by score; the attention
kernel scores the keys itself. Per head, a key's score is the sum of the heads' softmaxes: `score_kernel` leaves a byte
per key and head with each tile's peak and mass, and `combine_kernel` turns the tiles' masses into the softmaxes'
normalisers, and a sample of the bytes into counts. The counts give the threshold: found by the last of a head's
programs to end, or by whoever compares with it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.launches import arrives_last, chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import searched_keys
from decode_engine.kernels.tables.device_functions import (
    LOG2E,
    MINI_WORDS,
    SAMPLE_RUN,
    SAMPLE_WORDS,
    load_sequence,
    pick_rows,
    sampled_words,
    searched,
    sum_rows,
    tile_count,
    tile_words,
)
from decode_engine.kernels.tables.limits import (
    BINS,
    LIMIT_WORDS,
    bins_of_keys,
    linear_bin,
    linear_cut,
    load_histograms,
    octave_bin,
    octave_cut,
    store_counts,
    store_limit,
    sum_histograms,
    threshold,
)
from decode_engine.kernels.tables.sizes import TableSizes, TableWork
from decode_engine.kernels.weight_bytes import of_byte, to_byte


@triton.jit
def pick_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    STRIDED: tl.constexpr,
    POOLED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per query: see `pick_rows`. Records are not written by the launch before, so they are read early."""
    slot = tl.program_id(0)
    bh = slot // L
    b = bh // H
    first, end = searched_keys(records_ptr, b)
    if end > first:
        pick_rows(
            q_ptr, records_ptr, rows_ptr, weights_ptr, units_ptr, b, bh % H, slot, scale,
            G, GP, D, M, C, CP, STRIDED, POOLED, CHAINED,
        )  # fmt: skip
    else:
        wait_alone(CHAINED)
    # Late, here and below: programs that come early only wait, in places that others need.
    let_next_begin(CHAINED)


@triton.jit
def sample_pooled_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    STRIDED: tl.constexpr,
    J: tl.constexpr,
    S: tl.constexpr,
    PICK: tl.constexpr,
    EARLY: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Every program leaves a histogram of the pooled query's scores; EARLY: the last makes the threshold of them all.

    With PICK every program picks for itself first and writes the same rows: where there are few programs, that costs
    less than another launch.
    """
    bh = tl.program_id(1)
    b = bh // H
    sequence = load_sequence(records_ptr, b)
    _, _, span, _, _ = sequence
    # Which keys are sampled is worked out while the launch before still runs, here and below.
    word, mask = sampled_words(sequence, S)
    if PICK:
        if span > 0:
            pick_rows(
                q_ptr, records_ptr, rows_ptr, weights_ptr, units_ptr, b, bh % H, bh, scale,
                G, GP, D, M, C, CP, STRIDED, True, CHAINED,
            )  # fmt: skip
        else:
            wait_alone(CHAINED)
        tl.debug_barrier()
    else:
        wait_alone(CHAINED)
    a0, a1, a2, a3 = sum_rows(sequence, rows_ptr, weights_ptr, bh, word, mask, J, ASSEMBLY)
    reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1), 1.0)
    bins = bins_of_keys(
        sequence, word, mask, linear_bin(a0, reach), linear_bin(a1, reach), linear_bin(a2, reach),
        linear_bin(a3, reach), SAMPLE_WORDS,
    )  # fmt: skip
    store_histogram(sequence, histograms_ptr, arrivals_ptr, limits_ptr, bins, bh, reach, S, EARLY)
    let_next_begin(CHAINED)


@triton.jit
def store_histogram(
    sequence: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    bins: tl.tensor,
    bh: tl.tensor,
    reach: tl.tensor | None,
    S: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Leaves one of a head's S histograms; the last program, if EARLY, reads the limit off their sum.

    reach: of linear bins; None for octaves.
    """
    store_counts(sequence, histograms_ptr + (bh * S + tl.program_id(0)) * BINS, bins, S * 4 * SAMPLE_WORDS)
    if EARLY:
        last = arrives_last(arrivals_ptr, bh)
        if last:
            total = sum_histograms(load_histograms(histograms_ptr, bh, S), S)
            border, draws = threshold(sequence, total)
            if reach is None:
                least, above = octave_cut(border), octave_cut(border + 1)
            else:
                least, above = linear_cut(border, reach), linear_cut(border + 1, reach)
            store_limit(limits_ptr + bh * LIMIT_WORDS, least, above, draws)


@triton.jit
def score_kernel(
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    H: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    BW: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Scores one tile for one head; see `TableWork.logits` for what is left. Byte 0 is weight 0."""
    tile = tl.program_id(0) // L
    bh = tl.program_id(1)
    sequence = load_sequence(records_ptr, bh // H)
    wait_alone(CHAINED)
    slot = bh * L + tl.program_id(0) % L
    if tile < tile_count(sequence, BW):
        word, mask = tile_words(sequence, tile, BW)
        a0, a1, a2, a3 = sum_rows(sequence, rows_ptr, weights_ptr, slot, word, mask, J, ASSEMBLY)
        unit = tl.load(units_ptr + slot * 2) * LOG2E
        x0 = tl.where(searched(word, 0, sequence), a0.to(tl.float32) * unit, float("-inf"))
        x1 = tl.where(searched(word, 1, sequence), a1.to(tl.float32) * unit, float("-inf"))
        x2 = tl.where(searched(word, 2, sequence), a2.to(tl.float32) * unit, float("-inf"))
        x3 = tl.where(searched(word, 3, sequence), a3.to(tl.float32) * unit, float("-inf"))
        peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        w0, w1, w2, w3 = tl.exp2(x0 - base), tl.exp2(x1 - base), tl.exp2(x2 - base), tl.exp2(x3 - base)
        packed = to_byte(w0) | (to_byte(w1) << 8) | (to_byte(w2) << 16) | (to_byte(w3) << 24)
        place = slot * (tl.num_programs(0) // L) + tile
        tl.store(logits_ptr + place.to(tl.int64) * BW + tl.arange(0, BW), packed)
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
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    L: tl.constexpr,
    BW: tl.constexpr,
    PP: tl.constexpr,
    LP: tl.constexpr,
    S: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Normalisers of the softmaxes, and a histogram of their sums: of all keys, or of one run in several, in every
    stretch of runs another."""
    bh = tl.program_id(1)
    sequence = load_sequence(records_ptr, bh // H)
    tiles = tile_count(sequence, BW)
    apart = tl.maximum(tl.cdiv(tiles * BW, S * SAMPLE_WORDS), 1)
    j = tl.arange(0, SAMPLE_WORDS)
    turn = tl.program_id(0) * (SAMPLE_WORDS // SAMPLE_RUN) + j // SAMPLE_RUN
    run = turn * apart + (turn + turn // apart) % apart
    tile = run // (BW // SAMPLE_RUN)
    within = run % (BW // SAMPLE_RUN) * SAMPLE_RUN + j % SAMPLE_RUN
    inside = tile < tiles
    wait_alone(CHAINED)
    normalisers = merge_masses(peaks_ptr, masses_ptr, tiles, bh, P, L, LP, PP)
    heads = tl.arange(0, LP)
    tl.store(normalisers_ptr + bh * L + heads, normalisers, mask=heads < L)
    zero = tl.zeros([SAMPLE_WORDS], tl.float32)
    w = (zero, zero, zero, zero)
    for g in tl.static_range(L):
        slot = bh * L + g
        peak = tl.load(peaks_ptr + slot * P + tile, mask=inside, other=float("-inf"))
        factor = tl.exp2(peak - tl.sum(tl.where(heads == g, normalisers, 0.0), 0))
        w = summed_weights(logits_ptr, factor, slot * P + tile, within, inside, w, BW)
    w0, w1, w2, w3 = w
    keys, _, _, _, _ = sequence
    blocks = tl.cdiv(keys, 4 * MINI_WORDS)
    block = within // MINI_WORDS * tiles + tile
    word = block * MINI_WORDS + within % MINI_WORDS
    inside = inside & (block < blocks)
    bins = bins_of_keys(
        sequence, word, inside, octave_bin(w0), octave_bin(w1), octave_bin(w2), octave_bin(w3),
        SAMPLE_WORDS,
    )  # fmt: skip
    store_histogram(sequence, histograms_ptr, arrivals_ptr, limits_ptr, bins, bh, None, S, True)
    let_next_begin(CHAINED)


@triton.jit
def merge_masses(
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    tiles: tl.tensor,
    bh: tl.tensor,
    P: tl.tensor,
    L: tl.constexpr,
    LP: tl.constexpr,
    PP: tl.constexpr,
) -> tl.tensor:
    """log2 of every head's sum of weights over all tiles, [LP]."""
    g = tl.arange(0, LP)[:, None]
    p = tl.arange(0, PP)[None, :]
    there = (g < L) & (p < tiles)
    peaks = tl.load(peaks_ptr + (bh * L + g) * P + p, mask=there, other=float("-inf"))
    masses = tl.load(masses_ptr + (bh * L + g) * P + p, mask=there, other=0.0)
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
    options = {"H": sizes.kv_heads} | chained(q_BHGD.device)
    reading = {"J": sizes.picks, "ASSEMBLY": q_BHGD.is_cuda}
    picked = (records_BF, work.rows, work.weights, work.units)
    found = (work.histograms, work.arrivals, work.limits)
    if sizes.pooled:
        sample_pooled_kernel[(sizes.samplers, rows)](
            q_BHGD, *picked, *found, _pick_scale(sizes), **_pick_sizes(sizes), **reading, S=sizes.samplers,
            PICK=not shape.pick_apart, EARLY=shape.early_threshold, num_warps=8, **options,
        )  # fmt: skip
        return
    scored, words = (work.logits, work.peaks, work.masses), shape.tile_keys // 4
    score_kernel[(sizes.queries * sizes.tiles, rows)](
        *picked, *scored, L=sizes.queries, BW=words, **reading, **options
    )
    combine_kernel[(sizes.samplers, rows)](
        records_BF, *scored, work.normalisers, *found, sizes.tiles, L=sizes.queries, BW=words,
        PP=triton.next_power_of_2(sizes.tiles), LP=triton.next_power_of_2(sizes.queries),
        S=sizes.samplers, maxnreg=64, **options,  # eight programs fit into a multiprocessor
    )  # fmt: skip


def pick(q_BHGD: Tensor, records_BF: Tensor, sizes: TableSizes, work: TableWork) -> None:
    """Launches the choice of the nearest centroids alone: fills rows, weights and units of `work`."""
    pick_kernel[(q_BHGD.shape[0] * sizes.kv_heads * sizes.queries,)](
        q_BHGD, records_BF, work.rows, work.weights, work.units, _pick_scale(sizes),
        H=sizes.kv_heads, L=sizes.queries, **_pick_sizes(sizes), POOLED=sizes.pooled, num_warps=8,
        **chained(q_BHGD.device),
    )  # fmt: skip


def _pick_scale(sizes: TableSizes) -> float:
    """Of a head's query, or of the sum of the group's that a pooled query is."""
    return sizes.scale / (sizes.group // sizes.queries)


def _pick_sizes(sizes: TableSizes) -> dict[str, int | bool]:
    """What kernels that pick are compiled for."""
    return {
        "G": sizes.group,
        "GP": triton.next_power_of_2(sizes.group),
        "D": sizes.head_dim,
        "M": sizes.subspaces,
        "C": sizes.centroids,
        "CP": triton.next_power_of_2(sizes.centroids),
        "STRIDED": sizes.strided,
    }
