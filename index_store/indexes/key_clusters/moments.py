"""Moments of clusters from an assignment of keys to them.

Shape legend: H KV heads, X keys, C clusters, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.selection.remainders import MOMENTS

_PADDED_ROWS = 16_384  # member rows of several clusters multiplied at a time, padded to the largest of them


@dataclass(frozen=True, slots=True)
class ClusterMoments:
    """The per-cluster arrays of `ClusteredKeys`, as defined there."""

    counts_HC: Tensor
    means_HCD: Tensor
    value_sums_HCD: Tensor
    variances_HCD: Tensor | None = None
    covariances_HCDD: Tensor | None = None


def check_moments(moments: str) -> None:
    """Raises InvalidArgumentError for an unknown choice."""
    if moments not in MOMENTS:
        raise InvalidArgumentError(f"moments is {moments!r}, expected one of {', '.join(MOMENTS)}")


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
    if moments == "diagonal":
        return ClusterMoments(counts, means, value_sums, variances)
    centred_values = values_HXD - _rows_of(value_sums / members, assignment_HX)
    products = [
        _products_by_cluster(*head, clusters)
        for head in zip(centred_values, centred_keys, assignment_HX, strict=True)
    ]
    return ClusterMoments(counts, means, value_sums, variances, torch.stack(products))


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


def _products_by_cluster(left_XD: Tensor, right_XD: Tensor, assignment_X: Tensor, clusters: int) -> Tensor:
    """[C, d, d]: the sum over each cluster's members of left row times right row.

    Clusters are taken from the largest on, as many at a time as fit when padded alike, so that little is padded.
    """
    members = assignment_X.argsort(stable=True)
    sizes = torch.bincount(assignment_X, minlength=clusters)
    starts = sizes.cumsum(0) - sizes
    by_size = sizes.argsort(descending=True, stable=True)
    products = left_XD.new_zeros(clusters, left_XD.shape[1], right_XD.shape[1])
    done = 0
    while done < clusters and (width := int(sizes[by_size[done]])) > 0:
        chosen = by_size[done : done + max(1, _PADDED_ROWS // width)]
        offsets = torch.arange(width, device=sizes.device)
        rows = members[(starts[chosen, None] + offsets).clamp_(max=len(members) - 1)]
        padding = offsets >= sizes[chosen, None]
        left = left_XD[rows].masked_fill_(padding[..., None], 0.0)
        products[chosen] = left.transpose(1, 2) @ right_XD[rows]
        done += len(chosen)
    return products
