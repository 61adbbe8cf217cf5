"""The nearest centroid of every vector, on the device: products of matrices, of which only the largest are kept.

Shape legend: H heads, N vectors, T blocks, C clusters, D dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from index_store.indexes.kmeans.first_centroids import Blocks


def assign_vectors(
    vectors_HND: Tensor,
    centroids_HCD: Tensor,
    halves_HC: Tensor | None,
    table_TX: Tensor,
    blocks: Blocks,
    assignment_HN: Tensor,
) -> None:
    """Writes the cluster with the largest v.c - half of every vector in a block; without halves, the largest v.c."""
    heads, count, dim = vectors_HND.shape
    longest = max(end - first for first, end, _, _ in blocks)
    most = max(stop - begin for _, _, begin, stop in blocks)
    whole = vectors_HND.dtype == torch.float32
    options = product_options(whole, dim)
    points, tile = 64, 128
    if options["STAGES"] > 1:
        # Fewer centroids at once leave registers for more vectors: 324 us instead of 418 (docs/log.md).
        points, tile, options["STAGES"] = 128, 64, 2
    assign_kernel[(triton.cdiv(longest, points), len(blocks), heads)](
        vectors_HND,
        centroids_HCD,
        halves_HC,
        table_TX,
        assignment_HN,
        vectors_HND.stride(0),
        vectors_HND.stride(1),
        count,
        centroids_HCD.shape[1],
        HALVES=halves_HC is not None,
        DIM=dim,
        POINTS=points,
        TILE=tile,
        TILES=int(triton.next_power_of_2(triton.cdiv(most, tile))),
        **options,
    )


def assign_vectors_reference(
    vectors_HND: Tensor,
    centroids_HCD: Tensor,
    halves_HC: Tensor | None,
    table_TX: Tensor,
    blocks: Blocks,
    assignment_HN: Tensor,
) -> None:
    """The same, eagerly."""
    for first, end, begin, stop in blocks:
        own = centroids_HCD[:, begin:stop].float()
        products = vectors_HND[:, first:end].float() @ own.transpose(1, 2)
        if halves_HC is not None:
            products -= halves_HC[:, None, begin:stop]
        assignment_HN[:, first:end] = (products.argmax(-1) + begin).to(torch.int32)


def product_options(whole: bool, dim: int) -> dict[str, Any]:
    """Of a launch that multiplies matrices of vectors. whole: of float32."""
    return {
        "PRECISION": "ieee" if whole else "tf32",
        "STAGES": 1 if whole or dim > 128 else 3,
        "num_warps": 8 if dim > 128 else 4,
    }


@triton.jit
def bounds_of(table_ptr: tl.tensor, block: tl.tensor) -> tl.tensor:
    """A block's vectors first..end-1 and clusters begin..stop-1."""
    row = table_ptr + block * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit(do_not_specialize=["count", "clusters"])
def assign_kernel(
    vectors_ptr: tl.tensor,
    centroids_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    table_ptr: tl.tensor,
    assignment_ptr: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    clusters: tl.tensor,
    HALVES: tl.constexpr,
    DIM: tl.constexpr,
    POINTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per (POINTS vectors, block, head)."""
    block = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    first, end, begin, stop = bounds_of(table_ptr, block)
    at = first + tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    if first + tl.program_id(0) * POINTS < end:
        inside = at < end
        dims = tl.arange(0, DIM)
        from_ptr = vectors_ptr + head * head_stride
        vectors = tl.load(
            from_ptr + at.to(tl.int64)[:, None] * row_stride + dims[None, :], mask=inside[:, None], other=0.0
        )
        best = tl.full([POINTS, TILE], float("-inf"), tl.float32)
        centroids_head = centroids_ptr + head * clusters * DIM
        for tile in tl.range(0, tl.cdiv(stop - begin, TILE), num_stages=STAGES):
            # Where there are no more clusters, the last one again, so that nothing has to be masked.
            own = tl.minimum(begin + tile * TILE + tl.arange(0, TILE), stop - 1)
            centroids = tl.load(centroids_head + own[:, None] * DIM + dims[None, :])
            products = tl.dot(vectors, tl.trans(centroids), input_precision=PRECISION)
            if HALVES:
                products -= tl.load(halves_ptr + head * clusters + own)[None, :]
            # The last bits of a product give way to the number of the tile, which then needs no array of its own.
            bits = (products.to(tl.int32, bitcast=True) & (-TILES)) | tile
            best = tl.maximum(best, bits.to(tl.float32, bitcast=True))
        column = tl.argmax(best, 1)
        columns = tl.arange(0, TILE)
        bits = best.to(tl.int32, bitcast=True) & (TILES - 1)
        tile = tl.sum(tl.where(columns[None, :] == column[:, None], bits, 0), 1)
        chosen = tl.minimum(begin + tile * TILE + column, stop - 1)
        tl.store(assignment_ptr + head * count + at, chosen.to(tl.int32), mask=inside)
