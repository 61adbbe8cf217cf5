"""How the arrays of key clusters and of their tree are computed.

Shape legend: H KV heads, N keys, P keys of one block, C clusters, K coarse clusters, d head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.layer_index import LayerSource, all_finite, check_keys
from index_store.indexes.key_clusters.parameters import ClusterParameters, TreeParameters
from index_store.indexes.kmeans.kmeans import assign_clusters


@dataclass(frozen=True, slots=True)
class ClusterMoments:
    """The per-cluster arrays of `ClusteredKeys`, as defined there."""

    counts_HC: Tensor
    means_HCD: Tensor
    value_sums_HCD: Tensor
    variances_HCD: Tensor | None = None


def measure(
    keys_HXD: Tensor, values_HXD: Tensor, assignment_HX: Tensor, clusters: int, moments: str
) -> ClusterMoments:
    """Moments of clusters 0..clusters-1 from float32 keys and values [H, X, d] and the keys' clusters [H, X] int64.

    Every key belongs to a cluster. A cluster without members has zeros everywhere.
    """
    counts = count_members(assignment_HX, clusters)
    members = counts.clamp(min=1)[..., None]
    means = sum_by_cluster(keys_HXD, assignment_HX, clusters) / members
    value_sums = sum_by_cluster(values_HXD, assignment_HX, clusters)
    if moments == "none":
        return ClusterMoments(counts, means, value_sums)
    centred_keys = keys_HXD - _rows_of(means, assignment_HX)
    variances = sum_by_cluster(centred_keys.square(), assignment_HX, clusters) / members
    return ClusterMoments(counts, means, value_sums, variances)


def sum_by_cluster(rows_HXD: Tensor, assignment_HX: Tensor, clusters: int) -> Tensor:
    """[H, C, D] float32: the sum of the rows [H, X, D] of every cluster."""
    heads, _, dim = rows_HXD.shape
    sums = torch.zeros(heads * clusters, dim, device=rows_HXD.device)
    places, rows = _flat(assignment_HX, clusters), rows_HXD.reshape(-1, dim)
    if rows.device.type == "cpu":
        sums.index_add_(0, places, rows)
    else:
        # Sorts; index_add_ would add in another order every time there.
        sums.index_put_((places,), rows, accumulate=True)
    return sums.view(heads, clusters, dim)


def count_members(assignment_HX: Tensor, clusters: int) -> Tensor:
    """[H, C] float32: the keys of every cluster."""
    heads = len(assignment_HX)
    counts = torch.bincount(_flat(assignment_HX, clusters), minlength=heads * clusters)
    return counts.float().view(heads, clusters)


def _flat(assignment_HX: Tensor, clusters: int) -> Tensor:
    heads = torch.arange(len(assignment_HX), device=assignment_HX.device)[:, None]
    return (assignment_HX + heads * clusters).flatten()


def _rows_of(table_HCD: Tensor, assignment_HX: Tensor) -> Tensor:
    return table_HCD.gather(1, assignment_HX[..., None].expand(-1, -1, table_HCD.shape[2]))


def check_frequencies(frequencies_F: Tensor | None, head_dim: int) -> Tensor:
    """The frequencies; raises InvalidArgumentError unless there is one for every pair of dimensions."""
    if frequencies_F is None:
        raise InvalidArgumentError(
            "windowed RoPE needs one rotary embedding of all dimensions in every layer, and this model's keys are "
            "turned otherwise, or not in all layers; build the index with window 0"
        )
    if tuple(frequencies_F.shape) != (head_dim // 2,) or head_dim % 2:
        raise InvalidArgumentError(
            f"windowed RoPE needs one inverse frequency for every two of the {head_dim} dimensions, "
            f"got {tuple(frequencies_F.shape)}; build the index with window 0"
        )
    return frequencies_F


def undo_rotary(keys_HTD: Tensor, first_position: int, frequencies_F: Tensor) -> Tensor:
    """Keys [H, T, d] at positions first_position.. turned back to position 0: [H, T, d] float32."""
    end = first_position + keys_HTD.shape[1]
    positions_T = torch.arange(first_position, end, device=keys_HTD.device)
    return _turn(keys_HTD, _angles(-positions_T, frequencies_F))


def move_queries(queries_HTGD: Tensor, position: int, window: int, frequencies_F: Tensor) -> Tensor:
    """Queries [H, T, G, d] at positions position.. turned to position `window`: [H, T, G, d] float32."""
    end = position + queries_HTGD.shape[1]
    positions_T = torch.arange(position, end, device=queries_HTGD.device)
    return _turn(queries_HTGD, _angles(window - positions_T, frequencies_F)[:, None])


def _angles(positions_T: Tensor, frequencies_F: Tensor) -> Tensor:
    # float32 resolves the angle of the fastest dimension to 0.06 rad at a million tokens.
    return positions_T.double()[:, None] * frequencies_F.to(positions_T.device).double()


def _turn(vectors: Tensor, angles: Tensor) -> Tensor:
    """Vectors [..., d] with dimensions i and i + d/2 turned by angles [..., F]."""
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = vectors.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


_SEEDS = 2**31

_ORDER = ("counts", "means", "value_sums", "assignment", "variances", "frequencies", "offsets", "members")
"""In which a layer's arrays are stored; those of a tree come behind."""


class KeyBlock(NamedTuple):
    """Consecutive keys first..end-1 that are clustered together, and the numbers of their clusters."""

    first: int
    end: int
    first_cluster: int
    end_cluster: int


def divide_keys(count: int, keys_per_cluster: int, block: int, sinks: int) -> list[KeyBlock]:
    """Blocks of all keys but the sinks: W keys each, W/2 to 3W/2 in the last one (Multipole Attention section 3.3).

    A context of fewer keys is one block. No key at all beside the sinks still makes one block, with an empty cluster.
    """
    first = min(sinks, count)
    size = block if block > 0 else count
    blocks: list[KeyBlock] = []
    cluster = 0
    while first < count or not blocks:
        end = first + size if count - first > 1.5 * size else count
        clusters = max(1, math.ceil((end - first) / keys_per_cluster))
        blocks.append(KeyBlock(first, end, cluster, cluster + clusters))
        first, cluster = end, cluster + clusters
    return blocks


def build_clusters(parameters: ClusterParameters, source: LayerSource, seed: int) -> dict[str, Tensor]:
    """Arrays of the clusters of one layer; all heads have the same number, some may be empty.

    counts [H, C] float32; means and value_sums [H, C, d], variances [H, C, d] float32, the
    last as `moments` says; assignment [H, N] int32, -1 for sinks; offsets [H, C + 1] and members [H, N] int32,
    sinks after all members; frequencies [H, d/2] float32 with windowed RoPE.

    They are where the keys are; on a device the clusters are others than on the host, as tight.
    Raises InvalidArgumentError for keys or values that are not finite, and for windowed RoPE without frequencies.
    """
    check_keys(source.keys_HND)
    if not all_finite(source.values_HND):
        raise InvalidArgumentError("values contain NaN or infinity; the model or its dtype overflowed")
    if source.kv_HN2D.is_cuda:
        return build_clusters_on_device(parameters, source, seed)
    heads, count, head_dim = source.keys_HND.shape
    blocks = _blocks(count, parameters)
    clusters = blocks[-1].end_cluster
    arrays = _empty_arrays(parameters.moments, heads, count, clusters, head_dim)
    frequencies_F = None
    if parameters.window > 0:
        frequencies_F = check_frequencies(source.inverse_frequencies, head_dim).float()
        arrays["frequencies"] = frequencies_F.repeat(heads, 1)
    for head in range(heads):
        for number, block in enumerate(blocks):
            keys_PD = source.keys_HND[head, block.first : block.end].float()
            if frequencies_F is not None:
                keys_PD = undo_rotary(keys_PD[None], block.first, frequencies_F)[0]
            own = block.end_cluster - block.first_cluster
            cluster_P = assign_clusters(
                keys_PD,
                own,
                parameters.iterations,
                (seed + head * len(blocks) + number) % _SEEDS,
                parameters.metric,
            )
            values_PD = source.values_HND[head, block.first : block.end].float()
            arrays["assignment"][head, block.first : block.end] = cluster_P + block.first_cluster
            moments = measure(keys_PD[None], values_PD[None], cluster_P[None], own, parameters.moments)
            for name, array in _moment_arrays(moments).items():
                arrays[name][head, block.first_cluster : block.end_cluster] = array[0]
    arrays["offsets"], arrays["members"] = list_members(arrays["assignment"], clusters)
    return arrays


def build_clusters_on_device(
    parameters: ClusterParameters, source: LayerSource, seed: int
) -> dict[str, Tensor]:
    """The same arrays, by kernels. Keys and values must be finite."""
    from index_store.indexes.key_clusters.build_triton import build_device_clusters

    heads, count, head_dim = source.keys_HND.shape
    compared_HND = None
    frequencies_F = None
    if parameters.window > 0:
        frequencies_F = check_frequencies(source.inverse_frequencies, head_dim).float()
        compared_HND = undo_rotary(source.keys_HND, 0, frequencies_F)
    arrays = build_device_clusters(
        source.kv_HN2D,
        _blocks(count, parameters),
        metric=parameters.metric,
        iterations=parameters.iterations,
        moments=parameters.moments,
        seed=seed,
        compared_HND=compared_HND,
    )
    if frequencies_F is not None:
        arrays["frequencies"] = frequencies_F.to(source.kv_HN2D.device).repeat(heads, 1)
    return _ordered(arrays)


def _blocks(count: int, parameters: ClusterParameters) -> list[KeyBlock]:
    return divide_keys(count, parameters.keys_per_cluster, parameters.block, parameters.sinks)


def build_tree(parameters: TreeParameters, source: LayerSource, seed: int) -> dict[str, Tensor]:
    """Arrays of a cluster tree: those of its fine clusters, in the order of their coarse clusters, and

    parents [H, C] int32; coarse_offsets [H, K + 1] int32, the fine clusters of every coarse one; coarse_counts [H, K],
    coarse_means, coarse_value_sums and (moments diagonal) coarse_variances [H, K, d] float32.

    Coarse clusters are k-means of the fine means, block by block (Squeezed Attention section 3.3), on the host; their
    means are those of all their keys. Raises InvalidArgumentError like `build_clusters`.
    """
    arrays = {name: array.cpu() for name, array in build_clusters(parameters, source, seed).items()}
    heads, count = arrays["assignment"].shape
    parents_HC = torch.empty(arrays["counts"].shape, dtype=torch.int64)
    blocks = _blocks(count, parameters)
    coarse = 0
    for number, block in enumerate(blocks):
        own = max(1, math.ceil((block.end - block.first) / parameters.keys_per_coarse))
        for head in range(heads):
            filled = arrays["counts"][head, block.first_cluster : block.end_cluster] > 0
            # Empty clusters join the last coarse one of their block: they count for nothing there.
            parents = torch.full(filled.shape, own - 1)
            if bool(filled.any()):
                means = arrays["means"][head, block.first_cluster : block.end_cluster][filled]
                own_seed = (seed + head * len(blocks) + number) % _SEEDS
                parents[filled] = assign_clusters(
                    means, own, parameters.iterations, own_seed, parameters.metric
                )
            parents_HC[head, block.first_cluster : block.end_cluster] = parents + coarse
        coarse += own
    _order_by_parents(arrays, parents_HC)
    arrays["coarse_offsets"], _ = list_members(arrays["parents"], coarse)
    arrays.update(_coarse_moments(arrays, coarse))
    return {name: array.to(source.kv_HN2D.device) for name, array in arrays.items()}


def _ordered(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [*(name for name in _ORDER if name in arrays), *(name for name in arrays if name not in _ORDER)]
    return {name: arrays[name] for name in names}


def list_members(assignment_HX: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Offsets [H, C + 1] and members [H, X], both int32: each cluster's entries ascending, -1 entries after them."""
    last_HX = torch.where(assignment_HX >= 0, assignment_HX, clusters).long()
    sizes_HC = torch.stack([row.bincount(minlength=clusters + 1) for row in last_HX])[:, :clusters]
    offsets = torch.nn.functional.pad(sizes_HC.cumsum(1), (1, 0))
    return offsets.to(torch.int32), last_HX.argsort(dim=1, stable=True).to(torch.int32)


def _moment_arrays(moments: ClusterMoments) -> dict[str, Tensor]:
    named = {
        "counts": moments.counts_HC,
        "means": moments.means_HCD,
        "value_sums": moments.value_sums_HCD,
        "variances": moments.variances_HCD,
    }
    return {name: array for name, array in named.items() if array is not None}


def _empty_arrays(moments: str, heads: int, count: int, clusters: int, head_dim: int) -> dict[str, Tensor]:
    arrays = {
        "counts": torch.zeros(heads, clusters),
        "means": torch.zeros(heads, clusters, head_dim),
        "value_sums": torch.zeros(heads, clusters, head_dim),
        "assignment": torch.full((heads, count), -1, dtype=torch.int32),
    }
    if moments != "none":
        arrays["variances"] = torch.zeros(heads, clusters, head_dim)
    return arrays


def _order_by_parents(arrays: dict[str, Tensor], parents_HC: Tensor) -> None:
    """Renumbers the fine clusters so that those of one coarse cluster follow each other; adds `parents`."""
    order_HC = parents_HC.argsort(dim=1, stable=True)
    arrays["parents"] = parents_HC.gather(1, order_HC).to(torch.int32)
    for name in arrays.keys() & {"counts", "means", "value_sums", "variances"}:
        arrays[name] = torch.stack([a[o] for a, o in zip(arrays[name], order_HC, strict=True)])
    rank_HC = order_HC.argsort(dim=1).to(torch.int32)
    old_HN = arrays["assignment"]
    new_HN = rank_HC.gather(1, old_HN.clamp(min=0).long())
    arrays["assignment"] = torch.where(old_HN >= 0, new_HN, old_HN)
    arrays["offsets"], arrays["members"] = list_members(arrays["assignment"], parents_HC.shape[1])


def _coarse_moments(arrays: dict[str, Tensor], coarse: int) -> dict[str, Tensor]:
    parents_HC = arrays["parents"].long()
    weights_HC1 = arrays["counts"][..., None]
    counts_HK = sum_by_cluster(weights_HC1, parents_HC, coarse)[..., 0]
    present_HK1 = counts_HK.clamp(min=1.0)[..., None]
    means_HKD = sum_by_cluster(arrays["means"] * weights_HC1, parents_HC, coarse) / present_HK1
    found = {
        "coarse_counts": counts_HK.contiguous(),
        "coarse_means": means_HKD,
        "coarse_value_sums": sum_by_cluster(arrays["value_sums"], parents_HC, coarse),
    }
    if "variances" in arrays:
        own_HCD = means_HKD.gather(1, parents_HC[..., None].expand_as(arrays["means"]))
        spread_HCD = arrays["variances"] + (arrays["means"] - own_HCD).square()
        found["coarse_variances"] = sum_by_cluster(spread_HCD * weights_HC1, parents_HC, coarse) / present_HK1
    return found
