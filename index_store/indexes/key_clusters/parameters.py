"""Parameters of key clusters and of their tree, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.parameters import Parameters
from index_store.indexes.kmeans.first_centroids import METRICS

MOMENTS = ("none", "diagonal", "full")
"""What clusters keep beside mean keys and value sums: nothing, the keys' variances, also Cov(values, keys)."""


@dataclass(frozen=True)
class ClusterParameters(Parameters):
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
    allowed_moments: ClassVar[tuple[str, ...]] = MOMENTS

    def __post_init__(self) -> None:
        self._require_one_of("metric", METRICS)
        self._require_one_of("moments", self.allowed_moments)
        self._require_at_least(1, "keys_per_cluster", "iterations")
        self._require_at_least(0, "window", "sinks")
        if self.block != 0 and self.block < self.keys_per_cluster:
            raise InvalidArgumentError(
                f"{self.label}: block is {self.block}, expected 0 (all keys at once) or at least "
                f"keys_per_cluster, {self.keys_per_cluster}"
            )


@dataclass(frozen=True)
class TreeParameters(ClusterParameters):
    """Build parameters of a cluster tree: those of its fine clusters and keys_per_coarse, keys per coarse cluster.

    Covariances of values and keys are not kept: a coarse cluster's would need d^2 numbers of its own.
    """

    keys_per_coarse: int

    label: ClassVar[str] = "cluster tree"
    allowed_moments: ClassVar[tuple[str, ...]] = ("none", "diagonal")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys_per_coarse < self.keys_per_cluster:
            raise InvalidArgumentError(
                f"{self.label}: keys_per_coarse is {self.keys_per_coarse}, expected at least keys_per_cluster, "
                f"{self.keys_per_cluster}"
            )


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
