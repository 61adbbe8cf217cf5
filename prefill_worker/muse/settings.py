"""What MuSe is told: how finely queries and keys are clustered, and what is attended exactly."""

from __future__ import annotations

from dataclasses import dataclass

from index_store.errors import InvalidArgumentError

MOST_CLUSTERS = 128
"""Clusters that one program of a kernel holds at a time."""


@dataclass(frozen=True, slots=True)
class MuseSettings:
    """Settings of Multipole Semantic Attention.

    clusters: of the queries and of the keys of each range, C. query_clusters: of the queries alone, None for as many;
        1 leaves the two stages out (the paper's ablation). cap: largest cluster, in multiples of the mean one.
        iterations: of k-means, before the final assignment. block: tokens of a causal diagonal block, attended
        exactly. dipole: whether the covariance of keys and values counts. seed: of the first centroids.
    """

    clusters: int = 64
    query_clusters: int | None = None
    cap: float = 1.5
    iterations: int = 1
    block: int = 8192
    dipole: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("clusters", self.clusters, 1, MOST_CLUSTERS),
            ("query_clusters", self.clusters_of_queries, 1, MOST_CLUSTERS),
            ("cap", self.cap, 1.0, 64.0),
            ("iterations", self.iterations, 1, 100),
            ("block", self.block, 1, 2**30),
            ("seed", self.seed, 0, 2**62),
        ):
            if not least <= value <= most:
                raise InvalidArgumentError(f"MuSe's {name} is {value}, expected {least} to {most}")

    def describe(self) -> dict[str, int | float | bool]:
        """What decides the result, for a context's id and manifest."""
        names = ("block", "clusters", "cap", "iterations", "dipole")
        return {f"muse_{name}": getattr(self, name) for name in names}

    @property
    def clusters_of_queries(self) -> int:
        """How many clusters queries get."""
        return self.clusters if self.query_clusters is None else self.query_clusters
