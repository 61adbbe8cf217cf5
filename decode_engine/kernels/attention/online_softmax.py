"""The step of an online softmax, one for all kernels that attend: a tile of keys more.

Every program keeps, for each query head, the peak of the logits so far, the sum of the weights exp2(logit - peak), and
the sum of the values by these weights; a tile with a higher peak first shrinks both sums. Logits are in units of log2,
since exp2 is one instruction, and -inf for keys that are not there.

Shape legend: X = HEAD_TILE query heads of a group, padded; N keys of a tile; d head dim. Peaks [X], totals [X] and sums
[X, d] are float32, logits [X, N] too; queries [X, d], keys and values [N, d] are in the dtype of the keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from decode_engine.kernels.families import LARGEST_GROUP

LOG2E = 1.0 / math.log(2.0)
HEAD_TILE = tl.constexpr(LARGEST_GROUP)


def tile_options(dtype: torch.dtype, tile: int, stages: int) -> dict[str, Any]:
    """Of a launch that attends to keys of this dtype: keys per iteration, loads in flight, warps, how dots multiply."""
    whole = dtype == torch.float32
    return {
        "TILE": tile,
        "STAGES": 1 if whole else stages,
        "PRECISION": "ieee" if whole else "tf32",
        "num_warps": 4,
    }


def keys_of_tile(keys: int, head_dim: int) -> int:
    """Of a tile: so many of up to 128 channels, half of them where rows are longer, so that it has room."""
    return keys if head_dim <= 128 else keys // 2


@triton.jit
def load_group(q_ptr: tl.tensor, row: tl.tensor, GROUP: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """The queries of a row's group, padded with zeros."""
    heads = tl.arange(0, HEAD_TILE)
    dims = tl.arange(0, DIM)
    at = (row * GROUP + heads)[:, None] * DIM + dims[None, :]
    return tl.load(q_ptr + at, mask=heads[:, None] < GROUP, other=0.0)


@triton.jit
def no_keys_yet(DIM: tl.constexpr) -> tl.tensor:
    """Peaks, totals and sums before the first tile."""
    peaks = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    return peaks, tl.zeros([HEAD_TILE], tl.float32), tl.zeros([HEAD_TILE, DIM], tl.float32)


@triton.jit
def tile_logits(
    q: tl.tensor, keys: tl.tensor, there: tl.tensor, scale_log2: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """Logits of the keys that are there [N]."""
    logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale_log2
    return tl.where(there[None, :], logits, float("-inf"))


@triton.jit
def raise_peaks(peaks: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Peaks with more logits, whose highest are given; the same where it is finite, else 0; and how sums shrink."""
    higher = tl.maximum(peaks, highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, base, tl.exp2(peaks - base)


@triton.jit
def grow(
    peaks: tl.tensor,
    totals: tl.tensor,
    logits: tl.tensor,
    factors: tl.tensor,
    away: tl.tensor,
    TAKE: tl.constexpr,
) -> tl.tensor:
    """Peaks and totals with more logits, what earlier sums shrink by [X], and the new weights [X, N].

    factors: of the weights. TAKE: the weights of logits `away` are taken off.
    """
    highest = tl.max(logits, 1)
    if TAKE:
        highest = tl.maximum(highest, tl.max(away, 1))
    higher, base, shrink = raise_peaks(peaks, highest)
    weights = tl.exp2(logits - base[:, None]) * factors
    if TAKE:
        weights -= tl.exp2(away - base[:, None])
    return higher, totals * shrink + tl.sum(weights, 1), shrink, weights


@triton.jit
def add_weighted(
    sums: tl.tensor, weights: tl.tensor, values: tl.tensor, FINE: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """sums [X, d] + weights [X, N] @ values [N, d].

    FINE: weights count with twice the digits of the values' type, for sums that others largely cancel.
    """
    coarse = weights.to(values.dtype)
    sums = tl.dot(coarse, values, sums, input_precision=PRECISION)
    if FINE and values.dtype != tl.float32:
        rest = (weights - coarse.to(tl.float32)).to(values.dtype)
        sums = tl.dot(rest, values, sums, input_precision=PRECISION)
    return sums


@triton.jit
def attend_tile(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    there: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    scale_log2: tl.tensor,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Peaks, totals and sums with a tile of keys, of which some are there [N], and nothing is taken off."""
    logits = tile_logits(q, keys, there, scale_log2, PRECISION)
    peaks, totals, shrink, weights = grow(peaks, totals, logits, 1.0, logits, False)
    return peaks, totals, add_weighted(sums * shrink[:, None], weights, values, False, PRECISION)


@triton.jit
def attend_run(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    scale_log2: tl.tensor,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds the rows begin .. end - 1 of a KV head, key and value side by side, to a running softmax."""
    d = tl.arange(0, DIM)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        n = start + tl.arange(0, TILE)
        there = n < end
        at = rows_ptr + n.to(tl.int64)[:, None] * (2 * DIM) + d[None, :]
        k = tl.load(at, mask=there[:, None], other=0.0)
        v = tl.load(at + DIM, mask=there[:, None], other=0.0)
        peaks, totals, sums = attend_tile(q, k, v, there, peaks, totals, sums, scale_log2, PRECISION)
    return peaks, totals, sums
