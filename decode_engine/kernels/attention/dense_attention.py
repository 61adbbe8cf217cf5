"""Attention to everything: flash-decoding over contexts and tails, split into equal shares.

The query heads of a group share a tile of the tensor cores, so every key and value is read once.

Shape legend: B sequences, H KV heads, G group heads, S splits, d head dim, F fields of a record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.partials import LOG2E, Partials, chained, wait_for_launch
from decode_engine.kernels.records import field

KV = tl.constexpr(records.KV)
KV_HEAD = tl.constexpr(records.KV_HEAD)
TAIL = tl.constexpr(records.TAIL)
TAIL_HEAD = tl.constexpr(records.TAIL_HEAD)
KEYS = tl.constexpr(records.KEYS)
TAIL_KEYS = tl.constexpr(records.TAIL_KEYS)
_GROUP_TILE = 16  # the tensor cores' smallest tile; a group has up to 8 heads


@triton.jit
def attend_run(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    count: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    scale_log2: tl.tensor,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds one split's share of `count` neighbouring rows to a running softmax."""
    share = tl.cdiv(tl.cdiv(count, TILE), splits) * TILE
    begin = split * share
    end = tl.minimum(begin + share, count)
    d = tl.arange(0, DIM)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        n = start + tl.arange(0, TILE)
        there = n < end
        at = rows_ptr + n.to(tl.int64)[:, None] * (2 * DIM) + d[None, :]
        k = tl.load(at, mask=there[:, None], other=0.0)
        v = tl.load(at + DIM, mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(there[None, :], s, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, 1))
        fade = tl.exp2(peak - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        peak = higher
    return peak, total, acc


@triton.jit
def dense_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (split, row): one share of the context and one of the tail of a KV head."""
    wait_for_launch(CHAINED)
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    row = tl.program_id(1)
    b = row // HEADS
    h = row % HEADS
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    q = tl.load(q_ptr + (row * GROUP + g)[:, None] * DIM + d[None, :], mask=(g < GROUP)[:, None], other=0.0)
    element = tl.pointer_type(q_ptr.dtype.element_ty)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    context = field(records_ptr, b, KV) + h * field(records_ptr, b, KV_HEAD)
    context_ptr = tl.multiple_of(context.to(element), 16)
    count = field(records_ptr, b, KEYS).to(tl.int32)
    peak, total, acc = attend_run(
        q, context_ptr, count, split, splits, peak, total, acc, scale_log2, DIM, TILE, STAGES, PRECISION
    )
    tail = field(records_ptr, b, TAIL) + h * field(records_ptr, b, TAIL_HEAD)
    tail_ptr = tl.multiple_of(tail.to(element), 16)
    count = field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    peak, total, acc = attend_run(
        q, tail_ptr, count, split, splits, peak, total, acc, scale_log2, DIM, TILE, 1, PRECISION
    )
    at = (row.to(tl.int64) * splits + split) * GROUP + g
    tl.store(peaks_ptr + at, peak, mask=g < GROUP)
    tl.store(totals_ptr + at, total, mask=g < GROUP)
    tl.store(sums_ptr + at[:, None] * DIM + d[None, :], acc, mask=(g < GROUP)[:, None])


def attend_dense(q_BHGD: Tensor, records_BF: Tensor, partials: Partials, scale: float) -> None:
    """Fills the partial attention [B * H, S, G, d] of contexts and tails, one slot per split.

    q_BHGD: contiguous, unscaled, in the dtype of keys and values; G 1..8, d 64 or 128. scale: of the logits.
    """
    _, heads, group, head_dim = q_BHGD.shape
    rows, splits, _, _ = partials.sums_RSGD.shape
    whole = q_BHGD.dtype == torch.float32
    dense_kernel[(splits, rows)](
        q_BHGD,
        records_BF,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        scale * LOG2E,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        ROWS=_GROUP_TILE,
        TILE=64,
        STAGES=1 if whole else 3,  # two programs fit into a multiprocessor's shared memory
        PRECISION="ieee" if whole else "tf32",
        num_warps=4,
        **chained(q_BHGD.device),
    )


def attend_dense_reference(q_HGD: Tensor, kv_HN2D: Tensor, scale: float) -> Tensor:
    """Attention out [H, G, d] float32 of one sequence to rows [H, N, 2, d], context and tail together.

    It is 0 without keys.
    """
    if kv_HN2D.shape[1] == 0:
        return torch.zeros_like(q_HGD, dtype=torch.float32)
    keys, values = kv_HN2D[:, :, 0].float(), kv_HN2D[:, :, 1].float()
    logits = torch.einsum("hgd,hnd->hgn", q_HGD.float() * scale, keys)
    return torch.einsum("hgn,hnd->hgd", logits.softmax(-1), values)
