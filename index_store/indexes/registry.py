"""All kinds of indexes, by the names that stored ones go by. No torch here: `classes` has what they do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from index_store.indexes.coarse_rows.parameters import CoarseKind
from index_store.indexes.interface.index_kind import IndexKind
from index_store.indexes.key_clusters.parameters import ClusterKind, TreeKind
from index_store.indexes.plain_kinds import ExactKind, PageKind
from index_store.indexes.product_codes.parameters import CodeKind
from index_store.indexes.query_tables.parameters import TableKind

INDEX_KINDS: Mapping[str, type[IndexKind]] = MappingProxyType(
    {
        each.kind: each
        for each in (TableKind, ExactKind, ClusterKind, TreeKind, PageKind, CodeKind, CoarseKind)
    }
)
