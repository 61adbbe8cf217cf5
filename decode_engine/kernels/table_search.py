"""Kernels that find which keys to keep by query tables (CSAttention section 3.3, with projection weights).

`pick_kernel` chooses the table rows of every query. Then a sample of the keys is scored and counted by score; the last
of a head's programs to end turns that into the threshold. What scores all keys (`table_attention`) starts before, since
it needs the threshold only when the scores are there.

Per head, a key's score is the sum of the heads' softmaxes. Their normalisers are taken from the same sample, so that no
logit of any key but the sample's is ever written to memory. The exact rule differs in which keys near the threshold it
takes; a factor that all heads' normalisers have in common makes no difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.kernels.partials import chained, wait_for_launch
from decode_engine.kernels.records import field
from decode_engine.kernels.table_device import (
    BINS,
    END,
    FIRST,
    LOG2E,
    SAMPLE_WORDS,
    TABLES,
    arrives_last,
    bin_or_none,
    linear_position,
    load_picked,
    octave_position,
    pick_rows,
    sampled_words,
    searched,
    searched_range,
    sum_rows,
    threshold,
)
from decode_engine.kernels.table_plan import TablePlan, Workspace

_SAMPLE_WARPS = 8


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
    if field(records_ptr, b, END) > field(records_ptr, b, FIRST):
        pick_rows(
            q_ptr, records_ptr, rows_ptr, weights_ptr, units_ptr, b, bh % H, slot, scale,
            G, D, M, C, CP, STRIDED, POOLED, CHAINED,
        )  # fmt: skip
    else:
        wait_for_launch(CHAINED)


@triton.jit
def sample_pooled_kernel(
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    H: tl.constexpr,
    J: tl.constexpr,
    S: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Every program leaves a histogram of the pooled query's scores; the last reads the threshold off their sum."""
    wait_for_launch(CHAINED)
    bh = tl.program_id(1)
    b = bh // H
    word, mask = sampled_words(records_ptr, b, S)
    picked = load_picked(rows_ptr, weights_ptr, bh, J)
    a0, a1, a2, a3 = sum_rows(field(records_ptr, b, TABLES), picked, word, mask, J, ASSEMBLY)
    reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1), 1.0)
    first, span = searched_range(records_ptr, b)
    b0 = bin_or_none(linear_position(a0, reach), searched(word, 0, first, span) & mask)
    b1 = bin_or_none(linear_position(a1, reach), searched(word, 1, first, span) & mask)
    b2 = bin_or_none(linear_position(a2, reach), searched(word, 2, first, span) & mask)
    b3 = bin_or_none(linear_position(a3, reach), searched(word, 3, first, span) & mask)
    counts = count_bins(tl.reshape(tl.join(tl.join(b0, b1), tl.join(b2, b3)), [4 * SAMPLE_WORDS]))
    finish_histogram(records_ptr, histograms_ptr, arrivals_ptr, limits_ptr, counts, b, bh, S)


@triton.jit
def finish_histogram(
    records_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    counts: tl.tensor,
    b: tl.tensor,
    bh: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Leaves one of a head's S histograms; the last program reads the threshold off their sum."""
    bins = tl.arange(0, BINS)
    tl.store(histograms_ptr + (bh * S + tl.program_id(0)) * BINS + bins, counts)
    if arrives_last(arrivals_ptr, bh):
        all_ptr = histograms_ptr + (bh * S + tl.arange(0, S))[:, None] * BINS + bins[None, :]
        total = tl.sum(tl.load(all_ptr, cache_modifier=".cg"), 0)
        tl.store(limits_ptr + bh, threshold(records_ptr, total, b))


@triton.jit
def count_bins(bins: tl.tensor) -> tl.tensor:
    """How many are in each bin; -1 is in none."""
    return tl.histogram(tl.maximum(bins, 0), BINS, mask=bins >= 0)


@triton.jit
def sample_heads_kernel(
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
    S: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (sample, query): leaves the logits of its keys for one head, with the largest and the sum of weights."""
    wait_for_launch(CHAINED)
    slot = tl.program_id(1)
    bh = slot // L
    b = bh // H
    picked = load_picked(rows_ptr, weights_ptr, slot, J)
    unit = tl.load(units_ptr + slot * 2) * LOG2E
    word, mask = sampled_words(records_ptr, b, S)
    first, span = searched_range(records_ptr, b)
    in0, in1 = searched(word, 0, first, span) & mask, searched(word, 1, first, span) & mask
    in2, in3 = searched(word, 2, first, span) & mask, searched(word, 3, first, span) & mask
    a0, a1, a2, a3 = sum_rows(field(records_ptr, b, TABLES), picked, word, mask, J, ASSEMBLY)
    x0 = tl.where(in0, a0.to(tl.float32) * unit, float("-inf"))
    x1 = tl.where(in1, a1.to(tl.float32) * unit, float("-inf"))
    x2 = tl.where(in2, a2.to(tl.float32) * unit, float("-inf"))
    x3 = tl.where(in3, a3.to(tl.float32) * unit, float("-inf"))
    peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    place = slot * S + tl.program_id(0)
    own_ptr = logits_ptr + place.to(tl.int64) * (4 * SAMPLE_WORDS) + tl.arange(0, SAMPLE_WORDS)
    tl.store(own_ptr, x0)
    tl.store(own_ptr + SAMPLE_WORDS, x1)
    tl.store(own_ptr + 2 * SAMPLE_WORDS, x2)
    tl.store(own_ptr + 3 * SAMPLE_WORDS, x3)
    weights = tl.exp2(x0 - base) + tl.exp2(x1 - base) + tl.exp2(x2 - base) + tl.exp2(x3 - base)
    tl.store(peaks_ptr + place, peak)
    tl.store(masses_ptr + place, tl.sum(weights, 0))


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
    H: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    S: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Makes the normalisers; every program leaves a histogram of its keys' summed softmaxes, as when pooled.

    Lets the next launch begin before its own wait: that one reads what was picked, which is complete by now, and waits
    for this one's end before it reads anything else.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    bh = tl.program_id(1)
    b = bh // H
    place = bh * L * S + tl.program_id(0)
    j = tl.arange(0, 4 * SAMPLE_WORDS)
    normalisers = sample_normalisers(peaks_ptr, masses_ptr, bh, L, LP, S)
    heads = tl.arange(0, LP)
    tl.store(normalisers_ptr + bh * L + heads, normalisers, mask=heads < L)
    own_ptr = logits_ptr + place.to(tl.int64) * (4 * SAMPLE_WORDS) + j
    there = tl.load(own_ptr) > float("-inf")
    weights = tl.zeros([4 * SAMPLE_WORDS], tl.float32)
    for g in tl.static_range(L):
        normaliser = tl.sum(tl.where(heads == g, normalisers, 0.0), 0)
        weights += tl.exp2(tl.load(own_ptr + g * (S * 4 * SAMPLE_WORDS)) - normaliser)
    counts = count_bins(bin_or_none(octave_position(weights), there))
    finish_histogram(records_ptr, histograms_ptr, arrivals_ptr, limits_ptr, counts, b, bh, S)


@triton.jit
def sample_normalisers(
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    bh: tl.tensor,
    L: tl.constexpr,
    LP: tl.constexpr,
    S: tl.constexpr,
) -> tl.tensor:
    """log2 of every head's sum of the sample's weights, [LP]."""
    g = tl.arange(0, LP)[:, None]
    places = (bh * L + g) * S + tl.arange(0, S)[None, :]
    peaks = tl.load(peaks_ptr + places, mask=g < L, other=float("-inf"))
    masses = tl.load(masses_ptr + places, mask=g < L, other=0.0)
    highest = tl.max(peaks, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(peaks - highest[:, None]) * masses, 1)
    return highest + tl.log2(tl.where(total > 0.0, total, 1.0))


def search(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace) -> None:
    """Launches the search of one step up to the threshold.

    q_BHGD: [B, H, G, d] contiguous, unscaled, in a float dtype. Does not wait for the device.
    """
    rows = q_BHGD.shape[0] * plan.kv_heads
    samples = plan.shape.sample_programs
    pick(q_BHGD, records_BF, plan, work)
    options = {"H": plan.kv_heads, "S": samples, "num_warps": _SAMPLE_WARPS} | chained(q_BHGD.device)
    reading = {"J": plan.picks, "ASSEMBLY": q_BHGD.is_cuda}
    picked = (records_BF, work.rows, work.weights, work.units)
    found = (work.histograms, work.arrivals, work.limits)
    if plan.pooled:
        sample_pooled_kernel[(samples, rows)](*picked, *found, **reading, **options)
        return
    sample = (work.logits, work.peaks, work.masses)
    sample_heads_kernel[(samples, rows * plan.queries)](
        *picked, *sample, L=plan.queries, **reading, **options
    )
    combine_kernel[(samples, rows)](
        records_BF, *sample, work.normalisers, *found,
        L=plan.queries, LP=triton.next_power_of_2(plan.queries), **options,
    )  # fmt: skip


def pick(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace) -> None:
    """Launches the choice of the nearest centroids alone: fills rows, weights and units of `work`."""
    pick_kernel[(q_BHGD.shape[0] * plan.kv_heads * plan.queries,)](
        q_BHGD, records_BF, work.rows, work.weights, work.units, plan.scale / (plan.group // plan.queries),
        H=plan.kv_heads, L=plan.queries, G=plan.group, D=plan.head_dim, M=plan.subspaces, C=plan.centroids,
        CP=triton.next_power_of_2(plan.centroids), STRIDED=plan.strided, POOLED=plan.pooled,
        num_warps=8, **chained(q_BHGD.device),
    )  # fmt: skip


def unpacked_weights(work: Workspace) -> Tensor:
    """The 8-bit weights of the picked rows times their unit, [B, H, L, J] float32."""
    shifts = torch.arange(0, 32, 8, device=work.weights.device)
    return ((work.weights[..., None] >> shifts) & 255).flatten(-2) * work.units[..., :1]
