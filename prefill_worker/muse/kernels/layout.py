"""How kernels find the rows of a range: views [B, H, R, N, D] of longer tensors, one problem per range of a head.

Shape legend: B batch, H query heads, E KV heads, R ranges, N points, Y = B*H*R and Z = B*E*R problems, D dims.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST = 16  # of a matrix instruction


def rows_in(x_BHRNX: Tensor) -> tuple[Tensor, int, int, int, int]:
    """As kernels are given rows: with the distances of neighbours in batch, head, range and point, in elements."""
    batch, head, range_, point, *_ = x_BHRNX.stride()
    return x_BHRNX, batch, head, range_, point


def padded(count: int) -> int:
    """A power of two that matrix instructions take."""
    return max(LEAST, int(triton.next_power_of_2(count)))


def precision(x: Tensor) -> str:
    """How products of float32 are computed; the halves need no choice."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def rows_at_a_time(room: int, most: int) -> int:
    """How many members of a cluster a program reads at a time; `room` is the largest cluster."""
    return min(most, padded(room))


@triton.jit
def rows_of(rows: tl.tensor, problem: tl.tensor, heads: tl.tensor, ranges: tl.tensor) -> tl.tensor:
    """Where the rows of a problem begin, and how far apart they are."""
    rows_ptr, of_batch, of_head, of_range, of_point = rows
    own_range = problem % ranges
    head = (problem // ranges) % heads
    batch = problem // (ranges * heads)
    begin = batch.to(tl.int64) * of_batch + head.to(tl.int64) * of_head + own_range.to(tl.int64) * of_range
    return rows_ptr + begin, of_point


@triton.jit
def row_ptrs(rows: tl.tensor, at: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """Addresses of the numbers of some rows of a problem. at: int64."""
    rows_ptr, of_point = rows
    return rows_ptr + at[:, None] * of_point + tl.arange(0, DIM)[None, :]


@triton.jit
def load_rows(rows: tl.tensor, at: tl.tensor, inside: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """Some rows of a problem, zero outside."""
    return tl.load(row_ptrs(rows, at, DIM), mask=inside[:, None], other=0.0)


@triton.jit
def key_problem(problem: tl.tensor, heads: tl.tensor, group: tl.tensor, ranges: tl.tensor) -> tl.tensor:
    """The problem of the KV head that a problem of a query head reads."""
    head = (problem // ranges) % heads
    batch = problem // (ranges * heads)
    return (batch * (heads // group) + head // group) * ranges + problem % ranges
