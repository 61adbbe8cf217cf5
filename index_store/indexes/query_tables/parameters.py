"""Parameters of query tables: how they are built and how they are searched, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.parameter_types import typed_parameters
from index_store.indexes.interface.subspaces import subspace_dims
from index_store.store.json_fields import Scalar


@dataclass(frozen=True, slots=True)
class TableParameters:
    """Build parameters.

    layout: `dense` or `lists`. subspaces, centroids: m and C. split: dimensions of subspace b are those with
        i mod m = b (`strided`) or a slice (`contiguous`). scores: `dot` keeps raw key slices, `cosine` normalises
        them. alpha: list capacity as a fraction of the keys. iterations: of k-means.
    """

    layout: str
    subspaces: int
    centroids: int
    split: str
    scores: str
    alpha: float
    iterations: int

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("layout", self.layout, ("dense", "lists")),
            ("split", self.split, ("strided", "contiguous")),
            ("scores", self.scores, ("dot", "cosine")),
        ):
            if value not in allowed:
                raise InvalidArgumentError(
                    f"query tables: {name} is {value!r}, expected one of {', '.join(allowed)}"
                )
        for name, number in (
            ("subspaces", self.subspaces),
            ("centroids", self.centroids),
            ("iterations", self.iterations),
        ):
            if number < 1:
                raise InvalidArgumentError(f"query tables: {name} is {number}, expected at least 1")
        if not 0.0 < self.alpha <= 1.0:
            raise InvalidArgumentError(f"query tables: alpha is {self.alpha}, expected above 0 and at most 1")

    @classmethod
    def parse(cls, parameters: Mapping[str, Scalar]) -> Self:
        """Raises InvalidArgumentError for a missing, unknown, ill-typed or out-of-range parameter."""
        return cls(**typed_parameters(parameters, cls, "query tables"))

    def dims(self, head_dim: int) -> Tensor:
        """[m, B] int64: the dimensions of each subspace."""
        return subspace_dims(head_dim, self.subspaces, self.split)


@dataclass(frozen=True, slots=True)
class TableSearch:
    """Search options.

    group: `per_head` scores the keys for every head of the group, `pooled` once for their mean query.
    weights: `projection` weighs a subspace by max(0, q_b . c_b), `uniform` by 1 (CSAttention section 3.3 (3)).
    backoff_cosine, backoff_centroids: where the best cosine of a subspace is below the first, that many nearest
        centroids share its weight (CSAttention section 4.4); 0 and 1 switch it off.
    """

    group: str
    weights: str
    backoff_cosine: float = 0.0
    backoff_centroids: int = 1

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("group", self.group, ("per_head", "pooled")),
            ("weights", self.weights, ("projection", "uniform")),
        ):
            if value not in allowed:
                raise InvalidArgumentError(
                    f"table search: {name} is {value!r}, expected one of {', '.join(allowed)}"
                )
        if self.backoff_centroids < 1 or not 0.0 <= self.backoff_cosine <= 1.0:
            raise InvalidArgumentError(
                f"table search: backoff to {self.backoff_centroids} centroids below cosine {self.backoff_cosine}; "
                "expected at least 1 centroid and a cosine from 0 to 1"
            )
        if self.backoff_centroids > 1 and self.weights == "projection":
            raise InvalidArgumentError(
                "table search: backoff shares a uniform weight between centroids; weights by projection already "
                "fall with the cosine, so the pair is refused"
            )

    @classmethod
    def parse(cls, search: Mapping[str, Scalar]) -> Self:
        """Raises InvalidArgumentError for a missing, unknown, ill-typed or out-of-range option."""
        return cls(**typed_parameters(search, cls, "table search"))
