"""Key clusters: queries compared with the mean keys of clusters (Squeezed Attention sections 3.1-3.2).

Keys are clustered by k-means, block by block; a cluster's mean key stands for all of its keys, so the search reads one
vector where there are 16 keys or so, and a remainder can approximate the clusters that were not selected (Multipole
Attention section 3.2). Keys that arrive while decoding join clusters of the session's own.

Shape legend: H KV heads, T positions, G group heads, N keys, C clusters, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.layer_index import AppendedKeys, LayerIndex, LayerSource
from index_store.indexes.key_clusters.build import build_clusters
from index_store.indexes.key_clusters.online import OnlineClusters
from index_store.indexes.key_clusters.parameters import ClusterKind, ClusterParameters, ClusterSearch
from index_store.indexes.key_clusters.windowed_rope import move_queries
from index_store.selection.clustered_keys import ClusteredKeys, ScoredClusters
from index_store.selection.ranking import Items, Members, Ranking
from index_store.store.description.json_fields import Scalar


class KeyClusters(ClusterKind, LayerIndex):
    """Flat clusters of one layer's keys."""

    def __init__(self, parameters: ClusterParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(arrays, arrays["assignment"].shape[1])
        self._parameters = parameters
        self._members = Members(arrays["offsets"], arrays["members"])
        self._clusters = ClusteredKeys(
            arrays["counts"],
            arrays["means"],
            arrays["value_sums"],
            arrays["assignment"],
            variances_HCD=arrays.get("variances"),
            covariances_HCDD=arrays.get("covariances"),
        )
        self._frequencies_F = arrays["frequencies"][0] if parameters.window > 0 else None

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = cls.parameters_type.parse(parameters)
        return cls(parsed, build_clusters(parsed, source, seed))

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(cls.parameters_type.parse(parameters), arrays)

    def start_appending(self) -> OnlineClusters:
        heads, _, head_dim = self._clusters.means_HCD.shape
        return OnlineClusters(
            heads=heads,
            head_dim=head_dim,
            first_id=self.key_count,
            keys_per_cluster=self._parameters.keys_per_cluster,
            metric=self._parameters.metric,
            block=self._parameters.block,
            moments=self._parameters.moments,
            frequencies=self._frequencies_F,
            seed=0,
            device=self._clusters.means_HCD.device,
        )

    def _score(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        search: Mapping[str, Scalar],
        position: int | None,
    ) -> Ranking:
        own = self._own_clusters(appended)
        moved = self._moved(queries_HTGD, position)
        shared, vectors_read = self._search(moved, search)
        groups, scored = [self._members], [shared[0]]
        if own is not None:
            groups.append(own.members)
            scored.append(score_clusters(own.clusters, moved))
            vectors_read += own.clusters.counts_HC.shape[1]
        logits = torch.cat([piece.logits_HTGC for piece in scored], dim=-1)
        pieces = (*shared, *scored[1:])
        return Ranking(logits, Items(first_key, end_key, tuple(groups)), pieces, vectors_read)

    def pieces(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        position: int | None = None,
    ) -> tuple[ScoredClusters, ...]:
        own = self._own_clusters(appended)
        moved = self._moved(queries_HTGD, position)
        shared, _ = self._search(moved, {})
        return shared if own is None else (*shared, score_clusters(own.clusters, moved))

    def _search(
        self, queries_HTGD: Tensor, search: Mapping[str, Scalar]
    ) -> tuple[tuple[ScoredClusters, ...], float]:
        """The context's pieces, first that of the clusters whose members are listed, and the vectors read for them."""
        ClusterSearch.parse(search)
        return (score_clusters(self._clusters, queries_HTGD),), float(self._clusters.counts_HC.shape[1])

    def _own_clusters(self, appended: AppendedKeys | None) -> OnlineClusters | None:
        """The session's clusters, None when there are none yet."""
        own = self._own(appended, OnlineClusters)
        return own if own.count else None

    def _moved(self, queries_HTGD: Tensor, position: int | None) -> Tensor:
        if self._frequencies_F is None:
            return queries_HTGD
        if position is None:
            raise InvalidArgumentError(
                f"index kind {self.kind!r} with window {self._parameters.window} undoes the rotary embedding and "
                "needs the position of the first query"
            )
        return move_queries(queries_HTGD, position, self._parameters.window, self._frequencies_F)


def score_clusters(clusters: ClusteredKeys, queries_HTGD: Tensor) -> ScoredClusters:
    """Products of the queries with every cluster's mean key, -inf for empty clusters."""
    heads, positions, group, head_dim = queries_HTGD.shape
    flat = queries_HTGD.reshape(heads, positions * group, head_dim)
    logits = torch.bmm(flat, clusters.means_HCD.transpose(1, 2)).view(heads, positions, group, -1)
    logits.masked_fill_((clusters.counts_HC == 0)[:, None, None], -torch.inf)
    return ScoredClusters(clusters, logits, queries_HTGD)
