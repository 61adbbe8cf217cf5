"""Attention in parts: the step of an online softmax, one for all kernels, what programs leave, and the merge of it.

Every program keeps, for each query head, the peak of the logits so far, the sum of the weights exp2(logit - peak), and
the sum of the values by these weights; a tile with a higher peak first shrinks both sums. Logits are in units of log2,
since exp2 is one instruction, and -inf for keys that are not there; results are natural. What a program leaves are
plain numbers, not normalised: a part may also take weight away (keys that leave a cluster), and its sum of weights may
then be zero or negative while the merged one is positive.

Shape legend: X = HEAD_TILE query heads of a group, padded; N keys of a tile; R rows (sequence x KV head), S slots, G
group heads; d head dim. Peaks [X], totals [X] and sums [X, d] are float32, logits [X, N] too; queries [X, d], keys and
values [N, d] are in the dtype of the keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.families import LARGEST_GROUP
from decode_engine.kernels.launches import chained, wait_for_launch

LOG2E = 1.0 / math.log(2.0)
HEAD_TILE = tl.constexpr(LARGEST_GROUP)


class AttendConstants(NamedTuple):
    """What kernels that attend are compiled for, with one record for all of their functions.

    HEADS: KV heads. GROUP: query heads of each. DIM: channels. X: query rows of a tile. TILE: keys of an iteration.
    STAGES: iterations whose loads are in flight. PRECISION: how dots multiply float32. PLANES: contexts' rows are in
    two planes. WIDTH: elements of a key as it is stored. SEGMENTS: of a list, SEGMENTS_TILE the next power of two.
    LOCATED: rows may be in slots. ASSEMBLY: on a device.
    """

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    DIM: tl.constexpr
    X: tl.constexpr
    TILE: tl.constexpr
    STAGES: tl.constexpr
    PRECISION: tl.constexpr
    PLANES: tl.constexpr
    WIDTH: tl.constexpr
    SEGMENTS: tl.constexpr
    SEGMENTS_TILE: tl.constexpr
    LOCATED: tl.constexpr
    ASSEMBLY: tl.constexpr

    @classmethod
    def of(
        cls,
        queries: Tensor,
        heads: int,
        tile: int,
        stages: int,
        *,
        rows: int = LARGEST_GROUP,
        planes: bool = False,
        segments: int = 1,
        located: bool = False,
    ) -> AttendConstants:
        """queries: [.., G, d]. Products of float32 need all registers that loads in flight would take."""
        group, head_dim = queries.shape[-2:]
        whole, up = queries.dtype == torch.float32, triton.next_power_of_2(segments)
        numbers = (
            heads, group, head_dim, rows, tile, 1 if whole else stages, "ieee" if whole else "tf32", planes,
            head_dim // 8 if planes else head_dim, segments, up, located, queries.is_cuda,
        )  # fmt: skip
        return cls(*map(tl.constexpr, numbers))


def keys_of_tile(keys: int, head_dim: int) -> int:
    """Of a tile: so many of up to 128 channels, half of them where rows are longer, so that it has room."""
    return keys if head_dim <= 128 else keys // 2


@triton.jit
def load_group(q_ptr: tl.tensor, row: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """The queries of a row's group, padded with zeros."""
    heads = tl.arange(0, HEAD_TILE)
    dims = tl.arange(0, K.DIM)
    at = (row * K.GROUP + heads)[:, None] * K.DIM + dims[None, :]
    return tl.load(q_ptr + at, mask=heads[:, None] < K.GROUP, other=0.0)


@triton.jit
def no_keys_yet(K: tl.constexpr) -> tl.tensor:
    """Peaks, totals and sums before the first tile."""
    peaks = tl.full([K.X], float("-inf"), tl.float32)
    return peaks, tl.zeros([K.X], tl.float32), tl.zeros([K.X, K.DIM], tl.float32)


@triton.jit
def tile_logits(
    q: tl.tensor, keys: tl.tensor, there: tl.tensor, scale_log2: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """Logits of the keys that are there [N]. Queries and keys are tuples, of as many parts of their channels."""
    logits = tl.dot(q[0], tl.trans(keys[0]), input_precision=K.PRECISION)
    for part in tl.static_range(1, len(q)):
        logits = tl.dot(q[part], tl.trans(keys[part]), logits, input_precision=K.PRECISION)
    logits *= scale_log2
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
    LIFT: tl.constexpr = 0.0,
) -> tl.tensor:
    """Peaks and totals with more logits, what earlier sums shrink by [X], and the new weights [X, N].

    factors: of the weights. TAKE: the weights of logits `away` are taken off. LIFT: peaks stay so far below logits.
    """
    highest = tl.max(logits, 1) - LIFT
    if TAKE:
        highest = tl.maximum(highest, tl.max(away, 1))
    higher, base, shrink = raise_peaks(peaks, highest)
    weights = tl.exp2(logits - base[:, None]) * factors
    if TAKE:
        weights -= tl.exp2(away - base[:, None])
    return higher, totals * shrink + tl.sum(weights, 1), shrink, weights


@triton.jit
def add_weighted(
    sums: tl.tensor, weights: tl.tensor, values: tl.tensor, FINE: tl.constexpr, K: tl.constexpr
) -> tl.tensor:
    """sums [X, d] + weights [X, N] @ values [N, d].

    FINE: weights count with twice the digits of the values' type, for sums that others largely cancel.
    """
    coarse = weights.to(values.dtype)
    sums = tl.dot(coarse, values, sums, input_precision=K.PRECISION)
    if FINE and values.dtype != tl.float32:
        rest = (weights - coarse.to(tl.float32)).to(values.dtype)
        sums = tl.dot(rest, values, sums, input_precision=K.PRECISION)
    return sums


@triton.jit
def attend_tile(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    there: tl.tensor,
    state: tl.tensor,
    scale_log2: tl.tensor,
    K: tl.constexpr,
    LIFT: tl.constexpr = 0.0,
) -> tl.tensor:
    """Peaks, totals and sums with a tile of keys, of which some are there [N], and nothing is taken off. LIFT: `grow`.

    Queries, keys, values and sums are tuples, of as many parts of their channels.
    """
    peaks, totals, sums = state
    logits = tile_logits(q, keys, there, scale_log2, K)
    peaks, totals, shrink, weights = grow(peaks, totals, logits, 1.0, logits, False, LIFT)
    larger: tl.tensor = ()
    for part in tl.static_range(len(q)):
        larger += (add_weighted(sums[part] * shrink[:, None], weights, values[part], False, K),)
    return peaks, totals, larger


_AT_ONCE, _WIDTH = 8192, 128
"""Numbers that a merging program holds, half of its registers; dimensions that it merges, at most."""


class Partials(NamedTuple):
    """Unmerged attention, one slot per program.

    sums_RSGD: [R, S, G, d] float32, sum of exp2(logit - peak) v; undefined where the peak is -inf. peaks_RSG: [R, S, G]
    float32 in units of log2, -inf for a slot without keys. totals_RSG: [R, S, G] float32, sum of exp2(logit - peak).
    """

    sums_RSGD: Tensor
    peaks_RSG: Tensor
    totals_RSG: Tensor

    @staticmethod
    def allocate(rows: int, slots: int, group: int, head_dim: int, device: torch.device) -> Partials:
        """Uninitialised slots; every program of a launch writes its own."""
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        return Partials(
            torch.empty(rows, slots, group, head_dim, **options),
            torch.empty(rows, slots, group, **options),
            torch.empty(rows, slots, group, **options),
        )


def merge_partials(
    partials: Partials,
    dtype: torch.dtype = torch.float32,
    sink_HG: Tensor | None = None,
    slots_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention out [R, G, d] in `dtype` and lse [R, G] float32, natural; 0 and -inf for rows without any key.

    sink_HG: float32 logits of a learnt sink of every query head (`LogitForm`), contiguous, where row r is KV head r %
    H; lse of rows without any key is the sink's then. slots_B: int32, how many slots of every sequence's rows hold
    something, the first ones; all by default.
    """
    rows, slots, group, head_dim = partials.sums_RSGD.shape
    device = partials.sums_RSGD.device
    out = torch.empty(rows, group, head_dim, dtype=dtype, device=device)
    lse = torch.empty(rows, group, dtype=torch.float32, device=device)
    # Few rows leave most of the device idle, so that each is merged by several programs; long ones are by two.
    width = min(head_dim, _WIDTH) if rows * group >= 256 else 32
    padded = triton.next_power_of_2(slots)
    merge_kernel[(rows * group, head_dim // width)](
        partials,
        out,
        lse,
        sink_HG,
        slots_B,
        slots,
        OWN_ROWS=0 if slots_B is None else rows // len(slots_B),
        HEADS=1 if sink_HG is None else len(sink_HG),
        GROUP=group,
        DIM=head_dim,
        WIDTH=width,
        SLOTS=padded,
        TILE=min(64, padded),
        AT_ONCE=padded * width <= _AT_ONCE,
        num_warps=4,
        **chained(device),
    )
    return out, lse


def merge_partials_reference(
    partials: Partials,
    dtype: torch.dtype = torch.float32,
    sink_HG: Tensor | None = None,
    slots_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, eagerly."""
    peaks = partials.peaks_RSG
    if slots_B is not None:
        used_R = slots_B.repeat_interleave(len(peaks) // len(slots_B))
        unused_RS = torch.arange(peaks.shape[1], device=peaks.device) >= used_R[:, None]
        peaks = peaks.masked_fill(unused_RS[..., None], -torch.inf)
    highest = peaks.amax(1)
    base = torch.where(torch.isneginf(highest), 0.0, highest)
    weights = torch.exp2(peaks - base[:, None])
    present = weights > 0
    totals = torch.where(present, partials.totals_RSG * weights, 0.0).sum(1)
    sums = torch.where(present[..., None], partials.sums_RSGD * weights[..., None], 0.0).sum(1)
    empty = totals <= 0
    out = sums / torch.where(empty, 1.0, totals)[..., None]
    lse = (base + totals.clamp(min=0).log2()) / LOG2E
    out.masked_fill_(empty[..., None], 0.0)
    if sink_HG is not None:
        keys = lse
        lse = torch.logaddexp(keys, sink_HG.repeat(len(keys) // len(sink_HG), 1))
        out *= torch.exp(keys - lse)[..., None]
    return out.to(dtype), lse


@triton.jit
def store_partial(
    partials: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    slot: tl.tensor,
    state: tl.tensor,
    K: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    """Writes what a program found into its slot, one of a row's `slots`; without SUMS only peaks and totals."""
    peaks, totals, sums = state
    sums_ptr, peaks_ptr, totals_ptr = partials
    heads = tl.arange(0, HEAD_TILE)
    at = (row.to(tl.int64) * slots + slot) * K.GROUP + heads
    tl.store(peaks_ptr + at, peaks, mask=heads < K.GROUP)
    tl.store(totals_ptr + at, totals, mask=heads < K.GROUP)
    if SUMS:
        into = sums_ptr + at[:, None] * K.DIM + tl.arange(0, K.DIM)[None, :]
        tl.store(into, sums, mask=(heads < K.GROUP)[:, None] & (peaks != float("-inf"))[:, None])


@triton.jit
def load_sums(
    sums_ptr: tl.tensor, at: tl.tensor, there: tl.tensor, dims: tl.tensor, DIM: tl.constexpr
) -> tl.tensor:
    """Sums of slots [slots, dims]; of those without keys whatever they hold: to wait for peaks first takes longer."""
    return tl.load(sums_ptr + at[:, None] * DIM + dims[None, :], mask=there[:, None], other=0.0)


@triton.jit
def weighted(sums: tl.tensor, peaks: tl.tensor, base: tl.tensor) -> tl.tensor:
    """Sums of slots, added up relative to a common peak; slots without keys are left out."""
    present = (peaks != float("-inf"))[:, None]
    return tl.sum(tl.where(present, tl.exp2(peaks - base)[:, None] * sums, 0.0), 0)


@triton.jit(do_not_specialize=["slots"])
def merge_kernel(
    partials: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    used_ptr: tl.tensor,
    slots: tl.tensor,
    OWN_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (row, group head, WIDTH of the values' dimensions).

    OWN_ROWS: of a sequence, which says how many of their slots are used; 0 where all are.
    """
    sums_ptr, peaks_ptr, totals_ptr = partials
    row_head = tl.program_id(0)
    part = tl.program_id(1)
    row = (row_head // GROUP).to(tl.int64)
    used = slots
    if OWN_ROWS:  # by the host, so that it is there already
        used = tl.load(used_ptr + row // OWN_ROWS)
    wait_for_launch(CHAINED)
    head = row_head % GROUP
    first = row * slots * GROUP + head
    every = tl.arange(0, SLOTS)
    dims = part * WIDTH + tl.arange(0, WIDTH)
    early = tl.zeros([SLOTS, WIDTH], tl.float32)
    if AT_ONCE:  # on their way while the peaks are compared
        early = load_sums(sums_ptr, first + every * GROUP, every < used, dims, DIM)
    peaks = tl.load(peaks_ptr + first + every * GROUP, mask=every < used, other=float("-inf"))
    totals = tl.load(totals_ptr + first + every * GROUP, mask=every < used, other=0.0)
    highest = tl.max(peaks, 0)
    sink = 0.0
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row % HEADS * GROUP + head) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.where(peaks == float("-inf"), 0.0, totals * tl.exp2(peaks - base)), 0)
    if sink_ptr is not None:
        total += tl.exp2(sink - base)
    if AT_ONCE:
        merged = weighted(early, peaks, base)
    else:
        merged = tl.zeros([WIDTH], tl.float32)
        for tile in tl.static_range(SLOTS // TILE):
            slot = tile * TILE + tl.arange(0, TILE)
            at = first + slot * GROUP
            peak = tl.load(peaks_ptr + at, mask=slot < used, other=float("-inf"))
            merged += weighted(load_sums(sums_ptr, at, slot < used, dims, DIM), peak, base)
    empty = total <= 0
    merged = tl.where(empty, 0.0, merged / tl.where(empty, 1.0, total))
    tl.store(out_ptr + row_head.to(tl.int64) * DIM + dims, merged.to(out_ptr.dtype.element_ty))
    if part == 0:
        lse = tl.where(empty, float("-inf"), base + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse_ptr + row_head, lse * 0.6931471805599453)
