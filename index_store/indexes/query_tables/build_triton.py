"""Query tables, built on the device (on the host: `index_store.indexes.query_tables.build`).

Shape legend: H KV heads, N keys, P sampled queries, m subspaces, C centroids, S = m*C table rows, D head dim, B = D/m
slice width, Y = H*m problems of k-means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from index_store.indexes.kmeans.kmeans_triton import fill_rows, spherical_kmeans_batch

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
    found = cluster_queries(sample_HPD, dims_MB, centroids, iterations, seed)
    dims = dims_MB.to(keys_HND.device, non_blocking=True)
    if cosine:
        slices = normalize(keys_HND[..., dims].float(), dim=-1)
        keys_HND = torch.zeros(keys_HND.shape, device=keys_HND.device)
        keys_HND[..., dims.flatten()] = slices.flatten(2)
    # Centroids are stored as they are multiplied, so that a query's products with them fit the scores.
    found = found.to(keys_HND.dtype).float()
    scales, scores = score_tables(fill_rows(keys_HND), found, dims)
    return {"centroids": found, "scales": scales, "scores": scores}


def cluster_queries(
    sample_HPD: Tensor, dims_MB: Tensor, centroids: int, iterations: int, seed: int
) -> Tensor:
    """Unit-length centroids [H, m, C, B] float32 of the sampled queries' slices."""
    heads = len(sample_HPD)
    dims = dims_MB.to(sample_HPD.device, non_blocking=True)
    subspaces, width = dims.shape
    slices_YPB = sample_HPD[..., dims].permute(0, 2, 1, 3).reshape(heads * subspaces, -1, width)
    found = spherical_kmeans_batch(slices_YPB, centroids, iterations, seed)
    return found.view(heads, subspaces, centroids, width)


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


def _scales(peaks: Tensor) -> Tensor:
    return peaks.clamp(min=torch.finfo(torch.float32).tiny) / _INT8_MAX


def _spread_centroids(centroids_HMCB: Tensor, dims_MB: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Centroids [H, S, d] with zeros in the dimensions of other subspaces."""
    heads, subspaces, centroids, _ = centroids_HMCB.shape
    wide = torch.zeros(heads, subspaces, centroids, head_dim, dtype=dtype, device=centroids_HMCB.device)
    places = dims_MB[None, :, None].expand(heads, -1, centroids, -1)
    return wide.scatter_(3, places, centroids_HMCB.to(dtype)).flatten(1, 2)


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
