"""Query tables on a GPU: a search that lists keys, or attends to what it finds in three launches and a merge.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record, L
layers of the model, P tiles of a context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.families import QUERY_TABLES
from decode_engine.kernels.tables.selection import select
from decode_engine.kernels.tables.sizes import (
    TableSizes,
    TableWork,
    table_shape,
)
from decode_engine.kernels.tables.table_attention import table_attention
from decode_engine.kernels.tables.table_context import TableContext, has_padded_rows, padded_rows
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_parts import KeySelection
from index_store.indexes.coarse_rows.two_planes import TwoPlanes
from index_store.indexes.query_tables.index import QueryTables
from index_store.indexes.query_tables.parameters import TableParameters, TableSearch
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.store.description.manifest import Manifest


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Parameters and options of a method over query tables."""

    parameters: TableParameters
    search: TableSearch

    @classmethod
    def of(cls, spec: IndexSpec, method: Method) -> TableOptions:
        return cls(TableParameters.parse(spec.parameters), TableSearch.parse(method.search))

    def refusal(self, readers: str) -> str | None:
        """Why those readers cannot search such tables, as a clause; None when they can."""
        if self.parameters.layout != "dense":
            return f"its query tables are {self.parameters.layout}; {readers} read dense ones"
        if self.search.weights != "projection":
            return f"its tables are weighted {self.search.weights}; {readers} weigh by projection"
        return None


class TableSelection(KeySelection):
    """Search of query tables: one segment of keys for every tile of the context.

    The keys that a program finds it can attend to at once. What is not selected is dropped then.
    """

    kind, what = QueryTables.kind, "query tables"

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        tables = TableOptions.of(self.searched(plan.method), plan.method)
        self.sizes = TableSizes(
            plan.model.kv_heads,
            plan.group,
            plan.model.head_dim,
            tables.parameters.subspaces,
            tables.parameters.centroids,
            plan.max_keys,
            tables.search.group == "pooled",
            strided=tables.parameters.split == "strided",
            shape=table_shape(plan.max_keys, plan.rows),
        )
        self.work = TableWork.make(self.sizes, plan.size, plan.device)
        self.lists = KeyLists(self.work.ids.flatten(0, 1), self.work.counts().flatten(0, 1))

    @property
    def attends_alone(self) -> bool:
        return self.plan.method.drops_remainder

    @classmethod
    def index_refusal(cls, spec: IndexSpec, method: Method, manifest: Manifest) -> str | None:
        tables = TableOptions.of(spec, method)
        refusal = tables.refusal("kernels")
        if refusal is not None:
            return refusal
        model = manifest.model
        return QUERY_TABLES.refusal(
            model.query_heads // model.kv_heads,
            model.head_dim,
            manifest.token_count,
            (tables.parameters.subspaces, tables.parameters.centroids),
        )

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """Where rows do not begin at multiples of the blocks that kernels read, a copy that does is made and kept."""
        name = cls.searched(method).name
        arrays = context.index(name, layer).arrays()
        scores_HMCN = arrays["scores"]
        if not has_padded_rows(scores_HMCN):
            scores_HMCN = context.derived((padded_rows, name, layer), lambda: padded_rows(scores_HMCN))
        rows = context.rows(layer)
        if isinstance(rows, TwoPlanes):  # of which tables ask for no more than the shape
            rows = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
        return TableContext(rows, scores_HMCN, arrays["centroids"], arrays["scales"]).fields()

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        select(q_BHGD, records_BF, self.sizes, self.work, self._by_tile(self.lists.counts_RP))
        return self.lists

    def attend_all(
        self, q_BHGD: Tensor, records_BF: Tensor, kept_RX: Tensor, sink_HG: Tensor | None
    ) -> Tensor:
        counts_BHP = self._by_tile(kept_RX)
        return table_attention(q_BHGD, records_BF, self.sizes, self.work, counts_BHP, sink_HG)[0]

    def _by_tile(self, counts_RP: Tensor) -> Tensor:
        return counts_RP.view(self.work.ids.shape[:3])
