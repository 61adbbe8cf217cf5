"""Dense query tables, built on the device (on the host: `index_store.indexes.query_tables`).

Shape legend: H KV heads, N keys, P sampled queries, m subspaces, C centroids, S = m*C table rows, D head dim, B = D/m
slice width, Y = H*m problems of k-means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from index_store.errors import InvalidArgumentError

_INT8_MAX = 127


def build_device_tables(
    keys_HND: Tensor,
    sample_HPD: Tensor,
    dims_MB: Tensor,
    *,
    centroids: int,
    iterations: int,
    seed: int,
    cosine: bool = False,
) -> dict[str, Tensor]:
    """Arrays of dense query tables on the device of the keys: `centroids`, `scales` and `scores`.

    keys_HND: [H, N, d] with contiguous rows. sample_HPD: [H, P, d] sampled queries of each KV head's whole group.
    dims_MB: [m, B] dimensions of each subspace. cosine: scores of normalised key slices.

    centroids [H, m, C, B] float32 of unit length, scales [H, m] float32, scores [H, m, C, N] int8.
    """
    heads = len(keys_HND)
    dims = dims_MB.to(keys_HND.device, non_blocking=True)
    subspaces, width = dims.shape
    sample = sample_HPD[..., dims].permute(0, 2, 1, 3).reshape(heads * subspaces, -1, width)
    found = spherical_kmeans_batch(sample, centroids, iterations, seed)
    found = found.view(heads, subspaces, centroids, width)
    if cosine:
        slices = normalize(keys_HND[..., dims].float(), dim=-1)
        keys_HND = torch.zeros(keys_HND.shape, device=keys_HND.device)
        keys_HND[..., dims.flatten()] = slices.flatten(2)
    scales, scores = score_tables(keys_HND, found, dims)
    return {"centroids": found, "scales": scales, "scores": scores}


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
    points = normalize(points_YPB.float(), dim=-1)
    centroids = _spread_seeds(points, clusters, seed)
    for _ in range(iterations):
        nearest = torch.bmm(points, centroids.transpose(1, 2)).argmax(-1)
        sums = torch.zeros_like(centroids)
        sums.scatter_add_(1, nearest[..., None].expand_as(points), points)
        moved = normalize(sums, dim=-1)
        kept = (sums.square().sum(-1, keepdim=True) > 0).float()
        centroids = torch.lerp(centroids, moved, kept)
    return centroids


def _spread_seeds(points_YPB: Tensor, clusters: int, seed: int) -> Tensor:
    """Points drawn one by one with a probability that grows with the squared distance to those drawn before."""
    problems, count, width = points_YPB.shape
    generator = torch.Generator(points_YPB.device).manual_seed(seed)
    waits = torch.empty(clusters, problems, count, device=points_YPB.device)
    waits.exponential_(generator=generator)
    present = points_YPB.square().sum(-1) > 0
    distances = present.float()
    drawn = torch.empty(problems, clusters, width, device=points_YPB.device)
    for number in range(clusters):
        # The least of exponential waiting times is at each point with a probability proportional to its rate.
        chosen = (distances / waits[number]).argmax(-1)
        seeds = points_YPB.gather(1, chosen[:, None, None].expand(-1, 1, width))
        drawn[:, number : number + 1] = seeds
        products = torch.bmm(points_YPB, seeds.transpose(1, 2))[..., 0]
        # Squared distance of unit vectors; never quite zero, so that repeated points can fill up the seeds.
        away = (2 - 2 * products).clamp_(min=1e-9)
        distances = torch.minimum(distances, away) if number else torch.where(present, away, 0.0)
    return drawn


def score_tables(keys_HND: Tensor, centroids_HMCB: Tensor, dims_MB: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [H, m] float32 and scores [H, m, C, N] int8 of all keys against all centroids.

    Two launches: the first finds the largest score of every subspace, the second rounds. Centroids are split into two
    parts of the keys' precision, which keeps products as exact as in float32.
    """
    heads, count, head_dim = keys_HND.shape
    _, subspaces, centroids, _ = centroids_HMCB.shape
    high, low = _spread_centroids(centroids_HMCB, dims_MB, head_dim, keys_HND.dtype)
    peaks = torch.zeros(heads, subspaces, dtype=torch.int32, device=keys_HND.device)
    scores = torch.empty(heads, subspaces, centroids, count, dtype=torch.int8, device=keys_HND.device)
    whole = keys_HND.dtype == torch.float32
    for rounding in (False, True):
        score_kernel[(triton.cdiv(count, 128), heads)](
            keys_HND,
            high,
            low,
            peaks,
            scores,
            keys_HND.stride(0),
            keys_HND.stride(1),
            count,
            CENTROIDS=centroids,
            SUBSPACES=subspaces,
            DIM=head_dim,
            POINTS=128,
            TILE=max(16, triton.next_power_of_2(centroids)),
            SPLIT=not whole,
            ROUND=rounding,
            LIMIT=_INT8_MAX,
            PRECISION="ieee" if whole else "tf32",
            num_warps=8,
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


def _scales(peaks_HM: Tensor) -> Tensor:
    return peaks_HM.clamp(min=torch.finfo(torch.float32).tiny) / _INT8_MAX


def _spread_centroids(
    centroids_HMCB: Tensor, dims_MB: Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Centroids [H, S, d] with zeros in the dimensions of other subspaces, rounded, and what rounding left."""
    heads, subspaces, centroids, _ = centroids_HMCB.shape
    wide = torch.zeros(heads, subspaces, centroids, head_dim, device=centroids_HMCB.device)
    places = dims_MB[None, :, None].expand(heads, -1, centroids, -1)
    wide.scatter_(3, places, centroids_HMCB)
    high = wide.to(dtype)
    return high.flatten(1, 2), (wide - high.float()).to(dtype).flatten(1, 2)


@triton.jit(do_not_specialize=["count"])
def score_kernel(
    keys_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
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
    SPLIT: tl.constexpr,
    ROUND: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per (POINTS keys, head): their scores in all rows, or the largest of each subspace."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    inside = at < count
    dims = tl.arange(0, DIM)
    own = tl.arange(0, TILE)
    keys = tl.load(
        keys_ptr + head * head_stride + at.to(tl.int64)[:, None] * row_stride + dims[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    keys = tl.trans(keys)
    for subspace in range(SUBSPACES):
        first = head * (SUBSPACES * CENTROIDS) + subspace * CENTROIDS
        exists = own < CENTROIDS
        offsets = (first + own)[:, None] * DIM + dims[None, :]
        high = tl.load(high_ptr + offsets, mask=exists[:, None], other=0.0)
        products = tl.dot(high, keys, input_precision=PRECISION)
        if SPLIT:
            low = tl.load(low_ptr + offsets, mask=exists[:, None], other=0.0)
            products = tl.dot(low, keys, products, input_precision=PRECISION)
        if ROUND:
            bits = tl.load(peaks_ptr + head * SUBSPACES + subspace)
            scale = tl.maximum(bits.to(tl.float32, bitcast=True), 1.1754943508222875e-38) / LIMIT
            # Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, halves to even ones.
            units = (products / scale + 12582912.0) - 12582912.0
            units = tl.minimum(tl.maximum(units, -LIMIT), LIMIT).to(tl.int8)
            into = scores_ptr + (first + own)[:, None] * count + at[None, :]
            tl.store(into, units, mask=exists[:, None] & inside[None, :])
        else:
            # Floats that are not negative are ordered like their bits.
            peak = tl.max(tl.max(tl.abs(products), 1), 0)
            tl.atomic_max(peaks_ptr + head * SUBSPACES + subspace, peak.to(tl.int32, bitcast=True))
