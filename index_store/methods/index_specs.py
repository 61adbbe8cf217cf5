"""The indexes that methods use, by name: kind and build parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from index_store.errors import InvalidArgumentError
from index_store.indexes.registry import INDEX_KINDS
from index_store.store.description.json_fields import Scalar


def _nothing() -> Mapping[str, Scalar]:
    return MappingProxyType({})


@dataclass(frozen=True)
class IndexSpec:
    """An index to build or to use.

    name: the folder under `index/` and the name in the manifest. kind: a key of INDEX_KINDS.
    parameters: what `LayerIndex.build` takes. stored: False for indexes that need nothing but the keys.
    """

    name: str
    kind: str
    parameters: Mapping[str, Scalar] = field(default_factory=_nothing)
    stored: bool = True

    def __post_init__(self) -> None:
        if self.kind not in INDEX_KINDS:
            raise InvalidArgumentError(
                f"index kind is {self.kind!r}, expected one of {', '.join(sorted(INDEX_KINDS))}",
                kind=self.kind,
            )

    def with_parameters(self, **overrides: Scalar | None) -> IndexSpec:
        """The same index with some build parameters replaced; overrides of None are ignored.

        Raises InvalidArgumentError for a parameter that the index does not know.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        unknown = sorted(set(given) - set(self.parameters))
        if unknown:
            raise InvalidArgumentError(
                f"index {self.name!r} has no parameter {', '.join(unknown)}; it has {', '.join(self.parameters)}"
            )
        return replace(self, parameters={**self.parameters, **given})


_TABLES: Mapping[str, Scalar] = {
    "layout": "dense",
    "subspaces": 16,
    "centroids": 32,
    "split": "strided",
    "scores": "dot",
    "alpha": 0.2,
    "iterations": 10,
}
_CLUSTERS: Mapping[str, Scalar] = {
    "keys_per_cluster": 16,
    "metric": "cosine",
    "block": 8192,
    "iterations": 10,
    "moments": "none",
    "window": 0,
    "sinks": 8,
}

_COARSE: Mapping[str, Scalar] = {
    "coding": "scalar",
    "key_bits": 4,
    "value_bits": 4,
    "value_group": 128,
    "iterations": 10,
}

INDEX_SPECS: Mapping[str, IndexSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            IndexSpec("exact", "exact", stored=False),
            IndexSpec("query_tables", "query_tables", _TABLES),
            IndexSpec(
                "paper_tables",
                "query_tables",
                {
                    **_TABLES,
                    "layout": "lists",
                    "subspaces": 8,
                    "centroids": 64,
                    "split": "contiguous",
                    "scores": "cosine",
                },
            ),
            IndexSpec("key_clusters", "key_clusters", _CLUSTERS),
            IndexSpec("windowed_clusters", "key_clusters", {**_CLUSTERS, "window": 4096}),
            IndexSpec("cluster_tree", "cluster_tree", {**_CLUSTERS, "keys_per_coarse": 100}),
            IndexSpec(
                "remainder_clusters",
                "key_clusters",
                {**_CLUSTERS, "metric": "euclidean", "moments": "diagonal"},
            ),
            IndexSpec(
                "dipole_clusters",
                "key_clusters",
                {**_CLUSTERS, "metric": "euclidean", "moments": "full", "keys_per_cluster": 32},
            ),
            IndexSpec("pages", "pages", {"size": 16}),
            IndexSpec(
                "product_codes",
                "product_codes",
                {"subspaces": 8, "bits": 8, "split": "strided", "iterations": 10},
            ),
            IndexSpec("coarse_rows", "coarse_rows", _COARSE),
            IndexSpec("coarse_rows_3", "coarse_rows", {**_COARSE, "key_bits": 3, "value_bits": 3}),
        )
    }
)
"""Every index that a method may name."""
