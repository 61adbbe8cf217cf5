"""Parameters of query tables: how they are built and how they are searched, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.parameters import Parameters
from index_store.indexes.interface.subspaces import SubspaceParameters


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
