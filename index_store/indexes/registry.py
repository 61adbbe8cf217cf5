"""All kinds of indexes, by the names that stored ones go by. No torch here: `classes` has what they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.parameters import CoarseKind
from index_store.indexes.interface.index_kind import BuildParameters, Growth, IndexKind, Parameters, grown
from index_store.indexes.key_clusters.parameters import ClusterKind, TreeKind
from index_store.indexes.query_tables.parameters import TableKind
from index_store.store.description.json_fields import Scalar

_BOUND_BYTES = 2  # of a page's bound in one dimension


@dataclass(frozen=True)
class ExactParameters(BuildParameters):
    """None: exact scores need nothing but the keys."""

    label: ClassVar[str] = "exact"

    def bytes_per_token(self, head_dim: int) -> float:
        return 0.0

    def appended_bytes(self, head_dim: int, growth: Growth) -> int:
        return 4 * head_dim * growth.appended


class ExactKind(IndexKind):
    """Exact scores of every key; stores nothing."""

    kind = "exact"
    parameters_type = ExactParameters

    @classmethod
    def check_options(cls, parameters: Mapping[str, Scalar], search: Mapping[str, Scalar]) -> None:
        if parameters or search:
            raise InvalidArgumentError(
                f"the exact index takes no parameters, got {sorted({**parameters, **search})}"
            )


@dataclass(frozen=True)
class PageParameters(BuildParameters):
    """Build parameters. size: keys per page."""

    size: int

    label: ClassVar[str] = "pages"

    def __post_init__(self) -> None:
        self._require_at_least(1, "size")

    def estimates_logits(self, search: Parameters | None) -> bool:
        return False

    def bytes_per_token(self, head_dim: int) -> float:
        return 2 * head_dim * _BOUND_BYTES / self.size

    def appended_bytes(self, head_dim: int, growth: Growth) -> int:
        return 2 * head_dim * _BOUND_BYTES * grown(-(-growth.appended // self.size))


class PageKind(IndexKind):
    """Pages of neighbouring keys."""

    kind = "pages"
    parameters_type = PageParameters


INDEX_KINDS: Mapping[str, type[IndexKind]] = MappingProxyType(
    {each.kind: each for each in (TableKind, ExactKind, ClusterKind, TreeKind, PageKind, CoarseKind)}
)
