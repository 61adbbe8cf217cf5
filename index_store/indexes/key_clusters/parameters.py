"""The kinds of key clusters and of their tree, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.index_kind import BuildParameters, Growth, IndexKind, Parameters, grown
from index_store.indexes.interface.retired import why_retired
from index_store.selection.budgets import CLUSTERS, MOMENTS


@dataclass(frozen=True)
class ClusterParameters(BuildParameters):
    """Build parameters of key clusters.

    keys_per_cluster: on average. metric: k-means of directions (`cosine`) or of the keys as they are (`euclidean`).
    block: keys are clustered in blocks of that many consecutive keys, the last one of half to one and a half as many;
        0 clusters all keys at once. iterations: of k-means. moments: one of MOMENTS.
    window: 0 compares queries and keys as they are; otherwise windowed RoPE, keys as if at position 0 and queries as
        if that many tokens later. sinks: the first keys, left out of all clusters.
    """

    keys_per_cluster: int
    metric: str
    block: int
    iterations: int
    moments: str
    window: int
    sinks: int

    label: ClassVar[str] = "key clusters"

    def __post_init__(self) -> None:
        self._require_one_of("metric", ("cosine", "euclidean"))
        if (retired := why_retired("key_clusters", {"moments": self.moments})) is not None:
            raise InvalidArgumentError(retired)
        self._require_one_of("moments", MOMENTS)
        self._require_at_least(1, "keys_per_cluster", "iterations")
        self._require_at_least(0, "window", "sinks")
        if self.block != 0 and self.block < self.keys_per_cluster:
            raise InvalidArgumentError(
                f"{self.label}: block is {self.block}, expected 0 (all keys at once) or at least "
                f"keys_per_cluster, {self.keys_per_cluster}"
            )

    def bytes_per_token(self, head_dim: int) -> float:
        vectors = 2 + MOMENTS.index(self.moments)
        counts_and_offsets, members_and_assignment = 8, 8
        return (4 * vectors * head_dim + counts_and_offsets) / self.keys_per_cluster + members_and_assignment

    def appended_bytes(self, head_dim: int, growth: Growth) -> int:
        return online_bytes(head_dim, self.keys_per_cluster, self.block, self.moments, growth.appended)


@dataclass(frozen=True)
class TreeParameters(ClusterParameters):
    """Build parameters of a cluster tree: those of its fine clusters and keys_per_coarse, keys per coarse cluster."""

    keys_per_coarse: int

    label: ClassVar[str] = "cluster tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys_per_coarse < self.keys_per_cluster:
            raise InvalidArgumentError(
                f"{self.label}: keys_per_coarse is {self.keys_per_coarse}, expected at least keys_per_cluster, "
                f"{self.keys_per_cluster}"
            )

    def bytes_per_token(self, head_dim: int) -> float:
        vectors = 2 + MOMENTS.index(self.moments)
        parents, coarse = 4 / self.keys_per_cluster, (4 * vectors * head_dim + 8) / self.keys_per_coarse
        return super().bytes_per_token(head_dim) + parents + coarse


@dataclass(frozen=True)
class ClusterSearch(Parameters):
    """Search options of key clusters: none."""

    label: ClassVar[str] = "key cluster search"


@dataclass(frozen=True)
class TreeSearch(ClusterSearch):
    """Search options of a cluster tree.

    coarse_keep: coarse clusters are expanded, best first, until they hold that share of the keys.
    """

    coarse_keep: float = 0.5

    label: ClassVar[str] = "cluster tree search"

    def __post_init__(self) -> None:
        if not 0.0 < self.coarse_keep <= 1.0:
            raise InvalidArgumentError(
                f"{self.label}: coarse_keep is {self.coarse_keep}, expected above 0 and at most 1"
            )


class ClusterKind(IndexKind):
    """Clusters of keys."""

    kind = "key_clusters"
    divides_into = CLUSTERS
    parameters_type: ClassVar[type[ClusterParameters]] = ClusterParameters
    search_type = ClusterSearch


class TreeKind(ClusterKind):
    """Clusters of keys under coarser ones."""

    kind = "cluster_tree"
    parameters_type = TreeParameters
    search_type = TreeSearch


def online_bytes(head_dim: int, keys_per_cluster: int, block: int, moments: str, keys: int) -> int:
    """`OnlineClusters.nbytes` of one KV head after so many keys."""
    if keys == 0:
        return 0
    limit = most_open(block)
    splits = 0 if limit is None or keys < limit else 1 + (keys - limit) // block
    open_keys = keys - splits * block
    clusters_in = [-(-part // keys_per_cluster) for part in (block, open_keys)]
    clusters = splits * clusters_in[0] + clusters_in[1]
    longest, most_clusters = open_keys, clusters
    if limit is not None and splits:  # before the last split all of its keys were one block
        longest = limit
        most_clusters = max(clusters, (splits - 1) * clusters_in[0] - (-(limit - 1) // keys_per_cluster))
    held = 2 * 4 * head_dim * grown(longest, limit=limit)  # keys and values of the open block
    held += 4 * (grown(keys) + grown(splits * block))  # clusters of keys, and members of closed blocks
    vectors = 2 + MOMENTS.index(moments)
    held += 4 * (1 + vectors * head_dim) * grown(most_clusters)
    return held + 8 * open_keys + 4 * (clusters + 1 + keys)  # clusters of the open block, and members of all


def most_open(block: int) -> int | None:
    """Keys of the open block with which it is split; None where it never is."""
    return block + max(1, block // 2) if block else None
