"""Clusters of bounded size: k-means of queries, or of keys, and who belongs to which cluster (MuSe section 5).

Points are read in place: they are the ranges of one level of a tree (`prefill_worker.muse.tree`), views
[B, H, R, N, D] of a longer tensor. Every range of every head is a problem of its own; Y = B*H*R problems.

Large problems are divided into S stretches, each of which takes every S-th point, so that they resemble each other; the
bound on a cluster's size holds in each stretch. In a stretch, points are taken TILE at a time, in order. Each goes to
the nearest cluster that has room; where more come than there is room for, the first ones stay, and the others choose
again.

Shape legend: B batch, H heads, R ranges, N points, Y problems, C clusters, U places of a cluster, S stretches, D dims.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
"""Points that choose their clusters at a time."""

STRETCH = 2048
"""Points of a stretch at least, where there are more."""


class BoundedClusters(NamedTuple):
    """Which points belong to which cluster.

    members: [Y, C, U] int32, numbers of the points of each cluster; what comes behind the count means nothing.
    counts: [Y, C] int32. centroids: [Y, C, D], the mean of the members in the points' dtype, zero without members.
    """

    members: Tensor
    counts: Tensor
    centroids: Tensor

    @property
    def filled(self) -> Tensor:
        """[Y, C, U] bool, which places are taken."""
        return torch.arange(self.members.shape[2], device=self.counts.device) < self.counts[..., None]


def stretches_of(count: int) -> int:
    """Into how many stretches a problem of so many points is divided."""
    return max(1, count // STRETCH)


def places_in_stretch(count: int, clusters: int, cap: float) -> int:
    """The largest number of points that a cluster may have in one stretch."""
    stretch = math.ceil(count / stretches_of(count))
    return min(stretch, math.ceil(cap * stretch / clusters))


def draw_seeds_reference(points_BHRND: Tensor, clusters: int, seed: int) -> Tensor:
    """Different points [Y, C, D], drawn with a probability in proportion to their squared norm.

    The least of exponential waiting times is at each point with a probability proportional to its rate. Points of no
    length are drawn only when no others are left.
    """
    rates = torch.linalg.vector_norm(points_BHRND, dim=-1, dtype=_wide(points_BHRND)).square_()
    return take_best(points_BHRND, rates / draw_waits(points_BHRND, seed), clusters)


def draw_waits(points_BHRND: Tensor, seed: int) -> Tensor:
    """Exponential waiting times [B, H, R, N] float32."""
    generator = torch.Generator(points_BHRND.device).manual_seed(seed)
    waits = torch.empty(points_BHRND.shape[:-1], device=points_BHRND.device)
    return waits.exponential_(generator=generator)


def take_best(points_BHRND: Tensor, scores_BHRN: Tensor, count: int) -> Tensor:
    """So many points [Y, C, D] of every problem with the largest scores, in any order."""
    best = scores_BHRN.topk(count, dim=-1, sorted=False).indices
    index = best[..., None].expand(*best.shape, points_BHRND.shape[-1])
    return points_BHRND.gather(3, index).flatten(0, 2)


def find_clusters_reference(
    points_BHRND: Tensor, clusters: int, cap: float, iterations: int, seed: int
) -> BoundedClusters:
    """Seeds, so many iterations of k-means, and a final assignment under the cap; at most as many clusters as points.

    The same, by kernels: `prefill_worker.muse.kernels.clustering.find_clusters`.
    """
    points_YND = points_BHRND.detach().flatten(0, 2)
    clusters = min(clusters, points_YND.shape[1])
    centroids = draw_seeds_reference(points_BHRND.detach(), clusters, seed)
    for _ in range(iterations):
        centroids = move_centroids_reference(points_BHRND.detach(), centroids)
    members, counts = place_points_reference(points_BHRND.detach(), centroids, cap)
    return BoundedClusters(members, counts, average_members_reference(points_BHRND, members, counts))


def move_centroids_reference(points_BHRND: Tensor, centroids_YCD: Tensor) -> Tensor:
    """Centroids [Y, C, D] after every point went to the nearest; one that gets no point stays where it was."""
    points = points_BHRND.flatten(0, 2)
    nearest = _scores(points, centroids_YCD).argmax(-1)
    belongs = torch.nn.functional.one_hot(nearest, centroids_YCD.shape[1]).to(_wide(points))
    sums = belongs.transpose(1, 2) @ points.to(belongs.dtype)
    sizes = belongs.sum(1)[..., None]
    means = (sums / sizes.clamp(min=1)).to(points.dtype)
    return torch.where(sizes > 0, means, centroids_YCD)


def place_points_reference(points_BHRND: Tensor, centroids_YCD: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Members [Y, C, U] and counts [Y, C], int32, under the cap; members by stretch, in each by position."""
    points = points_BHRND.flatten(0, 2)
    problems, count, dim = points.shape
    clusters = centroids_YCD.shape[1]
    stretches, room = stretches_of(count), places_in_stretch(count, clusters, cap)
    longest = math.ceil(count / stretches)
    # Point number i*S + s is the i-th of stretch s.
    padded = torch.nn.functional.pad(points, (0, 0, 0, longest * stretches - count))
    order = padded.view(problems, longest, stretches, dim).transpose(1, 2)
    numbers = torch.arange(longest * stretches, device=points.device).view(longest, stretches).t()
    scores = _scores(order.flatten(1, 2), centroids_YCD).view(problems, stretches, longest, clusters)
    taken = torch.zeros(problems, stretches, clusters, dtype=torch.int64, device=points.device)
    label = torch.full((problems, stretches, longest), -1, device=points.device)
    rank = torch.zeros_like(label)
    for first in range(0, longest, TILE):
        some = slice(first, first + TILE)
        waiting = (numbers[:, some] < count).expand(problems, -1, -1).clone()
        while bool(waiting.any()):
            full = (taken >= room)[:, :, None]
            choice = scores[:, :, some].masked_fill(full, -torch.inf).argmax(-1)
            wants = torch.nn.functional.one_hot(choice, clusters) * waiting[..., None]
            before = wants.cumsum(2) - wants + taken[:, :, None]
            own_rank = before.gather(3, choice[..., None])[..., 0]
            placed = waiting & (own_rank < room)
            label[:, :, some] = torch.where(placed, choice, label[:, :, some])
            rank[:, :, some] = torch.where(placed, own_rank, rank[:, :, some])
            taken = (taken + wants.sum(2)).clamp(max=room)
            waiting &= ~placed
    base = (taken.cumsum(1) - taken).gather(2, label.clamp(min=0))
    spare = clusters * stretches * room  # where numbers of no point go
    place = torch.where(label >= 0, label * stretches * room + base + rank, spare)
    members = torch.full((problems, spare + 1), -1, dtype=torch.int32, device=points.device)
    members.scatter_(1, place.flatten(1), numbers.to(torch.int32).expand(problems, -1, -1).flatten(1))
    return members[:, :spare].reshape(problems, clusters, -1).contiguous(), taken.sum(1).to(torch.int32)


def average_members_reference(points_BHRND: Tensor, members_YCU: Tensor, counts_YC: Tensor) -> Tensor:
    """Means [Y, C, D] of the members, in the points' dtype; zero without members."""
    rows = gather_members(points_BHRND, members_YCU, counts_YC)
    sizes = counts_YC.clamp(min=1)[..., None]
    return (rows.to(_wide(rows)).sum(2) / sizes).to(rows.dtype)


def gather_members(points_BHRND: Tensor, members_YCU: Tensor, counts_YC: Tensor) -> Tensor:
    """The points of each cluster, [Y, C, U, D]; zero in places that are free."""
    points = points_BHRND.flatten(0, 2)
    filled = torch.arange(members_YCU.shape[2], device=points.device) < counts_YC[..., None]
    rows = torch.where(filled, members_YCU, 0).long().flatten(1)
    index = rows[..., None].expand(*rows.shape, points.shape[2])
    found = points.gather(1, index).view(*members_YCU.shape, points.shape[2])
    return torch.where(filled[..., None], found, 0)


def scatter_members(rows_YCUX: Tensor, members_YCU: Tensor, counts_YC: Tensor, count: int) -> Tensor:
    """What belongs to each of N points, [Y, N, X], from what belongs to each place of the clusters."""
    problems, clusters, room = members_YCU.shape
    filled = torch.arange(room, device=rows_YCUX.device) < counts_YC[..., None]
    places = torch.arange(clusters * room, device=rows_YCUX.device).expand(problems, -1)
    place = torch.zeros(problems, count + 1, dtype=torch.int64, device=rows_YCUX.device)
    place.scatter_(1, torch.where(filled, members_YCU, count).long().flatten(1), places)
    index = place[:, :count, None].expand(-1, -1, rows_YCUX.shape[3])
    return rows_YCUX.flatten(1, 2).gather(1, index)


def _scores(points_YND: Tensor, centroids_YCD: Tensor) -> Tensor:
    """Largest for the nearest centroid: p.c - c.c/2."""
    wide = _wide(points_YND)
    centroids = centroids_YCD.to(wide)
    return points_YND.to(wide) @ centroids.transpose(1, 2) - 0.5 * centroids.square().sum(-1)[:, None]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
