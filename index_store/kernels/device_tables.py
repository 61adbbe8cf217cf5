"""Query tables, built on the device (on the host: `index_store.indexes.query_tables`).

Shape legend: H KV heads, N keys, P sampled queries, m subspaces, C centroids, S = m*C table rows, D head dim, B = D/m
slice width, L list capacity, Y = H*m problems of k-means.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from index_store.errors import InvalidArgumentError
from index_store.kernels.device_kmeans import fill_rows, move_centroids
from index_store.kernels.nearest_centroids import assign_vectors

_INT8_MAX = 127
_INT16_MAX = 32767
_WAITS_AT_ONCE = 2**26  # random numbers drawn for seeds
_SCORES_AT_ONCE = 2**27  # scores of list entries before the best are taken
_NEAR = 1e-9
"""Squared distance of a point to itself, so that repeated points can fill up the seeds."""


def build_device_tables(
    keys_HND: Tensor,
    sample_HPD: Tensor,
    dims_MB: Tensor,
    *,
    centroids: int,
    iterations: int,
    seed: int,
    cosine: bool = False,
    starts_HXD: Tensor | None = None,
) -> dict[str, Tensor]:
    """Arrays of dense query tables on the device of the keys: `centroids`, `scales` and `scores`.

    keys_HND: [H, N, d] with contiguous rows. sample_HPD: [H, P, d] sampled queries of each KV head's whole group.
    dims_MB: [m, B] dimensions of each subspace. cosine: scores of normalised key slices. starts_HXD: means of clusters
    of such queries, of which k-means takes its seeds.

    centroids [H, m, C, B] float32 of unit length, scales [H, m] float32, scores [H, m, C, N] int8.
    """
    found = cluster_queries(sample_HPD, dims_MB, centroids, iterations, seed, starts_HXD)
    dims = dims_MB.to(keys_HND.device, non_blocking=True)
    if cosine:
        slices = normalize(keys_HND[..., dims].float(), dim=-1)
        keys_HND = torch.zeros(keys_HND.shape, device=keys_HND.device)
        keys_HND[..., dims.flatten()] = slices.flatten(2)
    # Centroids are stored as they are multiplied, so that a query's products with them fit the scores.
    found = found.to(keys_HND.dtype).float()
    scales, scores = score_tables(fill_rows(keys_HND), found, dims)
    return {"centroids": found, "scales": scales, "scores": scores}


def build_device_lists(
    keys_HND: Tensor,
    sample_HPD: Tensor,
    dims_MB: Tensor,
    *,
    centroids: int,
    iterations: int,
    seed: int,
    capacity: int,
    cosine: bool = False,
    starts_HXD: Tensor | None = None,
) -> dict[str, Tensor]:
    """Arrays of Top-L lists of the best L = capacity keys of every centroid, best first; otherwise as dense tables.

    centroids [H, m, C, B] float32 of unit length, scales [H, m] float32, scores [H, m, C, L] int16, ids int32.
    """
    found = cluster_queries(sample_HPD, dims_MB, centroids, iterations, seed, starts_HXD)
    dims = dims_MB.to(keys_HND.device, non_blocking=True)
    heads, count, _ = keys_HND.shape
    subspaces = len(dims)
    shape = (heads, subspaces, centroids, capacity)
    scales = torch.empty(heads, subspaces, device=keys_HND.device)
    scores = torch.empty(shape, dtype=torch.int16, device=keys_HND.device)
    ids = torch.empty(shape, dtype=torch.int32, device=keys_HND.device)
    together = max(1, _SCORES_AT_ONCE // (centroids * count))
    for head in range(heads):
        for first in range(0, subspaces, together):
            some = slice(first, first + together)
            slices_MNB = keys_HND[head][:, dims[some]].float().transpose(0, 1)
            if cosine:
                slices_MNB = normalize(slices_MNB, dim=-1)
            scores_MCN = torch.bmm(found[head, some], slices_MNB.transpose(1, 2))
            scale_M = _scales(scores_MCN.abs().amax((1, 2)), _INT16_MAX)
            best = scores_MCN.topk(capacity, dim=-1, sorted=True)
            scales[head, some] = scale_M
            scores[head, some] = (best.values / scale_M[:, None, None]).round_().to(torch.int16)
            ids[head, some] = best.indices.to(torch.int32)
    return {"centroids": found, "scales": scales, "scores": scores, "ids": ids}


def cluster_queries(
    sample_HPD: Tensor,
    dims_MB: Tensor,
    centroids: int,
    iterations: int,
    seed: int,
    starts_HXD: Tensor | None = None,
) -> Tensor:
    """Unit-length centroids [H, m, C, B] float32 of the sampled queries' slices."""
    heads = len(sample_HPD)
    dims = dims_MB.to(sample_HPD.device, non_blocking=True)
    subspaces, width = dims.shape

    def slices(rows_HXD: Tensor) -> Tensor:
        return rows_HXD[..., dims].permute(0, 2, 1, 3).reshape(heads * subspaces, -1, width)

    starts_YXB = None if starts_HXD is None else slices(starts_HXD)
    found = spherical_kmeans_batch(slices(sample_HPD), centroids, iterations, seed, starts_YXB)
    return found.view(heads, subspaces, centroids, width)


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


def score_tables(keys_HND: Tensor, centroids_HMCB: Tensor, dims_MB: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [H, m] float32 and scores [H, m, C, N] int8 of all keys against all centroids.

    Two launches: the first finds the largest score of every subspace, the second rounds. Centroids are multiplied in
    the keys' dtype, which must hold them without a loss.
    """
    heads, count, head_dim = keys_HND.shape
    subspaces, centroids = centroids_HMCB.shape[1:3]
    wide = _spread_centroids(centroids_HMCB, dims_MB, head_dim, keys_HND.dtype)
    peaks = torch.zeros(heads, subspaces, dtype=torch.int32, device=keys_HND.device)
    scores = torch.empty(heads, subspaces, centroids, count, dtype=torch.int8, device=keys_HND.device)
    whole = keys_HND.dtype == torch.float32
    for rounding in (False, True):
        score_kernel[(triton.cdiv(count, 64), heads)](
            keys_HND,
            wide,
            peaks,
            scores,
            keys_HND.stride(0),
            keys_HND.stride(1),
            count,
            CENTROIDS=centroids,
            SUBSPACES=subspaces,
            DIM=head_dim,
            POINTS=64,
            TILE=min(128, max(16, triton.next_power_of_2(centroids))),
            ROUND=rounding,
            LIMIT=_INT8_MAX,
            PRECISION="ieee" if whole else "tf32",
            num_warps=4,
        )
    return _scales(peaks.view(torch.float32)), scores


def score_tables_reference(
    keys_HND: Tensor, centroids_HMCB: Tensor, dims_MB: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, eagerly."""
    slices = keys_HND.float()[..., dims_MB]
    products = torch.einsum("hnmb,hmcb->hmcn", slices, centroids_HMCB)
    scales = _scales(products.abs().amax((2, 3)))
    return scales, (products / scales[..., None, None]).round_().to(torch.int8)


def _scales(peaks: Tensor, limit: int = _INT8_MAX) -> Tensor:
    return peaks.clamp(min=torch.finfo(torch.float32).tiny) / limit


def _spread_centroids(centroids_HMCB: Tensor, dims_MB: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Centroids [H, S, d] with zeros in the dimensions of other subspaces."""
    heads, subspaces, centroids, _ = centroids_HMCB.shape
    wide = torch.zeros(heads, subspaces, centroids, head_dim, dtype=dtype, device=centroids_HMCB.device)
    places = dims_MB[None, :, None].expand(heads, -1, centroids, -1)
    return wide.scatter_(3, places, centroids_HMCB.to(dtype)).flatten(1, 2)


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


@triton.jit(do_not_specialize=["count"])
def score_kernel(
    keys_ptr: tl.tensor,
    centroids_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    head_stride: tl.tensor,
    row_stride: tl.tensor,
    count: tl.tensor,
    CENTROIDS: tl.constexpr,
    SUBSPACES: tl.constexpr,
    DIM: tl.constexpr,
    POINTS: tl.constexpr,
    TILE: tl.constexpr,
    ROUND: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (POINTS keys, head): their scores in all rows, or the largest of each subspace."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    inside = at < count
    dims = tl.arange(0, DIM)
    keys = tl.load(
        keys_ptr + head * head_stride + at.to(tl.int64)[:, None] * row_stride + dims[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    keys = tl.trans(keys)
    for tile in range(SUBSPACES * tl.cdiv(CENTROIDS, TILE)):
        subspace = tile // tl.cdiv(CENTROIDS, TILE)
        own = (tile % tl.cdiv(CENTROIDS, TILE)) * TILE + tl.arange(0, TILE)
        first = head * (SUBSPACES * CENTROIDS) + subspace * CENTROIDS
        exists = own < CENTROIDS
        offsets = (first + own)[:, None] * DIM + dims[None, :]
        own_centroids = tl.load(centroids_ptr + offsets, mask=exists[:, None], other=0.0)
        products = tl.dot(own_centroids, keys, input_precision=PRECISION)
        if ROUND:
            bits = tl.load(peaks_ptr + head * SUBSPACES + subspace)
            peak = tl.maximum(bits.to(tl.float32, bitcast=True), 1.1754943508222875e-38)
            # Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, halves to even ones.
            units = (products * (LIMIT / peak) + 12582912.0) - 12582912.0
            units = tl.minimum(tl.maximum(units, -LIMIT), LIMIT).to(tl.int8)
            into = scores_ptr + (first + own)[:, None] * count + at[None, :]
            tl.store(into, units, mask=exists[:, None] & inside[None, :])
        else:
            # Floats that are not negative are ordered like their bits.
            peak = tl.max(tl.max(tl.abs(products), 1), 0)
            tl.atomic_max(peaks_ptr + head * SUBSPACES + subspace, peak.to(tl.int32, bitcast=True))
