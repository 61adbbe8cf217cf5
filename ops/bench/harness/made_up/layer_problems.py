"""Keys, values and queries of one attention layer in host memory, and what its attention is compared with, eagerly.

They are random, or those of the packaged reader. References are eager, and as documented.

Shape legend: H KV heads, G query heads per KV head, N keys, K kept keys, d head dim, Q queries that take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.made_up.trained_rows import TrainedRows, record_rows
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


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention layer."""

    kv_heads: int
    group: int
    head_dim: int


_TRAINED = 31 * 1024  # tokens that the reader takes before prompts
SHAPES = {"llama-3.1-8b": Shape(8, 4, 128), "reader": Shape(2, 2, 64)}


@dataclass(frozen=True, slots=True)
class Problem:
    """Keys and values [H, N, 2, d] bfloat16; queries [Q, H, 1, G, d] float32, scaled by 1/sqrt(d).

    least_share: of the best keys' score that selections hold: rounding changes more where logits spread far.
    """

    kv_HN2D: Tensor
    queries: Tensor
    least_share: float = 0.998

    @property
    def length(self) -> int:
        return self.kv_HN2D.shape[1]


def make_problem(
    shape: Shape, length: int, queries: int, seed: int, trained: TrainedRows | None = None
) -> Problem:
    if trained is not None:
        rows = trained.q(0, shape.kv_heads, queries * shape.group, shape.head_dim)
        q = rows.view(shape.kv_heads, queries, 1, shape.group, shape.head_dim).transpose(0, 1).contiguous()
        kv = trained.kv(0, shape.kv_heads, length, shape.head_dim)
        return Problem(kv.bfloat16(), q * shape.head_dim**-0.5, 0.9)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape.kv_heads, length, 2, shape.head_dim, generator=generator).bfloat16()
    q = torch.randn(queries, shape.kv_heads, 1, shape.group, shape.head_dim, generator=generator)
    return Problem(kv, 2.0 * q * shape.head_dim**-0.5)


def record_problems(longest: int, queries: int) -> TrainedRows:
    """What `make_problem` takes for contexts of up to so many tokens."""
    sessions = queries * max(shape.group for shape in SHAPES.values()) // 2  # of two query heads each
    return record_rows(min(_TRAINED, longest), "cpu", sessions)
