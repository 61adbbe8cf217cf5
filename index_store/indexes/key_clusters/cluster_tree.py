"""Key clusters under coarser ones, so that a search compares queries with part of them only.

Queries are compared with the coarse means first; the best coarse clusters are expanded until they hold a share of the
keys, and only their fine clusters are compared and can be selected (Squeezed Attention section 3.3). Keys below a
coarse cluster that was not expanded are approximated by it, the others by their fine cluster (Multipole Attention
section 3.4).

Shape legend: H KV heads, T positions, G group heads, C fine clusters, K coarse clusters, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.key_clusters.build import build_tree
from index_store.indexes.key_clusters.index import KeyClusters, score_clusters
from index_store.indexes.key_clusters.parameters import (
    ClusterParameters,
    TreeKind,
    TreeParameters,
    TreeSearch,
)
from index_store.indexes.key_clusters.tree_numba import search_tree
from index_store.selection.clustered_keys import ClusteredKeys, ScoredClusters
from index_store.store.description.json_fields import Scalar


class ClusterTree(TreeKind, KeyClusters):
    """Two levels of clusters of one layer's keys.

    The session's own clusters have no coarse level: they are few, and all of them are compared with every query.
    `pieces` without a ranking expands coarse clusters up to the default share of the keys.
    """

    def __init__(self, parameters: ClusterParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, arrays)
        self._coarse_offsets_HK = arrays["coarse_offsets"]
        self._coarse = ClusteredKeys(
            arrays["coarse_counts"],
            arrays["coarse_means"],
            arrays["coarse_value_sums"],
            arrays["assignment"],
            variances_HCD=arrays.get("coarse_variances"),
            parents_HC=arrays["parents"],
        )

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = TreeParameters.parse(parameters)
        return cls(parsed, build_tree(parsed, source, seed))

    def _search(
        self, queries_HTGD: Tensor, search: Mapping[str, Scalar]
    ) -> tuple[tuple[ScoredClusters, ...], float]:
        coarse_keep = TreeSearch.parse(search).coarse_keep
        coarse = score_clusters(self._coarse, queries_HTGD)
        expanded_HTK = expand(coarse.logits_HTGC, self._coarse.counts_HC, coarse_keep)
        logits = search_tree(
            queries_HTGD,
            self._clusters.means_HCD,
            self._clusters.counts_HC,
            self._coarse_offsets_HK,
            expanded_HTK,
        )
        compared = (expanded_HTK * self._coarse_offsets_HK.diff(dim=1)[:, None]).sum(-1)
        coarse.logits_HTGC.masked_fill_(expanded_HTK[:, :, None], -torch.inf)
        vectors_read = expanded_HTK.shape[2] + float(compared.double().mean())
        return (ScoredClusters(self._clusters, logits, queries_HTGD), coarse), vectors_read


def expand(logits_HTGK: Tensor, counts_HK: Tensor, keep: float) -> Tensor:
    """Which coarse clusters to expand, [H, T, K] bool: best first until they hold the share `keep` of the keys.

    They are ordered by S_i = exp(q.c_i) / sum_j N_j exp(q.c_j) averaged over the group (Multipole Attention eq. 1).
    The one that reaches the share is expanded as well.
    """
    totals = (logits_HTGK + counts_HK.log()[:, None, None]).logsumexp(-1, keepdim=True)
    scores_HTK = (logits_HTGK - totals).exp().mean(2)
    order = scores_HTK.argsort(dim=-1, descending=True, stable=True)
    sizes = counts_HK[:, None].expand_as(scores_HTK).gather(-1, order)
    before = sizes.cumsum(-1) - sizes
    wanted = before < keep * counts_HK.sum(-1)[:, None, None]
    expanded = torch.zeros_like(wanted).scatter_(-1, order, wanted)
    return expanded & (counts_HK > 0)[:, None]
