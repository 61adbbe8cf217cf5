"""Query tables on a GPU: search and attention in three launches and a merge, or lists of keys for other attention.

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
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from index_store.errors import MethodUnsupportedError
from index_store.indexes.query_tables.parameters import TableParameters, TableSearch
from index_store.indexes.row_planes.two_planes import TwoPlanes
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.dtypes import INT8
from index_store.store.description.manifest import Manifest


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Parameters and options of a method over query tables."""

    parameters: TableParameters
    search: TableSearch

    @classmethod
    def of(cls, method: Method) -> TableOptions | None:
        """None for a method that searches something else."""
        if method.index is None or method.index.kind != "query_tables":
            return None
        return cls(TableParameters.parse(method.index.parameters), TableSearch.parse(method.search))

    @classmethod
    def required(cls, method: Method) -> TableOptions:
        found = cls.of(method)
        if found is None:
            raise MethodUnsupportedError(
                f"method {method.name!r} has no query tables to search", method=method.name
            )
        return found

    def refusal(self, readers: str) -> str | None:
        """Why those readers cannot search such tables, as a clause; None when they can."""
        if self.parameters.layout != "dense":
            return f"its query tables are {self.parameters.layout}; {readers} read dense ones"
        if self.search.weights != "projection":
            return f"its tables are weighted {self.search.weights}; {readers} weigh by projection"
        return None


def table_refusal(method: Method, manifest: Manifest) -> str | None:
    """Why kernels cannot search the method's query tables, as a clause; None when they can."""
    tables = TableOptions.of(method)
    if tables is None:
        return "it searches no query tables"
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


def table_fields(context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
    """What a layer's record says about the context's query tables.

    Kernels read rows in blocks: where rows do not begin at multiples of such, a copy that does is made and kept.
    """
    if method.index is None:
        raise MethodUnsupportedError(f"method {method.name!r} searches nothing", method=method.name)
    name = method.index.name
    arrays = context.index(name, layer).arrays()
    scores_HMCN = arrays["scores"]
    if not has_padded_rows(scores_HMCN):
        scores_HMCN = context.derived((padded_rows, name, layer), lambda: padded_rows(scores_HMCN))
    rows = context.rows(layer)
    if isinstance(rows, TwoPlanes):  # of which tables ask for no more than the shape
        rows = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
    return TableContext(rows, scores_HMCN, arrays["centroids"], arrays["scales"]).fields()


class TableBuffers:
    """What searching query tables takes: a plan for the kernels, and buffers."""

    def __init__(self, plan: StepPlan) -> None:
        tables = TableOptions.required(plan.method)
        pooled = tables.search.group == "pooled"
        self.plan = TableSizes(
            plan.model.kv_heads,
            plan.group,
            plan.model.head_dim,
            tables.parameters.subspaces,
            tables.parameters.centroids,
            plan.max_keys,
            pooled,
            strided=tables.parameters.split == "strided",
            shape=table_shape(plan.max_keys, plan.rows),
        )
        self.work = TableWork.make(self.plan, plan.size, plan.device)


class TableSteps(StepAttention):
    """Search and attention fused: the keys that a program finds it attends to. What is not selected is dropped."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.buffers = TableBuffers(plan)
        self.counts_LBHP = self.buffers.work.counts().repeat(plan.model.layers, 1, 1, 1)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        if not method.drops_remainder:
            return f"its remainder is {method.remainder.name!r}; this attention drops it"
        if manifest.rows == INT8 and not QUERY_TABLES.planes:
            return "the context has rows in 8 bits; this attention reads them in one piece"
        return table_refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return table_fields(context, method, layer)

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        plan, work = self.buffers.plan, self.buffers.work
        sink_HG = self.plan.sink_HG(layer)
        return table_attention(q_BHGD, records_BF, plan, work, self.counts_LBHP[layer], sink_HG)[0]

    def kept_B(self) -> Tensor:
        return self.counts_LBHP.sum((0, 2, 3), dtype=torch.int64)


class TableSelection(KeySelection):
    """Search alone: one segment of keys for every tile of the context."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self._buffers = TableBuffers(plan)
        work = self._buffers.work
        self.lists = KeyLists(work.ids.flatten(0, 1), work.counts().flatten(0, 1))

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return table_refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return table_fields(context, method, layer)

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        counts_BHP = self.lists.counts_RP.view(self._buffers.work.ids.shape[:3])
        select(q_BHGD, records_BF, self._buffers.plan, self._buffers.work, counts_BHP)
        return self.lists
