"""The one list of index kinds. A stored index names its kind; this maps the name to its class."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.indexes.key_clusters.cluster_tree import ClusterTree
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.key_pages import Pages
from index_store.indexes.product_codes.index import ProductCodes
from index_store.indexes.query_tables.index import QueryTables

INDEX_KINDS: Mapping[str, type[LayerIndex]] = MappingProxyType(
    {
        index.kind: index
        for index in (QueryTables, ExactIndex, KeyClusters, ClusterTree, Pages, ProductCodes, CoarseRows)
    }
)
