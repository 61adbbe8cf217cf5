"""How the arrays of query tables are computed (CSAttention sections 3.1 and 3.2).

Shape legend: H KV heads, N keys, P sampled queries, m subspaces, C centroids, D head dim, B = D/m slice width, L list
capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.layer_index import LayerSource, all_finite, subspace_dims
from index_store.indexes.kmeans.kmeans import spherical_kmeans
from index_store.indexes.query_tables.parameters import TableParameters, list_capacity

INT8_MAX = 127
INT16_MAX = 32767


def build_tables(parameters: TableParameters, source: LayerSource, seed: int) -> dict[str, Tensor]:
    """Arrays of one layer's tables, where the keys are; on a device the centroids are others than on the host.

    centroids [H, m, C, B] float32 of unit length, scales [H, m] float32; scores [H, m, C, N] int8 in the dense layout,
    in the other scores [H, m, C, L] int16 and ids [H, m, C, L] int32, best first. Keys must be finite.

    Raises InvalidArgumentError for queries that are not finite, and for a KV head whose queries are all zero.
    """
    keys_HND = source.keys_HND
    if keys_HND.is_cuda and parameters.layout == "dense":
        return build_tables_on_device(parameters, source, seed)
    dims_MB = subspace_dims(parameters, keys_HND.shape[2])
    sample_HPD = source.queries.queries_HPGD.flatten(1, 2).to(keys_HND.device)
    sample_HPD = _with_directions(sample_HPD, dims_MB)
    capacity = list_capacity(parameters, keys_HND.shape[1])
    collected: dict[str, list[list[Tensor]]] = {"centroids": [], "scales": [], "scores": [], "ids": []}
    for keys_ND, sample_PD in zip(keys_HND, sample_HPD, strict=True):
        per_head: dict[str, list[Tensor]] = {name: [] for name in collected}
        for subspace, dims in enumerate(dims_MB):
            centroids = spherical_kmeans(
                sample_PD[:, dims], parameters.centroids, parameters.iterations, seed + subspace
            )
            slices = keys_ND[:, dims].float()
            if parameters.scores == "cosine":
                slices = torch.nn.functional.normalize(slices, dim=-1)
            per_head["centroids"].append(centroids)
            for name, array in _compress(centroids @ slices.t(), parameters.layout, capacity).items():
                per_head[name].append(array)
        for name, of_subspaces in per_head.items():
            collected[name].append(of_subspaces)
    return {
        name: torch.stack([torch.stack(head) for head in heads])
        for name, heads in collected.items()
        if heads[0]
    }


def build_tables_on_device(parameters: TableParameters, source: LayerSource, seed: int) -> dict[str, Tensor]:
    """The arrays of dense tables, by kernels. Centroids have values of the keys' dtype."""
    from index_store.indexes.query_tables.build_triton import build_device_tables

    keys_HND = source.keys_HND
    dims_MB = subspace_dims(parameters, keys_HND.shape[2])
    sample_HPD = source.queries.queries_HPGD.flatten(1, 2).to(keys_HND.device)
    sample_HPD = _with_directions(sample_HPD, dims_MB)
    return build_device_tables(
        keys_HND,
        sample_HPD,
        dims_MB,
        centroids=parameters.centroids,
        iterations=parameters.iterations,
        seed=seed,
        cosine=parameters.scores == "cosine",
    )


def _with_directions(sample_HPD: Tensor, dims_MB: Tensor) -> Tensor:
    """The sample, with ones where all of a KV head's queries are zero in a subspace, as in channels that only pad.

    There any direction does: keys that are read through such queries are multiplied with zeros. Raises
    InvalidArgumentError for queries that are not finite, or where a KV head has none but zeros.
    """
    if not all_finite(sample_HPD):
        raise InvalidArgumentError("k-means got NaN or infinity; the model or its dtype overflowed")
    largest_HD = sample_HPD.abs().amax(1)
    empty_HM = largest_HD[:, dims_MB.to(sample_HPD.device)].amax(-1) == 0
    if bool(empty_HM.all(1).any()):
        raise InvalidArgumentError("k-means got no point with a direction: all are zero")
    if not bool(empty_HM.any()):
        return sample_HPD
    filled = sample_HPD.clone()
    for head, subspace in empty_HM.nonzero().tolist():
        filled[head][:, dims_MB[subspace].to(filled.device)] = 1.0
    return filled


def _compress(scores_CN: Tensor, layout: str, capacity: int) -> dict[str, Tensor]:
    """Quantised table or lists of one subspace, with the scale that turns integers back into scores."""
    limit = INT8_MAX if layout == "dense" else INT16_MAX
    scale = scores_CN.abs().max().clamp(min=torch.finfo(torch.float32).tiny) / limit
    if layout == "dense":
        return {"scales": scale, "scores": (scores_CN / scale).round_().to(torch.int8)}
    top = scores_CN.topk(capacity, dim=-1, sorted=True)
    return {
        "scales": scale,
        "scores": (top.values / scale).round_().to(torch.int16),
        "ids": top.indices.to(torch.int32),
    }
