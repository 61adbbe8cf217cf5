"""Spherical k-means of many problems at once on a device, from k-means++ seeds.

Shape legend: Y problems, P points, W dimensions, C clusters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.kmeans_triton import fill_rows, move_centroids
from index_store.indexes.kmeans.nearest_triton import assign_vectors

_WAITS_AT_ONCE = 2**26  # random numbers drawn for seeds


_NEAR = 1e-9
"""Squared distance of a point to itself, so that repeated points can fill up the seeds."""


def spherical_kmeans_batch(
    points_YPB: Tensor,
    clusters: int,
    iterations: int,
    seed: int,
    starts_YXB: Tensor | None = None,
) -> Tensor:
    """Unit-length centroids [Y, C, B] float32 of the directions of Y sets of points [Y, P, B].

    k-means++ seeds, of the points or of `starts`, which are means of clusters of such points. Zero vectors have no
    direction and count for nothing. With fewer points than clusters centroids repeat. A cluster that loses all its
    points keeps its centroid.
    """
    if clusters < 1 or iterations < 1 or points_YPB.shape[1] == 0:
        raise InvalidArgumentError(
            f"k-means needs at least 1 cluster, iteration and point, got {clusters}, {iterations} and "
            f"{points_YPB.shape[1]}"
        )
    problems, count, width = points_YPB.shape
    points = fill_rows(normalize(points_YPB.float(), dim=-1).to(torch.float16))
    source = points
    if starts_YXB is not None:
        source = fill_rows(normalize(starts_YXB.float(), dim=-1).to(torch.float16))
    centroids = spread_seeds(source, clusters, seed)
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
        yield (
            first,
            torch.empty(clusters, own, count, device=device).exponential_(generator=generator),
        )


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
