"""Kernels that score keys by query tables, up to the threshold (CSAttention section 3.3, with projection weights).

Pooled: `sample_kernel` picks and fills histograms from a sample of the keys; the attention kernel scores the keys
itself. Per head: `pick_kernel`, then `score_kernel` leaves a byte per key and head with each tile's peak and mass, then
`combine_kernel` turns the tiles' masses into the softmaxes' normalisers, and a sample of the bytes into histograms.
Every program leaves a histogram of its own; whoever needs the threshold adds them up, or the last of them has done so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.table_batch import COMBINE_TILES, TableBatch, TablePlan, Workspace
from decode_engine.kernels.table_device import (
    BIN_FLOOR,
    BIN_STEPS,
    BYTE_BASE,
    BYTE_HALF,
    BYTE_LEAST,
    BYTE_MASK,
    BYTE_SHIFT,
    KEYS,
    LOG2E,
    MINI_WORDS,
    SAMPLE_RUN,
    SAMPLE_WORDS,
    bin_or_none,
    field,
    finish_early,
    let_successor_start,
    linear_position,
    pick_rows,
    searched,
    searched_range,
    store_histogram,
    sum_rows,
    tile_count,
    tile_words,
    wait_for_predecessor,
)


@triton.jit
def pick_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
    STRIDED: tl.constexpr,
    POOLED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One program per query: see `pick_rows`."""
    wait_for_predecessor(DEPENDENT)
    bh = tl.program_id(1)
    pick_rows(
        q_ptr, records_ptr, rows_ptr, addresses_ptr, weights_ptr, units_ptr, bh // H, bh % H, tl.program_id(0), scale,
        H, G, D, M, C, CP, GP, STRIDED, POOLED,
    )  # fmt: skip
    let_successor_start(DEPENDENT)


@triton.jit
def sample_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
    STRIDED: tl.constexpr,
    PICK: tl.constexpr,
    EARLY: tl.constexpr,
    NH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Counts the pooled query's scores of evenly spread runs of keys.

    With PICK every program picks for itself first and writes the same rows: for few programs that costs less than
    another launch.
    """
    wait_for_predecessor(DEPENDENT)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    if PICK:
        pick_rows(
            q_ptr, records_ptr, rows_ptr, addresses_ptr, weights_ptr, units_ptr, b, h, 0, scale,
            H, G, D, M, C, CP, GP, STRIDED, True,
        )  # fmt: skip
        tl.debug_barrier()
    runs = tl.cdiv(field(records_ptr, b, KEYS).to(tl.int32), 4 * SAMPLE_RUN)
    sampled = tl.num_programs(0) * (SAMPLE_WORDS // SAMPLE_RUN)
    j = tl.arange(0, SAMPLE_WORDS)
    turn = tl.program_id(0) * (SAMPLE_WORDS // SAMPLE_RUN) + j // SAMPLE_RUN
    run = tl.where(runs > sampled, (turn.to(tl.int64) * runs // sampled).to(tl.int32), turn)
    word = run * SAMPLE_RUN + j % SAMPLE_RUN
    mask = run < runs
    a0, a1, a2, a3 = sum_rows(addresses_ptr, weights_ptr, bh, word, mask, M, ASSEMBLY)
    reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1), 1.0)
    first, span = searched_range(records_ptr, b)
    store_histogram(
        bin_or_none(linear_position(a0, reach), searched(word, 0, first, span) & mask),
        bin_or_none(linear_position(a1, reach), searched(word, 1, first, span) & mask),
        bin_or_none(linear_position(a2, reach), searched(word, 2, first, span) & mask),
        bin_or_none(linear_position(a3, reach), searched(word, 3, first, span) & mask),
        histograms_ptr,
        bh,
        SAMPLE_WORDS,
    )
    if EARLY:
        finish_early(records_ptr, histograms_ptr, arrivals_ptr, limits_ptr, b, bh, NH)
    let_successor_start(DEPENDENT)


@triton.jit
def score_kernel(
    records_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
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
    DEPENDENT: tl.constexpr,
) -> None:
    """Scores one tile for one head; see `Workspace.logits` for what is left. Byte 0 is weight 0."""
    wait_for_predecessor(DEPENDENT)
    tile = tl.program_id(0) // L
    bh = tl.program_id(1)
    b = bh // H
    slot = bh * L + tl.program_id(0) % L
    if tile < tile_count(records_ptr, b, BW):
        word, mask = tile_words(records_ptr, b, tile, BW)
        a0, a1, a2, a3 = sum_rows(addresses_ptr, weights_ptr, slot, word, mask, J, ASSEMBLY)
        unit = tl.load(units_ptr + slot * 2) * LOG2E
        first, span = searched_range(records_ptr, b)
        x0 = tl.where(searched(word, 0, first, span), a0.to(tl.float32) * unit, float("-inf"))
        x1 = tl.where(searched(word, 1, first, span), a1.to(tl.float32) * unit, float("-inf"))
        x2 = tl.where(searched(word, 2, first, span), a2.to(tl.float32) * unit, float("-inf"))
        x3 = tl.where(searched(word, 3, first, span), a3.to(tl.float32) * unit, float("-inf"))
        peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        w0, w1, w2, w3 = tl.exp2(x0 - base), tl.exp2(x1 - base), tl.exp2(x2 - base), tl.exp2(x3 - base)
        packed = to_byte(w0) | (to_byte(w1) << 8) | (to_byte(w2) << 16) | (to_byte(w3) << 24)
        place = slot * (tl.num_programs(0) // L) + tile
        tl.store(logits_ptr + place.to(tl.int64) * BW + tl.arange(0, BW), packed)
        tl.store(peaks_ptr + place, peak)
        tl.store(masses_ptr + place, tl.sum(w0 + w1 + w2 + w3, 0))
    let_successor_start(DEPENDENT)


@triton.jit
def to_byte(weight: tl.tensor) -> tl.tensor:
    """A weight from 0 to 1 as 5 exponent and 3 mantissa bits, rounded."""
    rounded = (weight.to(tl.int32, bitcast=True) + BYTE_HALF) >> BYTE_SHIFT
    return tl.maximum(rounded - BYTE_BASE, 0)


@triton.jit
def of_byte(words: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """The weight in byte `index` of every word: two integer operations."""
    moved = words >> 4 if index == 3 else words << (20 - 8 * index)
    bits = (moved & BYTE_MASK) | BYTE_LEAST
    return bits.to(tl.float32, bitcast=True)


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
    TILES: tl.constexpr,
    LP: tl.constexpr,
    EARLY: tl.constexpr,
    NH: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Normalisers of the softmaxes, and a histogram of their sums: one block of each tile, another one in each."""
    wait_for_predecessor(DEPENDENT)
    bh = tl.program_id(1)
    b = bh // H
    tiles = tile_count(records_ptr, b, BW)
    g = tl.arange(0, LP)
    p = tl.arange(0, PP)
    slots = bh * L + g
    there = (g < L)[:, None] & (p < tiles)[None, :]
    peaks = tl.load(peaks_ptr + slots[:, None] * P + p[None, :], mask=there, other=float("-inf"))
    masses = tl.load(masses_ptr + slots[:, None] * P + p[None, :], mask=there, other=0.0)
    highest = tl.max(peaks, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(masses * tl.exp2(peaks - highest[:, None]), 1)
    normalisers = highest + tl.log2(tl.where(total > 0.0, total, 1.0))
    tl.store(normalisers_ptr + slots, normalisers, mask=g < L)
    tl.debug_barrier()
    j = tl.arange(0, TILES * MINI_WORDS)
    tile = tl.program_id(0) * TILES + j // MINI_WORDS
    inside = tile < tiles
    within = (tile % (BW // MINI_WORDS)) * MINI_WORDS + j % MINI_WORDS
    zero = tl.zeros([TILES * MINI_WORDS], tl.float32)
    w = (zero, zero, zero, zero)
    for head in tl.static_range(L):
        slot = bh * L + head
        peak = tl.load(peaks_ptr + slot * P + tile, mask=inside, other=float("-inf"))
        factor = tl.exp2(peak - tl.load(normalisers_ptr + slot))
        w = summed_weights(logits_ptr, factor, slot * P + tile, within, inside, w, BW)
    w0, w1, w2, w3 = w
    blocks = tl.cdiv(field(records_ptr, b, KEYS).to(tl.int32), 4 * MINI_WORDS)
    block = (tile % (BW // MINI_WORDS)) * tiles + tile
    word = block * MINI_WORDS + j % MINI_WORDS
    inside = inside & (block < blocks)
    first, span = searched_range(records_ptr, b)
    store_histogram(
        bin_or_none(octave_position(w0), searched(word, 0, first, span) & inside),
        bin_or_none(octave_position(w1), searched(word, 1, first, span) & inside),
        bin_or_none(octave_position(w2), searched(word, 2, first, span) & inside),
        bin_or_none(octave_position(w3), searched(word, 3, first, span) & inside),
        histograms_ptr,
        bh,
        TILES * MINI_WORDS,
    )
    if EARLY:
        finish_early(records_ptr, histograms_ptr, arrivals_ptr, limits_ptr, b, bh, NH)
    let_successor_start(DEPENDENT)


@triton.jit
def octave_position(weight: tl.tensor) -> tl.tensor:
    """Where a summed weight lies among the bins, which cover 2^-BIN_FLOOR and more."""
    return (tl.log2(tl.maximum(weight, 1e-30)) + BIN_FLOOR) * BIN_STEPS


def search(q_BHGD: Tensor, batch: TableBatch, plan: TablePlan, work: Workspace) -> None:
    """Launches the search of one step, which fills `work` up to the histograms.

    q_BHGD: [B, H, G, d] contiguous, fp16 or bf16. Does not wait for the device.
    """
    rows, words, tiles = q_BHGD.shape[0] * plan.kv_heads, plan.shape.tile_keys // 4, plan.tiles
    options = launch_options(plan)
    picked = (work.rows, work.addresses, work.weights, work.units)
    counted = (work.histograms, work.arrivals, work.limits)
    early = {"EARLY": plan.shape.early_threshold, "NH": triton.next_power_of_2(plan.samplers)}
    if plan.pooled and not plan.shape.pick_apart:
        sample_kernel[(plan.shape.sample_programs, rows)](
            q_BHGD, batch.records_BF, *picked, *counted, plan.scale, **pick_sizes(plan), **options,
            **early, PICK=True, ASSEMBLY=q_BHGD.is_cuda, num_warps=8,
        )  # fmt: skip
        return
    pick(q_BHGD, batch, plan, work)
    if plan.pooled:
        sample_kernel[(plan.shape.sample_programs, rows)](
            q_BHGD, batch.records_BF, *picked, *counted, plan.scale, **pick_sizes(plan), **options,
            **early, PICK=False, ASSEMBLY=q_BHGD.is_cuda,
        )  # fmt: skip
        return
    scored = (work.logits, work.peaks, work.masses)
    score_kernel[(plan.queries * tiles, rows)](
        batch.records_BF, *picked[1:], *scored, L=plan.queries, J=plan.subspaces, BW=words,
        ASSEMBLY=q_BHGD.is_cuda, **options,
    )  # fmt: skip
    combine_kernel[(plan.samplers, rows)](
        batch.records_BF, *scored, work.normalisers, *counted, tiles, L=plan.queries, BW=words,
        PP=triton.next_power_of_2(tiles), TILES=COMBINE_TILES, LP=triton.next_power_of_2(plan.queries),
        **early, **options,
    )  # fmt: skip


def pick(q_BHGD: Tensor, batch: TableBatch, plan: TablePlan, work: Workspace) -> None:
    """Launches the choice of the nearest centroids alone: fills rows, weights and units of `work`."""
    pick_kernel[(plan.queries, q_BHGD.shape[0] * plan.kv_heads)](
        q_BHGD, batch.records_BF, work.rows, work.addresses, work.weights, work.units, plan.scale, **pick_sizes(plan),
        POOLED=plan.pooled, num_warps=8, **launch_options(plan),
    )  # fmt: skip


def pick_sizes(plan: TablePlan) -> dict[str, int | bool]:
    """What kernels that pick are compiled for."""
    return {
        "G": plan.group,
        "D": plan.head_dim,
        "M": plan.subspaces,
        "C": plan.centroids,
        "CP": triton.next_power_of_2(plan.centroids),
        "GP": triton.next_power_of_2(plan.group),
        "STRIDED": plan.strided,
    }


def launch_options(plan: TablePlan) -> dict[str, int | bool]:
    """What every kernel is told."""
    dependent = plan.shape.dependent_launch
    options: dict[str, int | bool] = {"H": plan.kv_heads, "DEPENDENT": dependent}
    return options | ({"launch_pdl": True} if dependent else {})


def unpacked_weights(work: Workspace) -> Tensor:
    """The 8-bit weights of the picked rows times their unit, [B, H, L, J] float32."""
    shifts = torch.arange(0, 32, 8, device=work.weights.device)
    return ((work.weights[..., None] >> shifts) & 255).flatten(-2) * work.units[..., :1]
