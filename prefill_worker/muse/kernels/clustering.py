"""Clusters of bounded size on the device. Nothing waits for the host, and the result is the same every time.

First centroids are drawn with a probability in proportion to the squared norm (MuSe section 5).

Shape legend: B batch, H heads, R ranges, N points, Y = B*H*R problems, C clusters, U places of a cluster, S stretches,
D dims.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_worker.muse.kernels.clusters import (
    TILE,
    BoundedClusters,
    draw_waits,
    places_in_stretch,
    stretches_of,
    take_best,
)
from prefill_worker.muse.kernels.layout import (
    Constants,
    load_rows,
    members_from,
    padded,
    rows_at_a_time,
    rows_in,
    rows_of,
)


def draw_seeds(points_BHRND: Tensor, clusters: int, seed: int) -> Tensor:
    """`draw_seeds_reference`."""
    heads, ranges, count = points_BHRND.shape[1:4]
    waits = draw_waits(points_BHRND, seed)
    scores = torch.empty_like(waits)
    problems = scores[..., 0].numel()
    tile = rows_at_a_time(count, 128)
    rate_kernel[(problems * triton.cdiv(count, tile),)](
        rows_in(points_BHRND),
        waits,
        scores,
        heads,
        ranges,
        count,
        K=Constants.of(points_BHRND, tile),
        num_warps=4,
    )
    return take_best(points_BHRND, scores, clusters)


@triton.jit(do_not_specialize=["heads", "ranges", "count"])
def rate_kernel(
    point_rows: tl.tensor,
    waits_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    count: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (TILE points, problem): squared norms divided by waiting times."""
    tiles = tl.cdiv(count, K.TILE)
    problem = tl.program_id(0) // tiles
    point_rows = rows_of(point_rows, problem, heads, ranges)
    at = (tl.program_id(0) % tiles) * K.TILE + tl.arange(0, K.TILE)
    inside = at < count
    points = load_rows(point_rows, at.to(tl.int64), inside, K).to(tl.float32)
    place = problem.to(tl.int64) * count + at
    waits = tl.load(waits_ptr + place, mask=inside, other=1.0)
    tl.store(scores_ptr + place, tl.sum(points * points, 1) / waits, mask=inside)


_MOVED = 1024  # points that one program of an iteration adds up, at least


def find_clusters(
    points_BHRND: Tensor, clusters: int, cap: float, iterations: int, seed: int
) -> BoundedClusters:
    """`prefill_worker.muse.kernels.clusters.find_clusters_reference`, by kernels."""
    points = points_BHRND.detach()
    centroids = draw_seeds(points, min(clusters, points.shape[3]), seed)
    for _ in range(iterations):
        centroids = move_centroids(points, centroids)
    members, counts = place_points(points, centroids, cap)
    return BoundedClusters(members, counts, average_members(points, members, counts))


def move_centroids(points_BHRND: Tensor, centroids_YCD: Tensor) -> Tensor:
    """`move_centroids_reference`: sums of stretches by one kernel, their means by another."""
    heads, ranges, count, dim = points_BHRND.shape[1:]
    problems, clusters, _ = centroids_YCD.shape
    stretches = triton.cdiv(count, _MOVED)
    device = points_BHRND.device
    sums = torch.empty(problems, stretches, clusters, dim, device=device)
    sizes = torch.empty(problems, stretches, clusters, device=device)
    move_kernel[(problems * stretches,)](
        rows_in(points_BHRND),
        centroids_YCD,
        sums,
        sizes,
        heads,
        ranges,
        count,
        stretches,
        clusters,
        K=Constants.of(points_BHRND, rows_at_a_time(count, 128), clusters=clusters),
        num_warps=4,
    )
    moved = torch.empty_like(centroids_YCD)
    tile = min(8, triton.next_power_of_2(clusters))
    mean_kernel[(problems * triton.cdiv(clusters, tile),)](
        sums,
        sizes,
        centroids_YCD,
        moved,
        stretches,
        clusters,
        K=Constants.of(points_BHRND, tile),
        num_warps=4,
    )
    return moved


def place_points(points_BHRND: Tensor, centroids_YCD: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """`place_points_reference`: every stretch chooses by itself, then stretches are put one behind the other."""
    heads, ranges, count = points_BHRND.shape[1:4]
    problems, clusters, _ = centroids_YCD.shape
    stretches, room = stretches_of(count), places_in_stretch(count, clusters, cap)
    device = points_BHRND.device
    places = torch.empty(problems, count, dtype=torch.int32, device=device)
    taken = torch.empty(problems, stretches, clusters, dtype=torch.int32, device=device)
    place_kernel[(problems * stretches,)](
        rows_in(points_BHRND),
        centroids_YCD,
        places,
        taken,
        heads,
        ranges,
        count,
        stretches,
        clusters,
        room,
        K=Constants.of(points_BHRND, TILE, clusters=clusters),
        num_warps=4,
    )
    members = torch.empty(problems, clusters, stretches * room, dtype=torch.int32, device=device)
    counts = torch.empty(problems, clusters, dtype=torch.int32, device=device)
    tile = min(1024, padded(math.ceil(count / stretches)))
    list_kernel[(problems * stretches,)](
        places,
        taken,
        members,
        counts,
        count,
        stretches,
        clusters,
        room,
        K=Constants.of(points_BHRND, tile, clusters=clusters),
        STRETCHES=int(triton.next_power_of_2(stretches)),
        num_warps=4,
    )
    return members, counts


def average_members(points_BHRND: Tensor, members_YCU: Tensor, counts_YC: Tensor) -> Tensor:
    """`average_members_reference`."""
    heads, ranges, _, dim = points_BHRND.shape[1:]
    problems, clusters, room = members_YCU.shape
    means = torch.empty(problems, clusters, dim, dtype=points_BHRND.dtype, device=points_BHRND.device)
    average_kernel[(problems * clusters,)](
        rows_in(points_BHRND),
        members_YCU,
        counts_YC,
        means,
        heads,
        ranges,
        clusters,
        room,
        K=Constants.of(points_BHRND, rows_at_a_time(room, 64)),
        num_warps=4,
    )
    return means


@triton.jit
def load_centroids(
    centroids_ptr: tl.tensor, problem: tl.tensor, clusters: tl.tensor, K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A problem's centroids, zero where there are none, and half of their squared norms."""
    dims, own = tl.arange(0, K.DIM), tl.arange(0, K.CLUSTERS)
    row = (problem * clusters).to(tl.int64) + own
    at = centroids_ptr + row[:, None] * K.DIM + dims[None, :]
    centroids = tl.load(at, mask=own[:, None] < clusters, other=0.0)
    wide = centroids.to(tl.float32)
    return centroids, 0.5 * tl.sum(wide * wide, 1)


@triton.jit(do_not_specialize=["heads", "ranges", "count", "stretches", "clusters"])
def move_kernel(
    point_rows: tl.tensor,
    centroids_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    count: tl.tensor,
    stretches: tl.tensor,
    clusters: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (stretch of consecutive points, problem): sums and sizes of the nearest centroids' points."""
    stretch = tl.program_id(0) % stretches
    problem = tl.program_id(0) // stretches
    point_rows = rows_of(point_rows, problem, heads, ranges)
    dims = tl.arange(0, K.DIM)
    own = tl.arange(0, K.CLUSTERS)
    centroids, halves = load_centroids(centroids_ptr, problem, clusters, K)
    halves = tl.where(own < clusters, halves, float("inf"))
    sums = tl.zeros([K.CLUSTERS, K.DIM], tl.float32)
    sizes = tl.zeros([K.CLUSTERS], tl.float32)
    length = tl.cdiv(tl.cdiv(count, stretches), K.TILE) * K.TILE
    first = stretch * length
    end = tl.minimum(count, first + length)
    for start in range(first, end, K.TILE):
        at = start + tl.arange(0, K.TILE)
        inside = at < end
        points = load_rows(point_rows, at.to(tl.int64), inside, K)
        scores = tl.dot(points, tl.trans(centroids), input_precision=K.PRECISION) - halves[None, :]
        nearest = tl.argmax(scores, 1)
        belongs = ((own[:, None] == nearest[None, :]) & inside[None, :]).to(points.dtype)
        sums += tl.dot(belongs, points, input_precision=K.PRECISION)
        sizes += tl.sum(belongs.to(tl.float32), 1)
    row = (problem * stretches + stretch).to(tl.int64) * clusters + own
    tl.store(sums_ptr + row[:, None] * K.DIM + dims[None, :], sums, mask=own[:, None] < clusters)
    tl.store(sizes_ptr + row, sizes, mask=own < clusters)


@triton.jit(do_not_specialize=["stretches", "clusters"])
def mean_kernel(
    sums_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    centroids_ptr: tl.tensor,
    moved_ptr: tl.tensor,
    stretches: tl.tensor,
    clusters: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (TILE clusters, problem) adds up the stretches."""
    tiles = tl.cdiv(clusters, K.TILE)
    problem = (tl.program_id(0) // tiles).to(tl.int64)
    own = (tl.program_id(0) % tiles) * K.TILE + tl.arange(0, K.TILE)
    inside = own < clusters
    dims = tl.arange(0, K.DIM)
    sums = tl.zeros([K.TILE, K.DIM], tl.float32)
    sizes = tl.zeros([K.TILE], tl.float32)
    for stretch in range(stretches):
        row = (problem * stretches + stretch) * clusters + own
        sums += tl.load(sums_ptr + row[:, None] * K.DIM + dims[None, :], mask=inside[:, None], other=0.0)
        sizes += tl.load(sizes_ptr + row, mask=inside, other=0.0)
    at = (problem * clusters + own)[:, None] * K.DIM + dims[None, :]
    old = tl.load(centroids_ptr + at, mask=inside[:, None], other=0.0)
    means = (sums / tl.maximum(sizes, 1.0)[:, None]).to(old.dtype)
    tl.store(moved_ptr + at, tl.where(sizes[:, None] > 0.0, means, old), mask=inside[:, None])


@triton.jit(do_not_specialize=["heads", "ranges", "count", "stretches", "clusters", "room"])
def place_kernel(
    point_rows: tl.tensor,
    centroids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    count: tl.tensor,
    stretches: tl.tensor,
    clusters: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (stretch, problem): cluster times `room` plus rank in the cluster of every point, and sizes."""
    stretch = tl.program_id(0) % stretches
    problem = tl.program_id(0) // stretches
    point_rows = rows_of(point_rows, problem, heads, ranges)
    places_ptr += problem.to(tl.int64) * count
    own = tl.arange(0, K.CLUSTERS)
    centroids, halves = load_centroids(centroids_ptr, problem, clusters, K)
    taken = tl.where(own < clusters, 0, room)
    line = tl.arange(0, K.TILE)
    earlier = (line[:, None] > line[None, :]).to(tl.float16)
    for start in range(0, tl.cdiv(count - stretch, stretches), K.TILE):
        at = stretch + (start + line) * stretches
        inside = at < count
        points = load_rows(point_rows, at.to(tl.int64), inside, K)
        scores = tl.dot(points, tl.trans(centroids), input_precision=K.PRECISION) - halves[None, :]
        waiting = inside.to(tl.int32)
        place = tl.zeros([K.TILE], tl.int32)
        left = tl.sum(waiting, 0)
        while left > 0:
            choice = tl.argmax(tl.where((taken < room)[None, :], scores, float("-inf")), 1)
            wants = (own[None, :] == choice[:, None]) & (waiting[:, None] > 0)
            # How many before it in the tile want the same: small whole numbers, exact in float16 products.
            before = tl.dot(earlier, wants.to(tl.float16)).to(tl.int32) + taken[None, :]
            rank = tl.sum(tl.where(wants, before, 0), 1)
            placed = (waiting > 0) & (rank < room)
            place = tl.where(placed, choice * room + rank, place)
            taken = tl.minimum(taken + tl.sum(wants.to(tl.int32), 0), room)
            waiting = tl.where(placed, 0, waiting)
            left = tl.sum(waiting, 0)
        tl.store(places_ptr + at, place, mask=inside)
    row = (problem * stretches + stretch).to(tl.int64) * clusters + own
    tl.store(taken_ptr + row, taken, mask=own < clusters)


@triton.jit(do_not_specialize=["count", "stretches", "clusters", "room"])
def list_kernel(
    places_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    members_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    count: tl.tensor,
    stretches: tl.tensor,
    clusters: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
    STRETCHES: tl.constexpr,
) -> None:
    """One program per (stretch, problem) writes its points behind those of the stretches before it."""
    stretch = tl.program_id(0) % stretches
    problem = (tl.program_id(0) // stretches).to(tl.int64)
    taken_ptr += problem * stretches * clusters
    own = tl.arange(0, K.CLUSTERS)
    if stretch == 0:
        total = tl.zeros([K.CLUSTERS], tl.int32)
        for other in range(stretches):
            total += tl.load(taken_ptr + other * clusters + own, mask=own < clusters, other=0)
        tl.store(counts_ptr + problem * clusters + own, total, mask=own < clusters)
    others = tl.arange(0, STRETCHES)
    for start in range(0, tl.cdiv(count - stretch, stretches), K.TILE):
        at = stretch + (start + tl.arange(0, K.TILE)) * stretches
        inside = at < count
        place = tl.load(places_ptr + problem * count + at, mask=inside, other=0)
        cluster = place // room
        before = tl.load(
            taken_ptr + others[None, :] * clusters + cluster[:, None],
            mask=inside[:, None] & (others[None, :] < stretch),
            other=0,
        )
        slot = tl.sum(before, 1) + place % room
        into = (problem * clusters + cluster) * (stretches * room) + slot
        tl.store(members_ptr + into, at, mask=inside)


@triton.jit(do_not_specialize=["heads", "ranges", "clusters", "room"])
def average_kernel(
    point_rows: tl.tensor,
    members_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    means_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    clusters: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (cluster, problem)."""
    problem = tl.program_id(0) // clusters
    point_rows = rows_of(point_rows, problem, heads, ranges)
    members_ptr += tl.program_id(0).to(tl.int64) * room
    count = tl.load(counts_ptr + tl.program_id(0))
    dims = tl.arange(0, K.DIM)
    sums = tl.zeros([K.TILE, K.DIM], tl.float32)
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        sums += load_rows(point_rows, at, inside, K).to(tl.float32)
    mean = tl.sum(sums, 0) / tl.maximum(count, 1).to(tl.float32)
    tl.store(means_ptr + tl.program_id(0).to(tl.int64) * K.DIM + dims, mean.to(means_ptr.dtype.element_ty))
