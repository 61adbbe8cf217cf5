"""Arrays of key clusters, built on the device (on the host: `index_store.indexes.key_clusters.build`).

Shape legend: H KV heads, N keys, C clusters, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from index_store.indexes.kmeans.first_centroids import Blocks
from index_store.indexes.kmeans.kmeans_triton import find_clusters


def build_device_clusters(
    kv_HN2D: Tensor,
    blocks: Blocks,
    *,
    metric: str,
    iterations: int,
    moments: str,
    seed: int,
    compared_HND: Tensor | None = None,
) -> dict[str, Tensor]:
    """The arrays of `build.build_clusters`, on the device of the keys, without `frequencies`.

    kv_HN2D: [H, N, 2, d] keys and values. blocks: keys first..end-1 and their clusters, as `build.divide_keys`
    has them; keys in none (the sinks) are in no cluster. compared_HND: what means and variances are of and, rounded to
    the keys' dtype, what is clustered, where that is not the keys as stored (windowed RoPE). moments: none or
    diagonal.

    Does not look at the values of its arguments, so that the host never waits; keys must be finite.
    """
    keys_HND = kv_HN2D[:, :, 0] if compared_HND is None else compared_HND
    assignment = find_clusters(keys_HND.to(kv_HN2D.dtype), blocks, iterations, metric, seed)[0]
    offsets, members = list_device_members(assignment, blocks[-1][3])
    arrays = measure_members(keys_HND, kv_HN2D[:, :, 1], offsets, members, moments != "none")
    return {**arrays, "assignment": assignment, "offsets": offsets, "members": members}


def list_device_members(assignment_HN: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Offsets [H, C + 1] and members [H, N], both int32: each cluster's entries ascending, -1 entries after them."""
    heads, count = assignment_HN.shape
    device = assignment_HN.device
    first = torch.arange(heads, device=device, dtype=torch.int32)[:, None] * (clusters + 1)
    # One sort of all heads is several times as fast as one sort per head.
    named = torch.where(assignment_HN >= 0, assignment_HN, clusters) + first
    order = named.flatten().sort(stable=True)
    edges = first + torch.arange(clusters + 1, device=device, dtype=torch.int32)
    starts = torch.arange(heads, device=device, dtype=torch.int32)[:, None] * count
    offsets = torch.searchsorted(order.values, edges.flatten(), out_int32=True).view(heads, -1)
    members = order.indices.view(heads, count).to(torch.int32)
    return offsets - starts, members - starts


def measure_members(
    keys_HND: Tensor, values_HND: Tensor, offsets_HC: Tensor, members_HN: Tensor, spread: bool
) -> dict[str, Tensor]:
    """counts [H, C], means, value_sums and with `spread` variances [H, C, d], all float32, of listed clusters."""
    heads, count, dim = keys_HND.shape
    clusters = offsets_HC.shape[1] - 1
    device = keys_HND.device
    arrays = {"counts": torch.empty(heads, clusters, device=device)}
    for name in ("means", "value_sums", *(["variances"] if spread else [])):
        arrays[name] = torch.empty(heads, clusters, dim, device=device)
    measure_kernel[(clusters, heads)](
        keys_HND,
        values_HND,
        offsets_HC,
        members_HN,
        arrays["counts"],
        arrays["means"],
        arrays["value_sums"],
        arrays.get("variances"),
        keys_HND.stride(0),
        keys_HND.stride(1),
        values_HND.stride(0),
        values_HND.stride(1),
        count,
        clusters,
        SPREAD=spread,
        DIM=dim,
        LANES=triton.next_power_of_2(dim),
        TILE=16,
        num_warps=1,
    )
    return arrays


def measure_members_reference(
    keys_HND: Tensor, values_HND: Tensor, offsets_HC: Tensor, members_HN: Tensor, spread: bool
) -> dict[str, Tensor]:
    """The same, cluster by cluster."""
    heads, _, dim = keys_HND.shape
    clusters = offsets_HC.shape[1] - 1
    counts = offsets_HC.diff(dim=1).float()
    found = {name: torch.zeros(heads, clusters, dim) for name in ("means", "value_sums", "variances")}
    for head in range(heads):
        for cluster in range(clusters):
            begin, end = offsets_HC[head, cluster : cluster + 2].tolist()
            own = members_HN[head, begin:end].long()
            if len(own):
                keys, values = keys_HND[head, own].float(), values_HND[head, own].float()
                found["means"][head, cluster] = keys.mean(0)
                found["value_sums"][head, cluster] = values.sum(0)
                found["variances"][head, cluster] = keys.var(0, correction=0)
    if not spread:
        del found["variances"]
    return {"counts": counts, **{name: array.to(keys_HND.device) for name, array in found.items()}}


@triton.jit(do_not_specialize=["count", "clusters"])
def measure_kernel(
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    members_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    means_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    variances_ptr: tl.tensor,
    key_head_stride: tl.tensor,
    key_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_stride: tl.tensor,
    count: tl.tensor,
    clusters: tl.tensor,
    SPREAD: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (cluster, head)."""
    cluster = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(offsets_ptr + head * (clusters + 1) + cluster)
    end = tl.load(offsets_ptr + head * (clusters + 1) + cluster + 1)
    dims = tl.arange(0, LANES)
    exist = dims < DIM
    keys_head = keys_ptr + head * key_head_stride
    values_head = values_ptr + head * value_head_stride
    mean = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    value_sum = tl.zeros([LANES], tl.float32)
    for start in range(begin, end, TILE):
        entry = start + tl.arange(0, TILE)
        inside = entry < end
        ids = tl.load(members_ptr + head * count + entry, mask=inside, other=0).to(tl.int64)
        own = inside[:, None]
        if LANES != DIM:
            own = own & exist[None, :]
        keys = tl.load(keys_head + ids[:, None] * key_stride + dims[None, :], mask=own, other=0.0)
        values = tl.load(values_head + ids[:, None] * value_stride + dims[None, :], mask=own, other=0.0)
        value_sum += tl.sum(values.to(tl.float32), 0)
        # Squares around the tile's own mean are added as those of samples are pooled, so keys are read once.
        before = (start - begin).to(tl.float32)
        tile_size = tl.minimum(end - start, TILE).to(tl.float32)
        tile_mean = tl.sum(keys.to(tl.float32), 0) / tile_size
        step = tile_mean - mean
        share = tile_size / (before + tile_size)
        mean += step * share
        if SPREAD:
            centred = tl.where(inside[:, None], keys.to(tl.float32) - tile_mean[None, :], 0.0)
            squares += tl.sum(centred * centred, 0) + step * step * (before * share)
    size = tl.maximum(end - begin, 1).to(tl.float32)
    row = head * clusters + cluster
    tl.store(counts_ptr + row, (end - begin).to(tl.float32))
    tl.store(means_ptr + row * DIM + dims, mean, mask=exist)
    tl.store(sums_ptr + row * DIM + dims, value_sum, mask=exist)
    if SPREAD:
        tl.store(variances_ptr + row * DIM + dims, squares / size, mask=exist)
