"""How kernels find the rows of a range: views [B, H, R, N, D] of longer tensors, one problem per range of a head.

Shape legend: B batch, H query heads, E KV heads, R ranges, N points, Y = B*H*R and Z = B*E*R problems, D dims.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Constants(NamedTuple):
    """What a kernel is compiled for: dims of a point, members of a cluster that a program reads at a time, how products
    are computed; and of a kernel over such, the padded numbers of query means and of clusters that it holds."""

    DIM: tl.constexpr
    TILE: tl.constexpr
    PRECISION: tl.constexpr
    MEANS: tl.constexpr
    CLUSTERS: tl.constexpr

    @classmethod
    def of(cls, points: Tensor, tile: int = 0, means: int = 0, clusters: int = 0) -> Constants:
        """points: whose dtype and last dimension count."""
        numbers = points.shape[-1], tile, precision(points), padded(means), padded(clusters)
        return cls(*map(tl.constexpr, numbers))


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
def row_ptrs(rows: tl.tensor, at: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Addresses of the numbers of some rows of a problem. at: int64."""
    rows_ptr, of_point = rows
    return rows_ptr + at[:, None] * of_point + tl.arange(0, K.DIM)[None, :]


@triton.jit
def load_rows(rows: tl.tensor, at: tl.tensor, inside: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Some rows of a problem, zero outside."""
    return tl.load(row_ptrs(rows, at, K), mask=inside[:, None], other=0.0)


@triton.jit
def members_from(
    members_ptr: tl.tensor, start: tl.tensor, count: tl.tensor, K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The next TILE of a cluster's `count` members, int64, and which of them there are."""
    line = start + tl.arange(0, K.TILE)
    inside = line < count
    return tl.load(members_ptr + line, mask=inside, other=0).to(tl.int64), inside


@triton.jit
def key_problem(problem: tl.tensor, heads: tl.tensor, group: tl.tensor, ranges: tl.tensor) -> tl.tensor:
    """The problem of the KV head that a problem of a query head reads."""
    head = (problem // ranges) % heads
    batch = problem // (ranges * heads)
    return (batch * (heads // group) + head // group) * ranges + problem % ranges
