"""Puts the newest token's key and value of every sequence into its tail.

Shape legend: B sequences, H KV heads, d head dim, F fields of a record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import TAIL, TAIL_KEYS, field, head_rows


@triton.jit
def tail_write_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    records_ptr: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per sequence."""
    wait_for_launch(CHAINED)
    b = tl.program_id(0)
    count = field(records_ptr, b, TAIL_KEYS)
    if count > 0:
        h = tl.arange(0, HEAD_TILE).to(tl.int64)
        d = tl.arange(0, DIM)
        there = (h < HEADS)[:, None]
        k = tl.load(k_ptr + b.to(tl.int64) * k_row + h[:, None] * k_head + d[None, :], mask=there)
        v = tl.load(v_ptr + b.to(tl.int64) * v_row + h[:, None] * v_head + d[None, :], mask=there)
        rows = head_rows(records_ptr, b, h, TAIL, k_ptr.dtype.element_ty) + (count - 1) * (2 * DIM)
        tl.store(rows[:, None] + d[None, :], k, mask=there)
        tl.store(rows[:, None] + DIM + d[None, :], v, mask=there)


def write_tails(k_BHD: Tensor, v_BHD: Tensor, records_BF: Tensor) -> None:
    """Writes keys and values [B, H, d] as the last of each tail's TAIL_KEYS rows; nothing for idle rows.

    Any strides, but for the last dimension's, which is 1; in the dtype of the tails.
    """
    batch, heads, head_dim = k_BHD.shape
    tail_write_kernel[(batch,)](
        k_BHD,
        v_BHD,
        records_BF,
        k_BHD.stride(0),
        k_BHD.stride(1),
        v_BHD.stride(0),
        v_BHD.stride(1),
        HEADS=heads,
        HEAD_TILE=triton.next_power_of_2(heads),
        DIM=head_dim,
        num_warps=4,
        **chained(k_BHD.device),
    )


def write_tails_reference(
    k_BHD: Tensor, v_BHD: Tensor, tails_BHT2D: list[Tensor], counts_B: list[int]
) -> None:
    """The same on tensors: tails [H, capacity, 2, d] of every sequence with their number of rows."""
    for b, (tail, count) in enumerate(zip(tails_BHT2D, counts_B, strict=True)):
        if count:
            tail[:, count - 1] = torch.stack([k_BHD[b], v_BHD[b]], dim=1)
