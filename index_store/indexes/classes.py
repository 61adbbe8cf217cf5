"""The indexes themselves, by kind: what builds, stores and searches them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.indexes.key_clusters.index import ClusterTree, KeyClusters
from index_store.indexes.key_pages import Pages
from index_store.indexes.query_tables.index import QueryTables

INDEX_CLASSES: Mapping[str, type[LayerIndex]] = MappingProxyType(
    {each.kind: each for each in (QueryTables, ExactIndex, KeyClusters, ClusterTree, Pages, CoarseRows)}
)
