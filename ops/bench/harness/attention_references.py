"""What the benchmark of attention on a CPU compares with before it times: eager, and as documented.

Shape legend: H KV heads, G query heads per KV head, N keys, K kept keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.query_tables.index import QueryTables


def exact_attention(q_HGD: Tensor, kv_HK2D: Tensor) -> Tensor:
    """The truth, in float64."""
    weights = torch.softmax(q_HGD.double() @ kv_HK2D[:, :, 0].double().transpose(1, 2), dim=-1)
    return weights @ kv_HK2D[:, :, 1].double()


def reference_ranking(index: QueryTables | CoarseRows, q_HGD: Tensor, count: int) -> Tensor:
    """Scores [H, N] as documented, softmaxed and summed over the group: of weighted table rows, or of coarse keys."""
    if isinstance(index, CoarseRows):
        return (q_HGD @ index.rows.decode_keys(0, count).transpose(1, 2)).softmax(-1).sum(1)
    arrays = index.arrays()
    centroids = arrays["centroids"]
    heads, subspaces, _, width = centroids.shape
    scores = torch.zeros(heads, count)
    slices = q_HGD.reshape(heads, -1, width, subspaces).transpose(
        -1, -2
    )  # strided: dimension i is in i mod m
    products = torch.einsum("hgmb,hmcb->hgmc", slices, centroids)
    for head in range(heads):
        for query in products[head]:
            logits = torch.zeros(count)
            for subspace in range(subspaces):
                nearest = int(query[subspace].argmax())
                row = arrays["scores"][head, subspace, nearest].float()
                if "ids" in arrays:
                    listed = torch.full((count,), float(row.min()))
                    listed[arrays["ids"][head, subspace, nearest].long()] = row
                    row = listed
                weight = query[subspace, nearest].clamp(min=0) * arrays["scales"][head, subspace]
                logits += weight * row
            scores[head] += torch.softmax(logits, dim=-1)
    return scores


def reference_weights(
    q_HGD: Tensor, kv_HN2D: Tensor, kept_HN: Tensor, partition: KeyClusters | None
) -> Tensor:
    """Unnormalised weights [H, G, N] in float64: exact where kept, of the key's cluster or 0 elsewhere."""
    keys = kv_HN2D[:, :, 0].double()
    logits = q_HGD.double() @ keys.transpose(1, 2)
    weights = logits.exp() * kept_HN[:, None]
    if partition is None:
        return weights
    assignment = partition.arrays()["assignment"].long()
    for head, clusters in enumerate(assignment):
        members = (clusters >= 0).nonzero()[:, 0]
        owner, count = clusters[members], int(clusters.max()) + 1
        left = ~kept_HN[head, members]
        sizes, left_sizes = (
            torch.bincount(ids, minlength=count).clamp(min=1) for ids in (owner, owner[left])
        )
        means = torch.zeros(count, keys.shape[2]).double().index_add_(0, owner, keys[head, members])
        means /= sizes[:, None]
        spread = (keys[head, members] - means[owner]).square()
        variances = torch.zeros_like(means).index_add_(0, owner, spread) / sizes[:, None]
        summed = torch.zeros(len(q_HGD[head]), count).double()
        summed.index_add_(1, owner[left], logits[head][:, members[left]])
        weight_GC = (summed / left_sizes).exp() * (1 + 0.5 * q_HGD[head].double().square() @ variances.T)
        weights[head][:, members[left]] = weight_GC[:, owner[left]]
    return weights


def coarse_attention(q_HGD: Tensor, kv_HN2D: Tensor, kept_HN: Tensor, index: CoarseRows) -> Tensor:
    """Attention [H, G, d] in float64: to the rows that are kept, and to the coarse copies of the others."""
    coarse = torch.stack(
        [index.rows.decode_keys(0, index.key_count), index.rows.decode_values(0, index.key_count)], 2
    )
    mixed = kv_HN2D.float()
    mixed[:, : index.key_count] = torch.where(
        kept_HN[:, : index.key_count, None, None], mixed[:, : index.key_count], coarse
    )
    return exact_attention(q_HGD, mixed)
