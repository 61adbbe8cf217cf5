"""Kernels that find which keys to keep by query tables (CSAttention section 3.3, with projection weights).

`pick_kernel` chooses the table rows of every query. A sampling kernel scores a sample of the keys; the last of a head's
programs to end turns it into the threshold. What scores all keys (`table_attention`) may start before that, since it
needs the threshold only when the scores are there.

Per head, a key's score is the sum of the heads' softmaxes. Their normalisers are estimated from the same sample, so
that no logit of any key is ever written to memory: every program's largest weight counts once, as itself, and the
others stand for as many keys as were not sampled. The exact rule differs in which keys near the threshold it takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.partials import chained, wait_for_launch
from decode_engine.kernels.records import field
from decode_engine.kernels.table_device import (
    BINS,
    END,
    FIRST,
    LOG2E,
    SAMPLE_WORDS,
    arrives_last,
    bin_or_none,
    linear_position,
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
_COUNTED_AT_ONCE = 4096  # sampled keys that the last program bins at a time


@triton.jit
def pick_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
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
    CHAINED: tl.constexpr,
) -> None:
    """One program per query: see `pick_rows`."""
    wait_for_launch(CHAINED)
    bh = tl.program_id(1)
    b = bh // H
    if field(records_ptr, b, END) > field(records_ptr, b, FIRST):
        pick_rows(
            q_ptr, records_ptr, addresses_ptr, weights_ptr, units_ptr, b, bh % H, tl.program_id(0), scale,
            H, G, D, M, C, CP, GP, STRIDED, POOLED,
        )  # fmt: skip


@triton.jit
def sample_pooled_kernel(
    records_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
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
    a0, a1, a2, a3 = sum_rows(addresses_ptr, weights_ptr, bh, word, mask, J, ASSEMBLY)
    reach = tl.maximum(tl.load(units_ptr + bh * 2 + 1), 1.0)
    first, span = searched_range(records_ptr, b)
    b0 = bin_or_none(linear_position(a0, reach), searched(word, 0, first, span) & mask)
    b1 = bin_or_none(linear_position(a1, reach), searched(word, 1, first, span) & mask)
    b2 = bin_or_none(linear_position(a2, reach), searched(word, 2, first, span) & mask)
    b3 = bin_or_none(linear_position(a3, reach), searched(word, 3, first, span) & mask)
    counts = count_bins(tl.reshape(tl.join(tl.join(b0, b1), tl.join(b2, b3)), [4 * SAMPLE_WORDS]))
    bins = tl.arange(0, BINS)
    tl.store(histograms_ptr + (bh * S + tl.program_id(0)) * BINS + bins, counts)
    if arrives_last(arrivals_ptr, bh):
        all_ptr = histograms_ptr + (bh * S + tl.arange(0, S))[:, None] * BINS + bins[None, :]
        counts = tl.sum(tl.load(all_ptr, cache_modifier=".cg"), 0)
        tl.store(limits_ptr + bh, threshold(records_ptr, counts, b))


@triton.jit
def count_bins(bins: tl.tensor) -> tl.tensor:
    """How many are in each bin; -1 is in none."""
    return tl.histogram(tl.maximum(bins, 0), BINS, mask=bins >= 0)


@triton.jit
def sample_heads_kernel(
    records_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    H: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    J: tl.constexpr,
    S: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Every program leaves its keys' logits for each head; the last makes normalisers and the threshold of them all."""
    wait_for_launch(CHAINED)
    bh = tl.program_id(1)
    b = bh // H
    word, mask = sampled_words(records_ptr, b, S)
    first, span = searched_range(records_ptr, b)
    in0, in1 = searched(word, 0, first, span) & mask, searched(word, 1, first, span) & mask
    in2, in3 = searched(word, 2, first, span) & mask, searched(word, 3, first, span) & mask
    count = tl.sum(in0.to(tl.int32) + in1.to(tl.int32) + in2.to(tl.int32) + in3.to(tl.int32), 0)
    tl.store(sampled_ptr + bh * S + tl.program_id(0), count)
    j = tl.arange(0, SAMPLE_WORDS)
    for g in tl.static_range(L):
        slot = bh * L + g
        a0, a1, a2, a3 = sum_rows(addresses_ptr, weights_ptr, slot, word, mask, J, ASSEMBLY)
        unit = tl.load(units_ptr + slot * 2) * LOG2E
        x0 = tl.where(in0, a0.to(tl.float32) * unit, float("-inf"))
        x1 = tl.where(in1, a1.to(tl.float32) * unit, float("-inf"))
        x2 = tl.where(in2, a2.to(tl.float32) * unit, float("-inf"))
        x3 = tl.where(in3, a3.to(tl.float32) * unit, float("-inf"))
        peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        place = slot * S + tl.program_id(0)
        own_ptr = logits_ptr + place.to(tl.int64) * (4 * SAMPLE_WORDS) + j
        tl.store(own_ptr, x0)
        tl.store(own_ptr + SAMPLE_WORDS, x1)
        tl.store(own_ptr + 2 * SAMPLE_WORDS, x2)
        tl.store(own_ptr + 3 * SAMPLE_WORDS, x3)
        weights = tl.exp2(x0 - base) + tl.exp2(x1 - base) + tl.exp2(x2 - base) + tl.exp2(x3 - base)
        tl.store(peaks_ptr + place, peak)
        tl.store(masses_ptr + place, tl.sum(weights, 0))
    if arrives_last(arrivals_ptr, bh):
        normalisers = estimate_normalisers(peaks_ptr, masses_ptr, sampled_ptr, span, bh, L, LP, S)
        heads = tl.arange(0, LP)
        tl.store(normalisers_ptr + bh * L + heads, normalisers, mask=heads < L)
        counts = count_summed_weights(logits_ptr, normalisers, bh, L, LP, S, AT_ONCE)
        tl.store(limits_ptr + bh, threshold(records_ptr, counts, b))


@triton.jit
def estimate_normalisers(
    peaks_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    span: tl.tensor,
    bh: tl.tensor,
    L: tl.constexpr,
    LP: tl.constexpr,
    S: tl.constexpr,
) -> tl.tensor:
    """log2 of every head's sum of weights over all `span` searched keys, [LP].

    A few keys may hold most of a softmax. So each program's largest weight stands for itself alone, and its others for
    the keys that were not sampled.
    """
    g = tl.arange(0, LP)[:, None]
    p = tl.arange(0, S)
    places = (bh * L + g) * S + p[None, :]
    peaks = tl.load(peaks_ptr + places, mask=g < L, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(masses_ptr + places, mask=g < L, other=0.0, cache_modifier=".cg")
    sampled = tl.sum(tl.load(sampled_ptr + bh * S + p, cache_modifier=".cg"), 0)
    stands_for = span.to(tl.float32) / tl.maximum(sampled, 1).to(tl.float32)
    highest = tl.max(peaks, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    estimates = tl.maximum(masses - 1.0, 0.0) * stands_for + 1.0
    total = tl.sum(tl.exp2(peaks - highest[:, None]) * estimates, 1)
    return highest + tl.log2(tl.where(total > 0.0, total, 1.0))


@triton.jit
def count_summed_weights(
    logits_ptr: tl.tensor,
    normalisers: tl.tensor,
    bh: tl.tensor,
    L: tl.constexpr,
    LP: tl.constexpr,
    S: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """A histogram of the sampled keys' softmaxes, summed over the heads."""
    counts = tl.zeros([BINS], tl.int32)
    heads = tl.arange(0, LP)
    for start in range(0, S * 4 * SAMPLE_WORDS, AT_ONCE):
        weights = tl.zeros([AT_ONCE], tl.float32)
        for g in tl.static_range(L):
            place = ((bh * L + g) * S).to(tl.int64) * (4 * SAMPLE_WORDS) + start + tl.arange(0, AT_ONCE)
            x = tl.load(logits_ptr + place, cache_modifier=".cg")
            weights += tl.exp2(x - tl.sum(tl.where(heads == g, normalisers, 0.0), 0))
            there = x > float("-inf")
        counts += count_bins(bin_or_none(octave_position(weights), there))
    return counts


def search(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace) -> None:
    """Launches the search of one step up to the threshold.

    q_BHGD: [B, H, G, d] contiguous, unscaled, in a float dtype. Does not wait for the device.
    """
    rows = q_BHGD.shape[0] * plan.kv_heads
    samples = plan.shape.sample_programs
    pick(q_BHGD, records_BF, plan, work)
    options = {"H": plan.kv_heads, "J": plan.picks, "S": samples, "ASSEMBLY": q_BHGD.is_cuda}
    options |= {"num_warps": _SAMPLE_WARPS} | chained(q_BHGD.device)
    picked = (records_BF, work.addresses, work.weights, work.units)
    if plan.pooled:
        sample_pooled_kernel[(samples, rows)](*picked, work.histograms, work.arrivals, work.limits, **options)
        return
    sample_heads_kernel[(samples, rows)](
        *picked, work.logits, work.peaks, work.masses, work.sampled, work.normalisers, work.arrivals, work.limits,
        L=plan.queries, LP=triton.next_power_of_2(plan.queries),
        AT_ONCE=min(_COUNTED_AT_ONCE, samples * 4 * SAMPLE_WORDS.value), **options,
    )  # fmt: skip


def pick(q_BHGD: Tensor, records_BF: Tensor, plan: TablePlan, work: Workspace) -> None:
    """Launches the choice of the nearest centroids alone: fills addresses, weights and units of `work`."""
    pick_kernel[(plan.queries, q_BHGD.shape[0] * plan.kv_heads)](
        q_BHGD, records_BF, work.addresses, work.weights, work.units, plan.scale,
        H=plan.kv_heads, G=plan.group, D=plan.head_dim, M=plan.subspaces, C=plan.centroids,
        CP=triton.next_power_of_2(plan.centroids), GP=triton.next_power_of_2(plan.group), STRIDED=plan.strided,
        POOLED=plan.pooled, num_warps=8, **chained(q_BHGD.device),
    )  # fmt: skip


def unpacked_weights(work: Workspace) -> Tensor:
    """The 8-bit weights of the picked rows times their unit, [B, H, L, J] float32."""
    shifts = torch.arange(0, 32, 8, device=work.weights.device)
    return ((work.weights[..., None] >> shifts) & 255).flatten(-2) * work.units[..., :1]
