"""Clusters of keys: sums over their members, from which the attention to them can be approximated.

Shape legend: H KV heads, T query positions, G group heads, C clusters, X keys, K key ids, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.selection.pieces import Piece
from index_store.selection.remainders import CLUSTERS


@dataclass(frozen=True, slots=True)
class ClusteredKeys:
    """Moments of disjoint clusters of keys and their values.

    counts_HC: [H, C] float32, keys in each; 0 where a KV head has fewer clusters. means_HCD: [H, C, d] float32, mean of
        the raw keys. value_sums_HCD: [H, C, d] float32. variances_HCD: [H, C, d] float32, of the keys around their
        mean, per dimension. covariances_HCDD: [H, C, d, d] float32, sum over the members of (v - mean v)(k - mean k)^T.
    assignment_HX: [H, X] int32, the cluster of key `first_id + x`, -1 where a key belongs to none.
    parents_HC: coarse clusters are found through fine ones: assignment_HX names a fine cluster and parents_HC
        [H, fine clusters] int32 its coarse one. None otherwise.
    """

    counts_HC: Tensor
    means_HCD: Tensor
    value_sums_HCD: Tensor
    assignment_HX: Tensor
    first_id: int = 0
    variances_HCD: Tensor | None = None
    covariances_HCDD: Tensor | None = None
    parents_HC: Tensor | None = None

    def cluster_of(self, ids_HK: Tensor) -> Tensor:
        """[H, K] int64: the cluster of every key id, -1 for keys that are in none."""
        local = ids_HK.long() - self.first_id
        known = (local >= 0) & (local < self.assignment_HX.shape[1])
        found = self.assignment_HX.gather(1, torch.where(known, local, 0)).long()
        if self.parents_HC is not None:
            coarse = self.parents_HC.gather(1, found.clamp(min=0)).long()
            found = torch.where(found >= 0, coarse, found)
        return torch.where(known, found, -1)

    def heads(self, part: slice) -> ClusteredKeys:
        """The same for some KV heads."""

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[part]

        return ClusteredKeys(
            self.counts_HC[part],
            self.means_HCD[part],
            self.value_sums_HCD[part],
            self.assignment_HX[part],
            self.first_id,
            some(self.variances_HCD),
            some(self.covariances_HCDD),
            some(self.parents_HC),
        )


@dataclass(frozen=True, slots=True)
class ScoredClusters(Piece):
    """Clusters and what queries make of them. Their keys may lie outside of the searched range.

    logits_HTGC: [H, T, G, C] float32, q . mean key of every cluster; -inf where another piece stands for the cluster's
        keys (a tree: either a coarse cluster counts or its fine ones), and for clusters without keys.
    queries_HTGD: the queries as compared, [H, T, G, d] float32 scaled by 1/sqrt(d): moved to one relative position
        where the clusters are (windowed RoPE), the true ones otherwise.
    """

    clusters: ClusteredKeys
    logits_HTGC: Tensor
    queries_HTGD: Tensor

    kind = CLUSTERS

    def part(self, heads: slice, positions: slice) -> ScoredClusters:
        every = heads.start == 0 and heads.stop >= len(self.clusters.counts_HC)
        return ScoredClusters(
            self.clusters if every else self.clusters.heads(heads),
            self.logits_HTGC[heads, positions],
            self.queries_HTGD[heads, positions],
        )

    def remainder_bytes(self, moments: str, searched: bool) -> float:
        """Of a tree at most: what is not expanded is not read."""
        clusters = self.clusters
        arrays = [clusters.counts_HC, clusters.value_sums_HCD, None if searched else clusters.means_HCD]
        if moments != "none":
            arrays.append(clusters.variances_HCD)
        if moments == "full":
            arrays.append(clusters.covariances_HCDD)
        return float(sum(array[0].numel() * array.element_size() for array in arrays if array is not None))
