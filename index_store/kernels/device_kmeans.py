"""k-means of many groups of vectors at once, on the device.

Every block of consecutive vectors of every head is a problem of its own (as in `index_store.indexes.cluster_building`);
one launch assigns all vectors, one moves all centroids, and nothing waits for the host. Both are products of matrices:
assignment compares vectors with centroids, and a centroid is the product of the rows that name it and the vectors, so
the sums need no atomics and come out the same every time.

Shape legend: H heads, N vectors, T blocks, C clusters, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from index_store.errors import InvalidArgumentError

METRICS = ("cosine", "euclidean")

Blocks = Sequence[tuple[int, int, int, int]]
"""Vectors first..end-1 and their clusters first..end-1, per block."""


def cluster_blocks(vectors_HND: Tensor, blocks: Blocks, iterations: int, metric: str, seed: int) -> Tensor:
    """The cluster of every vector, [H, N] int32; -1 for vectors in no block.

    vectors_HND: bfloat16, float16 or float32 with contiguous rows; D 16, 64 or 128. blocks: in ascending order,
    clusters numbered through. `cosine` compares directions (a zero vector lands in any cluster), `euclidean` the
    vectors. Seeds are spread over the block at random; a cluster that loses all its vectors keeps its centroid.
    """
    if metric not in METRICS:
        raise InvalidArgumentError(f"k-means: metric is {metric!r}, expected one of {', '.join(METRICS)}")
    if iterations < 1 or not blocks:
        raise InvalidArgumentError(
            f"k-means got {iterations} iterations over {len(blocks)} blocks, expected some"
        )
    heads, count, dim = vectors_HND.shape
    if vectors_HND.stride(2) != 1 or dim not in (16, 64, 128):
        raise InvalidArgumentError(
            f"k-means got vectors of {dim} dimensions, expected 16, 64 or 128, contiguous"
        )
    device = vectors_HND.device
    table = torch.tensor(blocks, dtype=torch.int32).to(device, non_blocking=True)
    centroids = _first_centroids(vectors_HND, table, blocks, seed)
    scales_HN = None
    if metric == "cosine":
        norms_HN = torch.linalg.vector_norm(vectors_HND, dim=-1, dtype=torch.float32)
        scales_HN = norms_HN.clamp_(min=1e-20).reciprocal_()
        centroids = torch.nn.functional.normalize(centroids, dim=-1)
    rounded = centroids.to(vectors_HND.dtype)
    halves = _half_squares(rounded, metric)
    assignment = torch.full((heads, count), -1, dtype=torch.int32, device=device)
    for _ in range(iterations):
        assign_vectors(vectors_HND, rounded, halves, table, blocks, assignment)
        move_centroids(vectors_HND, scales_HN, assignment, table, blocks, rounded, halves)
    assign_vectors(vectors_HND, rounded, halves, table, blocks, assignment)
    return assignment


def _first_centroids(vectors_HND: Tensor, table_TX: Tensor, blocks: Blocks, seed: int) -> Tensor:
    """[H, C, D] float32: one vector out of every stretch of a block, at random."""
    clusters = blocks[-1][3]
    sizes_T = table_TX[:, 3] - table_TX[:, 2]
    own_CX = table_TX.repeat_interleave(sizes_T, dim=0, output_size=clusters).double()
    first_C, end_C, begin_C, stop_C = own_CX.unbind(1)
    generator = torch.Generator(table_TX.device).manual_seed(seed)
    shape = (len(vectors_HND), clusters)
    drawn_HC = torch.rand(shape, generator=generator, dtype=torch.float64, device=table_TX.device)
    stretch_HC = torch.arange(clusters, device=table_TX.device) - begin_C + drawn_HC
    places_HC = (first_C + stretch_HC * (end_C - first_C) / (stop_C - begin_C)).long()
    places_HC.clamp_(max=max(0, vectors_HND.shape[1] - 1))
    return vectors_HND.gather(1, places_HC[..., None].expand(-1, -1, vectors_HND.shape[2])).float()


def _half_squares(centroids_HCD: Tensor, metric: str) -> Tensor:
    """What a product with a centroid is lowered by before it is compared: 0 for directions."""
    if metric == "cosine":
        return torch.zeros(centroids_HCD.shape[:2], device=centroids_HCD.device)
    return 0.5 * centroids_HCD.float().square().sum(-1)


def assign_vectors(
    vectors_HND: Tensor,
    centroids_HCD: Tensor,
    halves_HC: Tensor,
    table_TX: Tensor,
    blocks: Blocks,
    assignment_HN: Tensor,
) -> None:
    """Writes the cluster with the largest v.c - half of every vector in a block."""
    heads, count, dim = vectors_HND.shape
    longest = max(end - first for first, end, _, _ in blocks)
    most = max(stop - begin for _, _, begin, stop in blocks)
    whole = vectors_HND.dtype == torch.float32
    assign_kernel[(triton.cdiv(longest, 64), len(blocks), heads)](
        vectors_HND,
        centroids_HCD,
        halves_HC,
        table_TX,
        assignment_HN,
        vectors_HND.stride(0),
        vectors_HND.stride(1),
        count,
        centroids_HCD.shape[1],
        DIM=dim,
        POINTS=64,
        TILE=128,
        TILES=int(triton.next_power_of_2(triton.cdiv(most, 128))),
        **_options(whole),
    )


def assign_vectors_reference(
    vectors_HND: Tensor,
    centroids_HCD: Tensor,
    halves_HC: Tensor,
    table_TX: Tensor,
    blocks: Blocks,
    assignment_HN: Tensor,
) -> None:
    """The same, eagerly."""
    for first, end, begin, stop in blocks:
        own = centroids_HCD[:, begin:stop].float()
        products = vectors_HND[:, first:end].float() @ own.transpose(1, 2)
        products -= halves_HC[:, None, begin:stop]
        assignment_HN[:, first:end] = (products.argmax(-1) + begin).to(torch.int32)


def move_centroids(
    vectors_HND: Tensor,
    scales_HN: Tensor | None,
    assignment_HN: Tensor,
    table_TX: Tensor,
    blocks: Blocks,
    centroids_HCD: Tensor,
    halves_HC: Tensor,
) -> None:
    """Replaces centroids by the mean of their vectors; with scales by the direction of the sum of scaled ones."""
    heads, count, dim = vectors_HND.shape
    most = max(stop - begin for _, _, begin, stop in blocks)
    whole = vectors_HND.dtype == torch.float32
    move_kernel[(triton.cdiv(most, 128), len(blocks), heads)](
        vectors_HND,
        scales_HN,
        assignment_HN,
        table_TX,
        centroids_HCD,
        halves_HC,
        vectors_HND.stride(0),
        vectors_HND.stride(1),
        count,
        centroids_HCD.shape[1],
        SCALED=scales_HN is not None,
        DIM=dim,
        CLUSTERS=128,
        TILE=64,
        **_options(whole),
    )


def move_centroids_reference(
    vectors_HND: Tensor,
    scales_HN: Tensor | None,
    assignment_HN: Tensor,
    table_TX: Tensor,
    blocks: Blocks,
    centroids_HCD: Tensor,
    halves_HC: Tensor,
) -> None:
    """The same, eagerly."""
    clusters = centroids_HCD.shape[1]
    for head, own in enumerate(assignment_HN):
        named = own >= 0
        vectors = vectors_HND[head].float()
        if scales_HN is not None:
            vectors = vectors * scales_HN[head, :, None].to(vectors_HND.dtype).float()
        sums = torch.zeros(clusters, vectors.shape[1], device=vectors.device)
        sums.index_add_(0, own[named].long(), vectors[named])
        sizes = own[named].long().bincount(minlength=clusters)
        moved = sums / sizes.clamp(min=1)[:, None]
        if scales_HN is not None:
            moved = torch.nn.functional.normalize(sums, dim=-1)
        filled = sizes > 0
        centroids_HCD[head, filled] = moved[filled].to(centroids_HCD.dtype)
        if scales_HN is None:
            halves_HC[head] = 0.5 * centroids_HCD[head].float().square().sum(-1)


def _options(whole: bool) -> dict[str, Any]:
    return {
        "PRECISION": "ieee" if whole else "tf32",
        "STAGES": 1 if whole else 3,
        "num_warps": 4,
    }


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
    first = tl.load(table_ptr + block * 4)
    end = tl.load(table_ptr + block * 4 + 1)
    begin = tl.load(table_ptr + block * 4 + 2)
    stop = tl.load(table_ptr + block * 4 + 3)
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
            own = begin + tile * TILE + tl.arange(0, TILE)
            exists = own < stop
            centroids = tl.load(
                centroids_head + own[:, None] * DIM + dims[None, :], mask=exists[:, None], other=0.0
            )
            products = tl.dot(vectors, tl.trans(centroids), input_precision=PRECISION)
            halves = tl.load(halves_ptr + head * clusters + own, mask=exists, other=1e30)
            products -= halves[None, :]
            # The last bits of a product give way to the number of the tile, which then needs no array of its own.
            bits = (products.to(tl.int32, bitcast=True) & (-TILES)) | tile
            best = tl.maximum(best, bits.to(tl.float32, bitcast=True))
        column = tl.argmax(best, 1)
        columns = tl.arange(0, TILE)
        bits = best.to(tl.int32, bitcast=True) & (TILES - 1)
        tile = tl.sum(tl.where(columns[None, :] == column[:, None], bits, 0), 1)
        chosen = begin + tile * TILE + column
        tl.store(assignment_ptr + head * count + at, chosen.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["count", "clusters"])
def move_kernel(
    vectors_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    assignment_ptr: tl.tensor,
    table_ptr: tl.tensor,
    centroids_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    clusters: tl.tensor,
    SCALED: tl.constexpr,
    DIM: tl.constexpr,
    CLUSTERS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per (CLUSTERS clusters, block, head); it reads all vectors of the block."""
    block = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    first = tl.load(table_ptr + block * 4)
    end = tl.load(table_ptr + block * 4 + 1)
    begin = tl.load(table_ptr + block * 4 + 2) + tl.program_id(0) * CLUSTERS
    stop = tl.load(table_ptr + block * 4 + 3)
    if begin < stop:
        dims = tl.arange(0, DIM)
        own = begin + tl.arange(0, CLUSTERS)
        from_ptr = vectors_ptr + head * head_stride
        sums = tl.zeros([CLUSTERS, DIM], tl.float32)
        sizes = tl.zeros([CLUSTERS, TILE], tl.float32)
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            at = start + tl.arange(0, TILE)
            inside = at < end
            vectors = tl.load(
                from_ptr + at.to(tl.int64)[:, None] * row_stride + dims[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            named = tl.load(assignment_ptr + head * count + at, mask=inside, other=-1)
            belongs = own[:, None] == named[None, :]
            if SCALED:
                scales = tl.load(scales_ptr + head * count + at, mask=inside, other=0.0)
                shares = tl.where(belongs, scales[None, :], 0.0)
            else:
                shares = tl.where(belongs, 1.0, 0.0)
                sizes += shares
            sums += tl.dot(shares.to(vectors.dtype), vectors, input_precision=PRECISION)
        if SCALED:
            squares = tl.sum(sums * sums, 1)
            moved = sums / tl.maximum(tl.sqrt(squares), 1e-20)[:, None]
            present = squares > 0.0
        else:
            number = tl.sum(sizes, 1)
            moved = sums / tl.maximum(number, 1.0)[:, None]
            present = number > 0.0
        filled = (own < stop) & present
        rounded = moved.to(centroids_ptr.dtype.element_ty)
        into = centroids_ptr + (head * clusters + own)[:, None] * DIM + dims[None, :]
        tl.store(into, rounded, mask=filled[:, None])
        if not SCALED:
            whole = rounded.to(tl.float32)
            tl.store(halves_ptr + head * clusters + own, 0.5 * tl.sum(whole * whole, 1), mask=filled)
