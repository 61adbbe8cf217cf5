"""Arrays of a cluster tree, built on the device (on the host: `index_store.indexes.key_clusters.build`).

Shape legend: H KV heads, N keys, C clusters, K coarse clusters, d head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from index_store.indexes.key_clusters.build_triton import list_device_members, measure_members
from index_store.indexes.kmeans.first_centroids import Blocks
from index_store.indexes.kmeans.kmeans_triton import cluster_blocks


def build_device_tree(
    arrays: dict[str, Tensor],
    blocks: Blocks,
    *,
    keys_per_coarse: int,
    metric: str,
    iterations: int,
    seed: int,
) -> dict[str, Tensor]:
    """The arrays of `build.build_tree` over fine clusters built by `build_device_clusters`."""
    coarse_blocks, coarse = [], 0
    for first, end, begin, stop in blocks:
        own = max(1, math.ceil((end - first) / keys_per_coarse))
        coarse_blocks.append((begin, stop, coarse, coarse + own))
        coarse += own
    compared = _fill_empty(arrays["means"], arrays["counts"])
    parents_HC = cluster_blocks(compared, coarse_blocks, iterations, metric, seed)
    ordered = _order_by_parents(arrays, parents_HC, coarse)
    return {**ordered, **_coarse_moments(ordered, ordered["coarse_offsets"])}


def _fill_empty(means_HCD: Tensor, counts_HC: Tensor) -> Tensor:
    """Means with those of empty clusters replaced by the last filled one's before them.

    An empty cluster so joins a coarse cluster that exists, without drawing its centroid to zero.
    """
    number_C = torch.arange(counts_HC.shape[1], device=counts_HC.device)
    last_HC = torch.where(counts_HC > 0, number_C, 0).cummax(1).values
    return means_HCD.gather(1, last_HC[..., None].expand_as(means_HCD))


def _order_by_parents(arrays: dict[str, Tensor], parents_HC: Tensor, coarse: int) -> dict[str, Tensor]:
    """The arrays with clusters renumbered so that those of one coarse cluster follow each other."""
    offsets, order = list_device_members(parents_HC, coarse)
    order_HC = order.long()
    found = {"parents": parents_HC.gather(1, order_HC), "coarse_offsets": offsets}
    found["counts"] = arrays["counts"].gather(1, order_HC)
    for name in ("means", "value_sums", "variances"):
        if name in arrays:
            found[name] = arrays[name].gather(1, order_HC[..., None].expand_as(arrays[name]))
    rank_HC = torch.empty_like(order).scatter_(
        1, order_HC, torch.arange(order.shape[1], device=order.device, dtype=order.dtype).expand_as(order)
    )
    old_HN = arrays["assignment"]
    new_HN = rank_HC.gather(1, old_HN.clamp(min=0).long())
    found["assignment"] = torch.where(old_HN >= 0, new_HN, old_HN)
    found["offsets"], found["members"] = list_device_members(found["assignment"], parents_HC.shape[1])
    return found


def _coarse_moments(arrays: dict[str, Tensor], offsets_HK: Tensor) -> dict[str, Tensor]:
    """Moments of coarse clusters, each of which holds consecutive fine ones; summed in order, without atomics."""
    weights_HC1 = arrays["counts"][..., None]
    members_HC = torch.arange(weights_HC1.shape[1], device=offsets_HK.device, dtype=torch.int32)
    members_HC = members_HC.expand(weights_HC1.shape[:2]).contiguous()
    # Counts are whole numbers, whose running sum is exact.
    running_HC = torch.nn.functional.pad(arrays["counts"].double().cumsum(1), (1, 0))
    counts_HK = running_HC.gather(1, offsets_HK.long()).diff(dim=1).float()
    fine_HK1 = offsets_HK.diff(dim=1).clamp(min=1)[..., None]
    present_HK1 = counts_HK.clamp(min=1.0)[..., None]

    def add(rows_HCD: Tensor) -> dict[str, Tensor]:
        return measure_members(
            rows_HCD * weights_HC1, arrays["value_sums"], offsets_HK, members_HC, spread=False
        )

    sums = add(arrays["means"])
    means_HKD = sums["means"] * fine_HK1 / present_HK1
    found = {
        "coarse_counts": counts_HK.contiguous(),
        "coarse_means": means_HKD,
        "coarse_value_sums": sums["value_sums"],
    }
    if "variances" in arrays:
        own_HCD = means_HKD.gather(1, arrays["parents"].long()[..., None].expand_as(arrays["means"]))
        spread_HCD = arrays["variances"] + (arrays["means"] - own_HCD).square()
        found["coarse_variances"] = add(spread_HCD)["means"] * fine_HK1 / present_HK1
    return found
