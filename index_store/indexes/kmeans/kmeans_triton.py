"""k-means of many groups of vectors at once, on the device.

Every block of consecutive vectors of every head is a problem of its own (as in `indexes.key_clusters.build`);
one launch assigns all vectors, one moves all centroids, and nothing waits for the host. Both are products of matrices:
assignment compares vectors with centroids, and a centroid is the product of the rows that name it and the vectors, so
the sums need no atomics and come out the same every time.

Shape legend: H heads, N vectors, T blocks, C clusters, D dimensions, S stretches of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.first_centroids import METRICS, Blocks, first_centroids


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


LONGEST_ROW = 256
"""Dimensions that the kernels take."""

_LEAST_ROW = 16  # of a matrix instruction
_UNSPLIT = 32_768  # vectors of a block whose sums one program adds up
_STRETCH = 8_192


def fill_rows(rows: Tensor) -> Tensor:
    """Rows [..., D] filled up with zeros to a length that the kernels take, a power of two from 16 on.

    Rows that fit are returned as they are. Raises InvalidArgumentError for more than 256 dimensions.
    """
    width = rows.shape[-1]
    if width > LONGEST_ROW:
        raise InvalidArgumentError(f"rows have {width} dimensions, a device takes at most {LONGEST_ROW}")
    fitting = max(_LEAST_ROW, int(triton.next_power_of_2(width)))
    if fitting != width:
        return torch.nn.functional.pad(rows, (0, fitting - width))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def find_clusters(
    vectors_HND: Tensor, blocks: Blocks, iterations: int, metric: str, seed: int
) -> tuple[Tensor, Tensor]:
    """The cluster of every vector, [H, N] int32, and the centroids [H, C, D] in the vectors' dtype.

    vectors_HND: bfloat16, float16 or float32. blocks: in ascending order, clusters numbered through; vectors in no
    block have cluster -1. `cosine` compares directions (a zero vector lands in any cluster), `euclidean` the vectors.
    Seeds are spread over the block at random. A cluster that loses all its vectors keeps its centroid. With no more
    vectors than clusters, every vector has its own, and the last one's repeats.

    Raises InvalidArgumentError for an unknown metric, no iteration, no block, or more than 256 dimensions.
    """
    if metric not in METRICS:
        raise InvalidArgumentError(f"k-means: metric is {metric!r}, expected one of {', '.join(METRICS)}")
    if iterations < 1 or not blocks:
        raise InvalidArgumentError(
            f"k-means got {iterations} iterations over {len(blocks)} blocks, expected some"
        )
    width = vectors_HND.shape[2]
    vectors_HND = fill_rows(vectors_HND)
    heads, count, _ = vectors_HND.shape
    device = vectors_HND.device
    scales_HN = None
    if metric == "cosine":
        # Before the first centroids: the device works on it while the host prepares them.
        scales_HN = inverse_norms(vectors_HND)
    table = torch.tensor(blocks, dtype=torch.int32).to(device, non_blocking=True)
    centroids = first_centroids(vectors_HND, table, blocks, seed)
    if metric == "cosine":
        centroids = torch.nn.functional.normalize(centroids, dim=-1)
    rounded = centroids.to(vectors_HND.dtype)
    halves = _half_squares(rounded, metric)
    assignment = torch.full((heads, count), -1, dtype=torch.int32, device=device)
    for _ in range(iterations):
        assign_vectors(vectors_HND, rounded, halves, table, blocks, assignment)
        move_centroids(vectors_HND, scales_HN, assignment, table, blocks, rounded, halves)
    assign_vectors(vectors_HND, rounded, halves, table, blocks, assignment)
    return assignment, rounded[..., :width]


def _half_squares(centroids_HCD: Tensor, metric: str) -> Tensor | None:
    """What a product with a centroid is lowered by before it is compared; nothing for directions."""
    return None if metric == "cosine" else 0.5 * centroids_HCD.float().square().sum(-1)


def inverse_norms(vectors_HND: Tensor) -> Tensor:
    """1 / |v| of every vector, [H, N] float32; 1e20 for zeros."""
    heads, count, dim = vectors_HND.shape
    scales = torch.empty(heads, count, device=vectors_HND.device)
    norm_kernel[(triton.cdiv(count, 64), heads)](
        vectors_HND,
        scales,
        vectors_HND.stride(0),
        vectors_HND.stride(1),
        count,
        DIM=dim,
        POINTS=64,
        num_warps=4,
    )
    return scales


def inverse_norms_reference(vectors_HND: Tensor) -> Tensor:
    """The same, eagerly."""
    return vectors_HND.float().square().sum(-1).sqrt().clamp(min=1e-20).reciprocal()


def move_centroids(
    vectors_HND: Tensor,
    scales_HN: Tensor | None,
    assignment_HN: Tensor,
    table_TX: Tensor,
    blocks: Blocks,
    centroids_HCD: Tensor,
    halves_HC: Tensor | None,
) -> None:
    """Replaces centroids by the mean of their vectors; with scales by the direction of the sum of scaled ones.

    halves: of centroids that are means, replaced as well; there are either scales or halves.
    Long blocks are divided into stretches whose sums are added in order, so that few clusters fill the device too.
    """
    heads, count, dim = vectors_HND.shape
    clusters = centroids_HCD.shape[1]
    most = max(stop - begin for _, _, begin, stop in blocks)
    longest = max(end - first for first, end, _, _ in blocks)
    if (scales_HN is None) == (halves_HC is None):
        raise InvalidArgumentError("centroids are moved with scales, or with halves, expected one of them")
    stretches = 1 if longest <= _UNSPLIT else min(16, triton.cdiv(longest, _STRETCH))
    sums = None
    if stretches > 1:
        sums = torch.zeros(heads, clusters, stretches, dim, device=vectors_HND.device)
    sizes = None if scales_HN is not None else _count(assignment_HN, clusters)
    move_kernel[(triton.cdiv(most, 128) * stretches, len(blocks), heads)](
        vectors_HND,
        scales_HN,
        assignment_HN,
        table_TX,
        centroids_HCD,
        halves_HC,
        sums,
        sizes,
        vectors_HND.stride(0),
        vectors_HND.stride(1),
        count,
        clusters,
        SCALED=scales_HN is not None,
        STRETCHES=stretches,
        DIM=dim,
        CLUSTERS=128,
        TILE=64,
        **product_options(vectors_HND.dtype == torch.float32, dim),
    )
    if sums is not None:
        _finish_move(sums.sum(2), sizes, centroids_HCD, halves_HC)


def _count(assignment_HN: Tensor, clusters: int) -> Tensor:
    """Vectors of every cluster, [H, C] int32."""
    place_HN = torch.where(assignment_HN >= 0, assignment_HN, clusters).long()
    counts = torch.zeros(len(place_HN), clusters + 1, dtype=torch.int32, device=place_HN.device)
    return counts.scatter_add_(1, place_HN, counts.new_ones(1, 1).expand_as(place_HN))[
        :, :clusters
    ].contiguous()


def _finish_move(
    sums_HCD: Tensor, sizes_HC: Tensor | None, centroids_HCD: Tensor, halves_HC: Tensor | None
) -> None:
    """Centroids from the sums over all stretches, directions where there are no sizes; those without vectors stay."""
    if sizes_HC is None:
        moved = torch.nn.functional.normalize(sums_HCD, dim=-1)
        filled = sums_HCD.square().sum(-1, keepdim=True) > 0
    else:
        moved = sums_HCD / sizes_HC.clamp(min=1)[..., None]
        filled = (sizes_HC > 0)[..., None]
    centroids_HCD.copy_(torch.where(filled, moved.to(centroids_HCD.dtype), centroids_HCD))
    if halves_HC is not None:
        halves_HC.copy_(0.5 * centroids_HCD.float().square().sum(-1))


def move_centroids_reference(
    vectors_HND: Tensor,
    scales_HN: Tensor | None,
    assignment_HN: Tensor,
    table_TX: Tensor,
    blocks: Blocks,
    centroids_HCD: Tensor,
    halves_HC: Tensor | None,
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
        if halves_HC is not None:
            halves_HC[head] = 0.5 * centroids_HCD[head].float().square().sum(-1)


@triton.jit(do_not_specialize=["count"])
def norm_kernel(
    vectors_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    POINTS: tl.constexpr,
) -> None:
    """One program per (POINTS vectors, head)."""
    at = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    head = tl.program_id(1).to(tl.int64)
    inside = at < count
    rows_ptr = vectors_ptr + head * head_stride + at.to(tl.int64)[:, None] * row_stride
    vectors = tl.load(rows_ptr + tl.arange(0, DIM)[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    norms = tl.maximum(tl.sqrt(tl.sum(vectors * vectors, 1)), 1e-20)
    tl.store(scales_ptr + head * count + at, 1.0 / norms, mask=inside)


@triton.jit(do_not_specialize=["count", "clusters"])
def move_kernel(
    vectors_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    assignment_ptr: tl.tensor,
    table_ptr: tl.tensor,
    centroids_ptr: tl.tensor,
    halves_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    clusters: tl.tensor,
    SCALED: tl.constexpr,
    STRETCHES: tl.constexpr,
    DIM: tl.constexpr,
    CLUSTERS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program per (CLUSTERS clusters and stretch, block, head); it reads all vectors of its stretch."""
    block = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    first, end, begin, stop = bounds_of(table_ptr, block)
    begin += (tl.program_id(0) // STRETCHES) * CLUSTERS
    stretch = tl.program_id(0) % STRETCHES
    if STRETCHES > 1:
        length = tl.cdiv(tl.cdiv(end - first, STRETCHES), TILE) * TILE
        first += stretch * length
        end = tl.minimum(end, first + length)
    if begin < stop:
        dims = tl.arange(0, DIM)
        own = begin + tl.arange(0, CLUSTERS)
        sums = tl.zeros([CLUSTERS, DIM], tl.float32)
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            at = start + tl.arange(0, TILE)
            inside = at < end
            vectors = tl.load(
                vectors_ptr + head * head_stride + at.to(tl.int64)[:, None] * row_stride + dims[None, :],
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
            sums += tl.dot(shares.to(vectors.dtype), vectors, input_precision=PRECISION)
        exists = own < stop
        row = head * clusters + own
        if STRETCHES > 1:
            place = row * STRETCHES + stretch
            tl.store(sums_ptr + place[:, None] * DIM + dims[None, :], sums, mask=exists[:, None])
        else:
            if SCALED:
                squares = tl.sum(sums * sums, 1)
                moved = sums / tl.maximum(tl.sqrt(squares), 1e-20)[:, None]
                filled = exists & (squares > 0.0)
            else:
                number = tl.load(sizes_ptr + row, mask=exists, other=0)
                moved = sums / tl.maximum(number, 1).to(tl.float32)[:, None]
                filled = exists & (number > 0)
            rounded = moved.to(centroids_ptr.dtype.element_ty)
            tl.store(centroids_ptr + row[:, None] * DIM + dims[None, :], rounded, mask=filled[:, None])
            if not SCALED:  # means have halves
                halves = 0.5 * tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1)
                tl.store(halves_ptr + row, halves, mask=filled)


_WAITS_AT_ONCE = 2**26  # random numbers drawn for seeds


_NEAR = 1e-9
"""Squared distance of a point to itself, so that repeated points can fill up the seeds."""


def spherical_kmeans_batch(points_YPB: Tensor, clusters: int, iterations: int, seed: int) -> Tensor:
    """Unit-length centroids [Y, C, B] float32 of the directions of Y sets of points [Y, P, B].

    k-means++ seeds. Zero vectors have no direction and count for nothing. With fewer points than clusters centroids
    repeat. A cluster that loses all its points keeps its centroid.
    """
    if clusters < 1 or iterations < 1 or points_YPB.shape[1] == 0:
        raise InvalidArgumentError(
            f"k-means needs at least 1 cluster, iteration and point, got {clusters}, {iterations} and "
            f"{points_YPB.shape[1]}"
        )
    problems, count, width = points_YPB.shape
    points = fill_rows(normalize(points_YPB.float(), dim=-1).to(torch.float16))
    centroids = spread_seeds(points, clusters, seed)
    blocks = [(0, count, 0, clusters)]
    table = torch.tensor(blocks, dtype=torch.int32).to(points.device, non_blocking=True)
    ones = torch.ones(problems, count, device=points.device)
    nearest = torch.empty(problems, count, dtype=torch.int32, device=points.device)
    for _ in range(iterations):
        assign_vectors(points, centroids, None, table, blocks, nearest)
        move_centroids(points, ones, nearest, table, blocks, centroids, None)
    return normalize(centroids[..., :width].float(), dim=-1)


def spread_seeds(points_YPW: Tensor, clusters: int, seed: int) -> Tensor:
    """k-means++: [Y, C, W] of P points each, drawn with a probability in proportion to the squared distance.

    The distance is that to the nearest point drawn before; zero vectors are never drawn while others are left.
    """
    problems, count, width = points_YPW.shape
    device = points_YPW.device
    distances = torch.empty(problems, count, device=device)
    drawn = torch.empty(problems, clusters, width, dtype=points_YPW.dtype, device=device)
    for first, waits in _draw_waits(problems, count, clusters, device, seed):
        some = slice(first, first + waits.shape[1])
        seed_kernel[(waits.shape[1],)](
            points_YPW[some],
            waits,
            distances[some],
            drawn[some],
            count,
            waits.shape[1],
            clusters,
            WIDTH=width,
            POINTS=min(1024, 16_384 // width, max(16, int(triton.next_power_of_2(count)))),
            num_warps=8,
        )
    return drawn


def _draw_waits(
    problems: int, count: int, clusters: int, device: torch.device, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Exponential waiting times [C, Y', P] of as many problems as memory allows, and the first one's number."""
    generator = torch.Generator(device).manual_seed(seed)
    together = max(1, _WAITS_AT_ONCE // (clusters * count))
    for first in range(0, problems, together):
        own = min(together, problems - first)
        yield (first, torch.empty(clusters, own, count, device=device).exponential_(generator=generator))


def spread_seeds_reference(points_YPW: Tensor, clusters: int, seed: int) -> Tensor:
    """The same, eagerly."""
    problems, count, width = points_YPW.shape
    points = points_YPW.float()
    drawn_waits = [waits for _, waits in _draw_waits(problems, count, clusters, points.device, seed)]
    waits = torch.cat(drawn_waits, dim=1)
    distances = (points.square().sum(-1) > 0).float()
    drawn = []
    for number in range(clusters):
        # The least of exponential waiting times is at each point with a probability proportional to its rate.
        chosen = (distances / waits[number]).argmax(-1)
        drawn.append(points_YPW.gather(1, chosen[:, None, None].expand(-1, 1, width)))
        away = (2 - 2 * (points * drawn[-1].float()).sum(-1)).clamp_(min=_NEAR)
        distances = torch.minimum(distances * (4.0 if number == 0 else 1.0), away)
    return torch.cat(drawn, dim=1)


@triton.jit(do_not_specialize=["count", "problems", "clusters"])
def seed_kernel(
    points_ptr: tl.tensor,
    waits_ptr: tl.tensor,
    distances_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    count: tl.tensor,
    problems: tl.tensor,
    clusters: tl.tensor,
    WIDTH: tl.constexpr,
    POINTS: tl.constexpr,
) -> None:
    """One program per problem draws all of its seeds, one after the other."""
    problem = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    own_points = points_ptr + problem * count * WIDTH
    own_distances = distances_ptr + problem * count
    drawn = tl.zeros([WIDTH], tl.float32)
    for number in range(clusters):
        best = tl.full([POINTS], -1.0, tl.float32)
        winner = tl.zeros([POINTS], tl.int32)
        for start in range(0, count, POINTS):
            at = start + tl.arange(0, POINTS)
            inside = at < count
            points = tl.load(
                own_points + at[:, None] * WIDTH + dims[None, :], mask=inside[:, None], other=0.0
            ).to(tl.float32)
            if number == 0:
                distances = tl.where(tl.sum(points * points, 1) > 0.0, 1.0, 0.0)
                tl.store(own_distances + at, distances * 4.0, mask=inside)
            else:
                away = tl.maximum(2.0 - 2.0 * tl.sum(points * drawn[None, :], 1), 1e-9)
                distances = tl.minimum(tl.load(own_distances + at, mask=inside, other=0.0), away)
                tl.store(own_distances + at, distances, mask=inside)
            waits = tl.load(waits_ptr + (number * problems + problem) * count + at, mask=inside, other=1.0)
            rates = tl.where(inside, distances / waits, -1.0)
            better = rates > best
            best = tl.where(better, rates, best)
            winner = tl.where(better, at, winner)
        lane = tl.argmax(best, 0)
        chosen = tl.sum(tl.where(tl.arange(0, POINTS) == lane, winner, 0), 0)
        seed = tl.load(own_points + chosen * WIDTH + dims)
        tl.store(drawn_ptr + (problem * clusters + number) * WIDTH + dims, seed)
        drawn = seed.to(tl.float32)
