"""The kind of query tables, and its parameters: how they are built and how they are searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.index_kind import Growth, IndexKind, Parameters, SubspaceParameters, grown
from index_store.store.description.json_fields import Scalar

LEAST_ENTRIES = 16
"""Room for what is inserted into a list."""

WIDEST_SLICE = 8
"""Channels of a subspace that tables of few directions were found to suffice for (docs/methods.md)."""


@dataclass(frozen=True)
class TableParameters(SubspaceParameters):
    """Build parameters.

    layout: `dense` or `lists`. centroids: C of each of m subspaces. scores: `dot` keeps raw key slices, `cosine`
        normalises them. alpha: list capacity as a fraction of the keys.
    """

    layout: str
    centroids: int
    scores: str
    alpha: float

    label: ClassVar[str] = "query tables"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("layout", ("dense", "lists"))
        self._require_one_of("scores", ("dot", "cosine"))
        self._require_at_least(1, "centroids")
        if not 0.0 < self.alpha <= 1.0:
            raise InvalidArgumentError(f"query tables: alpha is {self.alpha}, expected above 0 and at most 1")

    def check_search(self, search: Parameters | None) -> None:
        if not isinstance(search, TableSearch):
            return
        if search.backoff_centroids > self.centroids:
            raise InvalidArgumentError(
                f"table search: backoff_centroids is {search.backoff_centroids}, expected 1 to {self.centroids}, the "
                "centroids of a subspace"
            )
        if self.layout == "lists" and search.group == "per_head" and search.weights == "uniform":
            raise InvalidArgumentError(
                "table search: with uniform weights a key that no list holds has no score, so there is nothing to "
                "take a softmax of; use group pooled or weights projection over lists"
            )

    def estimates_logits(self, search: Parameters | None) -> bool:
        return self.scores == "dot" and isinstance(search, TableSearch) and search.weights == "projection"

    def bytes_per_token(self, head_dim: int) -> float:
        rows = self.subspaces * self.centroids
        return float(rows) if self.layout == "dense" else 6.0 * rows * self.alpha

    def appended_bytes(self, head_dim: int, growth: Growth) -> int:
        rows = self.subspaces * self.centroids
        if self.layout == "dense":
            return rows * grown(growth.appended)
        # A list that takes every key holds as many as it may, and has room for those of the next append.
        new = min(growth.appended, growth.block)
        most = min(growth.appended - new, list_capacity(self, growth.keys)) + new
        return rows * (6 * max(LEAST_ENTRIES, grown(most, LEAST_ENTRIES)) + 8) if growth.appended else 0


@dataclass(frozen=True)
class TableSearch(Parameters):
    """Search options.

    group: `per_head` scores the keys for every head of the group, `pooled` once for their mean query.
    weights: `projection` weighs a subspace by max(0, q_b . c_b), `uniform` by 1 (CSAttention section 3.3 (3)).
    backoff_cosine, backoff_centroids: where the best cosine of a subspace is below the first, that many nearest
        centroids share its weight (CSAttention section 4.4). One centroid switches it off, whatever the cosine, which
        is 0 then.
    """

    group: str
    weights: str
    backoff_cosine: float = 0.0
    backoff_centroids: int = 1

    label: ClassVar[str] = "table search"

    def __post_init__(self) -> None:
        self._require_one_of("group", ("per_head", "pooled"))
        self._require_one_of("weights", ("projection", "uniform"))
        self._require_at_least(1, "backoff_centroids")
        if not 0.0 <= self.backoff_cosine <= 1.0:
            raise InvalidArgumentError(
                f"table search: backoff_cosine is {self.backoff_cosine}, expected a cosine from 0 to 1"
            )
        if self.backoff_centroids > 1 and self.weights == "projection":
            raise InvalidArgumentError(
                "table search: backoff shares a uniform weight between centroids; weights by projection already "
                "fall with the cosine, so the pair is refused"
            )
        if self.backoff_centroids == 1:
            object.__setattr__(self, "backoff_cosine", 0.0)


class TableKind(IndexKind):
    """Keys scored against centroids of the context's own queries."""

    kind = "query_tables"
    parameters_type = TableParameters
    search_type = TableSearch
    needs_queries = True

    @classmethod
    def misfit(cls, parameters: Mapping[str, Scalar], head_dim: int) -> str:
        built = TableParameters.parse(parameters)
        width = head_dim // built.subspaces
        if width <= WIDEST_SLICE:
            return ""
        return (
            f"{built.subspaces} subspaces cut heads of {head_dim} dimensions into slices of {width} channels, of which "
            f"{built.centroids} directions hold too little of a query; take a method that searches the keys themselves "
            f"(refined), or build the index with {head_dim // 4} subspaces"
        )


def list_capacity(parameters: TableParameters, count: int) -> int:
    """Keys that a list holds, of so many."""
    return max(1, math.ceil(parameters.alpha * count))
