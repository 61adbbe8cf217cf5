"""Kernels that score keys by query tables, up to the threshold (CSAttention section 3.3, with projection weights).

Pooled: `sample_kernel` picks and fills the histogram from a sample of the keys; the attention kernel scores the keys
itself. Per head: `pick_kernel`, then `score_kernel` leaves a byte per key and head with each tile's peak and mass, then
`combine_kernel` turns the tiles' masses into the softmaxes' normalisers, and a sample of the bytes into the histogram.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.table_batch import TableBatch, TablePlan, Workspace
from decode_engine.kernels.table_device import (
    BIN_FLOOR,
    BIN_STEPS,
    BINS,
    BYTE_STEPS,
    KEYS,
    LOG2E,
    MINI_WORDS,
    SAMPLE_RUN,
    SAMPLE_WORDS,
    add_to_histogram,
    bin_or_none,
    field,
    linear_position,
    pick_rows,
    searched,
    sum_rows,
    tile_count,
    tile_words,
    wait_for_predecessor,
)

_COMBINE_TILES = 4  # tiles that one program of `combine_kernel` samples a block of


@triton.jit
def pick_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    CP: tl.constexpr,
    STRIDED: tl.constexpr,
    POOLED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One program per query: see `pick_rows`."""
    wait_for_predecessor(DEPENDENT)
    bh = tl.program_id(1)
    pick_rows(
        q_ptr, records_ptr, rows_ptr, weights_ptr, units_ptr, bh // H, bh % H, tl.program_id(0), scale,
        H, G, D, M, C, J, CP, STRIDED, POOLED,
    )  # fmt: skip


@triton.jit
def sample_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    CP: tl.constexpr,
    STRIDED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Picks for the pooled query and counts the scores of evenly spread runs of keys.

    Every program picks for itself and writes the same rows: that costs less than another launch.
    """
    wait_for_predecessor(DEPENDENT)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    pick_rows(
        q_ptr, records_ptr, rows_ptr, weights_ptr, units_ptr, b, h, 0, scale,
        H, G, D, M, C, J, CP, STRIDED, True,
    )  # fmt: skip
    tl.debug_barrier()
    runs = tl.cdiv(field(records_ptr, b, KEYS).to(tl.int32), 4 * SAMPLE_RUN)
    sampled = tl.num_programs(0) * (SAMPLE_WORDS // SAMPLE_RUN)
    j = tl.arange(0, SAMPLE_WORDS)
    turn = tl.program_id(0) * (SAMPLE_WORDS // SAMPLE_RUN) + j // SAMPLE_RUN
    run = tl.where(runs > sampled, (turn.to(tl.int64) * runs // sampled).to(tl.int32), turn)
    word = run * SAMPLE_RUN + j % SAMPLE_RUN
    mask = run < runs
    a0, a1, a2, a3 = sum_rows(records_ptr, rows_ptr, weights_ptr, b, h, bh, word, mask, M * C, J, ASSEMBLY)
    reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1), 1.0)
    add_to_histogram(
        bin_or_none(linear_position(a0, reach), searched(records_ptr, b, word, 0) & mask),
        bin_or_none(linear_position(a1, reach), searched(records_ptr, b, word, 1) & mask),
        bin_or_none(linear_position(a2, reach), searched(records_ptr, b, word, 2) & mask),
        bin_or_none(linear_position(a3, reach), searched(records_ptr, b, word, 3) & mask),
        histogram_ptr + bh * BINS,
        SAMPLE_WORDS,
    )


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
    S: tl.constexpr,
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
        a0, a1, a2, a3 = sum_rows(
            records_ptr, rows_ptr, weights_ptr, b, bh % H, slot, word, mask, S, J, ASSEMBLY
        )
        unit = tl.load(units_ptr + slot * 2) * LOG2E
        x0 = tl.where(searched(records_ptr, b, word, 0), a0.to(tl.float32) * unit, float("-inf"))
        x1 = tl.where(searched(records_ptr, b, word, 1), a1.to(tl.float32) * unit, float("-inf"))
        x2 = tl.where(searched(records_ptr, b, word, 2), a2.to(tl.float32) * unit, float("-inf"))
        x3 = tl.where(searched(records_ptr, b, word, 3), a3.to(tl.float32) * unit, float("-inf"))
        peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(tl.exp2(x0 - base) + tl.exp2(x1 - base) + tl.exp2(x2 - base) + tl.exp2(x3 - base), 0)
        packed = to_byte(x0, base) | (to_byte(x1, base) << 8)
        packed |= (to_byte(x2, base) << 16) | (to_byte(x3, base) << 24)
        place = slot * (tl.num_programs(0) // L) + tile
        tl.store(logits_ptr + place.to(tl.int64) * BW + tl.arange(0, BW), packed)
        tl.store(peaks_ptr + place, peak)
        tl.store(masses_ptr + place, mass)


@triton.jit
def to_byte(logits: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """A logit in octaves as steps below the peak, which is 255."""
    return tl.floor(tl.maximum((logits - peak) * BYTE_STEPS + 255.5, 0.0)).to(tl.int32)


@triton.jit
def summed_weights(
    logits_ptr: tl.tensor,
    shift: tl.tensor,
    place: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    w: tl.tensor,
    BW: tl.constexpr,
) -> tl.tensor:
    """Adds one head's softmax of the four keys of every word to w; shift turns a peak's weight into its share."""
    w0, w1, w2, w3 = w
    x = tl.load(logits_ptr + place.to(tl.int64) * BW + word, mask=mask, other=0)
    w0 += weight_of(x & 255, shift)
    w1 += weight_of((x >> 8) & 255, shift)
    w2 += weight_of((x >> 16) & 255, shift)
    w3 += weight_of((x >> 24) & 255, shift)
    return w0, w1, w2, w3


@triton.jit
def weight_of(steps: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """2 ** (a byte's octaves + shift)."""
    return tl.where(steps > 0, tl.exp2((steps - 255).to(tl.float32) * (1.0 / BYTE_STEPS) + shift), 0.0)


@triton.jit
def combine_kernel(
    records_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    L: tl.constexpr,
    BW: tl.constexpr,
    PP: tl.constexpr,
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Normalisers of the softmaxes, and a histogram of their sums: one block of each tile, another one in each."""
    wait_for_predecessor(DEPENDENT)
    bh = tl.program_id(1)
    b = bh // H
    tiles = tile_count(records_ptr, b, BW)
    p = tl.arange(0, PP)
    j = tl.arange(0, TILES * MINI_WORDS)
    tile = tl.program_id(0) * TILES + j // MINI_WORDS
    inside = tile < tiles
    within = (tile % (BW // MINI_WORDS)) * MINI_WORDS + j % MINI_WORDS
    zero = tl.zeros([TILES * MINI_WORDS], tl.float32)
    w = (zero, zero, zero, zero)
    for g in tl.static_range(L):
        slot = bh * L + g
        peaks = tl.load(peaks_ptr + slot * P + p, mask=p < tiles, other=float("-inf"))
        masses = tl.load(masses_ptr + slot * P + p, mask=p < tiles, other=0.0)
        highest = tl.max(peaks, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        normaliser = highest + tl.log2(tl.sum(masses * tl.exp2(peaks - highest), 0))
        tl.store(normalisers_ptr + slot, normaliser)
        peak = tl.load(peaks_ptr + slot * P + tile, mask=inside, other=0.0)
        w = summed_weights(logits_ptr, peak - normaliser, slot * P + tile, within, inside, w, BW)
    w0, w1, w2, w3 = w
    blocks = tl.cdiv(field(records_ptr, b, KEYS).to(tl.int32), 4 * MINI_WORDS)
    block = (tile % (BW // MINI_WORDS)) * tiles + tile
    word = block * MINI_WORDS + j % MINI_WORDS
    inside = inside & (block < blocks)
    add_to_histogram(
        bin_or_none(octave_position(w0), searched(records_ptr, b, word, 0) & inside),
        bin_or_none(octave_position(w1), searched(records_ptr, b, word, 1) & inside),
        bin_or_none(octave_position(w2), searched(records_ptr, b, word, 2) & inside),
        bin_or_none(octave_position(w3), searched(records_ptr, b, word, 3) & inside),
        histogram_ptr + bh * BINS,
        TILES * MINI_WORDS,
    )


@triton.jit
def octave_position(weight: tl.tensor) -> tl.tensor:
    """Where a summed weight lies among the bins, which cover 2^-BIN_FLOOR and more."""
    return (tl.log2(tl.maximum(weight, 1e-30)) + BIN_FLOOR) * BIN_STEPS


def search(q_BHGD: Tensor, batch: TableBatch, plan: TablePlan, work: Workspace) -> None:
    """Launches the search of one step, which fills `work` up to the histogram.

    q_BHGD: [B, H, G, d] contiguous, fp16 or bf16. The histogram has to be zero. Does not wait for the device.
    """
    sequences = q_BHGD.shape[0]
    rows = sequences * plan.kv_heads
    common: dict[str, Any] = {"H": plan.kv_heads, "DEPENDENT": plan.shape.dependent_launch}
    assembly = q_BHGD.is_cuda
    launch = {"launch_pdl": True} if plan.shape.dependent_launch else {}
    pick = {
        "G": plan.group,
        "D": plan.head_dim,
        "M": plan.subspaces,
        "C": plan.centroids,
        "J": plan.picks,
        "CP": triton.next_power_of_2(plan.centroids),
        "STRIDED": plan.strided,
    }
    picked = (work.rows, work.weights, work.units)
    records = batch.records_BF
    if plan.pooled:
        sample_kernel[(plan.shape.sample_programs, rows)](
            q_BHGD,
            records,
            *picked,
            work.histogram,
            plan.scale,
            **pick,
            ASSEMBLY=assembly,
            **common,
            **launch,
        )
        return
    tile_words_, tiles = plan.shape.tile_keys // 4, plan.tiles
    pick_kernel[(plan.queries, rows)](
        q_BHGD, records, *picked, plan.scale, **pick, POOLED=False, **common, **launch
    )
    scored = (work.logits, work.peaks, work.masses)
    score_kernel[(plan.queries * tiles, rows)](
        records, *picked, *scored, L=plan.queries, S=plan.subspaces * plan.centroids, J=plan.picks,
        BW=tile_words_, ASSEMBLY=assembly, **common, **launch,
    )  # fmt: skip
    combine_kernel[(triton.cdiv(tiles, _COMBINE_TILES), rows)](
        records, *scored, work.normalisers, work.histogram, tiles, L=plan.queries, BW=tile_words_,
        PP=triton.next_power_of_2(tiles), TILES=_COMBINE_TILES, **common, **launch,
    )  # fmt: skip


def nearest_centroids(
    q_BHGD: Tensor, batch: TableBatch, plan: TablePlan, work: Workspace
) -> tuple[Tensor, Tensor]:
    """Picked table rows [B, H, L, J] int32 and their weights [B, H, L, J] float32, in logits per table unit."""
    pick_kernel[(plan.queries, q_BHGD.shape[0] * plan.kv_heads)](
        q_BHGD, batch.records_BF, work.rows, work.weights, work.units, plan.scale,
        H=plan.kv_heads, G=plan.group, D=plan.head_dim, M=plan.subspaces, C=plan.centroids, J=plan.picks,
        CP=triton.next_power_of_2(plan.centroids), STRIDED=plan.strided, POOLED=plan.pooled, DEPENDENT=False,
    )  # fmt: skip
    return work.rows, unpacked_weights(work)


def unpacked_weights(work: Workspace) -> Tensor:
    """The 8-bit weights of the picked rows times their unit, [B, H, L, J] float32."""
    shifts = torch.arange(0, 32, 8, device=work.weights.device)
    return ((work.weights[..., None] >> shifts) & 255).flatten(-2) * work.units[..., :1]
