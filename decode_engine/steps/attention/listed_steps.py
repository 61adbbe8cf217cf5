"""The sequence of a captured step: search, attend to the keys that are listed, add the remainder, merge.

Shape legend: L layers, B rows of a batch, H KV heads, R = B * H, N keys of the longest context, G query heads per KV
head, d head dim, F fields of a record, X programs that attend to lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from decode_engine.kernels.attention.partials import Partials, merge_partials
from decode_engine.kernels.attention.sparse_attention import attend_lists, list_programs
from decode_engine.steps.attention.cluster_selection import ClusterMeans, ClusterSelection
from decode_engine.steps.attention.coarse_steps import CoarseOthers, CoarseSelection
from decode_engine.steps.attention.code_selection import CodeSelection
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from decode_engine.steps.attention.step_parts import (
    KeySelection,
    RowsInPlace,
    SideStream,
    StepRemainder,
    Turn,
)
from decode_engine.steps.attention.table_steps import TableSelection
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.product_codes.index import ProductCodes
from index_store.indexes.query_tables.index import QueryTables
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.selection.budgets import CENTRED, COARSE, MONOPOLE, Remainder
from index_store.store.description.manifest import Manifest

if TYPE_CHECKING:
    from decode_engine.layers.session import Session


class ListedSteps(StepAttention):
    """Searches by a `KeySelection`, attends to what it lists, and adds a `StepRemainder` unless the method drops it.

    What differs between methods and placements are the parts, by the kind of the index and of the remainder, and where
    rows are read. A remainder's launches run beside the search or beside what follows it, on a stream of their own, or
    are those of the search. Where a search can attend to everything itself, in one piece, it does.
    """

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = MappingProxyType(
        {
            KeyClusters.kind: ClusterSelection,
            QueryTables.kind: TableSelection,
            ProductCodes.kind: CodeSelection,
            CoarseRows.kind: CoarseSelection,
        }
    )
    remainder_types: ClassVar[Mapping[Remainder, type[StepRemainder]]] = MappingProxyType(
        {COARSE: CoarseOthers, MONOPOLE: ClusterMeans, CENTRED: ClusterMeans}
    )
    rows_type: ClassVar[type[RowsInPlace]] = RowsInPlace

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        method = plan.method
        self.rows = self.rows_type(plan)
        self.selection = search = self._selection_type(method)(plan)
        remainder_type = None if method.drops_remainder else self.remainder_types[method.remainder]
        self._remainder = None if remainder_type is None else remainder_type(plan, search, self.rows.in_place)
        self.attends_alone = self.rows.in_place and not plan.planes and search.attends_alone
        if self.attends_alone:
            programs, slots = search.lists.counts_RP.shape[1], search.slots
        else:
            programs = list_programs(plan.rows, search.lists)
            slots = programs + (0 if self._remainder is None else self._remainder.slots(programs))
        self._partials = Partials.allocate(plan.rows, slots, plan.group, plan.model.head_dim, plan.device)
        if self._remainder is not None:
            self._remainder.join(self._partials)
        # Where no launch joins lists there is no need of room for them.
        room = 0 if self.attends_alone else plan.max_keys
        self.joined_RN = torch.empty(plan.rows, room, dtype=torch.int32, device=plan.device)
        kept = (plan.model.layers, plan.rows, programs)
        self.kept_LRX = torch.zeros(kept, dtype=torch.int32, device=plan.device)
        self._side = SideStream(plan.device)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        if method.index is None or method.index.kind not in cls.selection_types:
            return "there are no kernels that search its index for lists of keys"
        if not method.drops_remainder:
            remainder = cls.remainder_types.get(method.remainder)
            if remainder is None:
                return (
                    f"its remainder, {method.remainder.name}, reads d x d numbers per cluster, which is more than the "
                    "keys"
                )
            refusal = remainder.refusal(method, manifest)
            if refusal is not None:
                return refusal
        return cls._selection_type(method).refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int, lane: int = 0) -> Mapping[int, int]:
        remainder = None if method.drops_remainder else cls.remainder_types[method.remainder]
        # Rows first: they refuse contexts that nothing here can read.
        return {
            **cls.rows_type.fields(context, layer, lane),
            **cls._selection_type(method).fields(context, method, layer),
            **({} if remainder is None else remainder.fields(context, method, layer)),
        }

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        remainder, sinks_HG = self._remainder, self.plan.sink_HG(layer)
        if self.attends_alone:
            return self.selection.attend_all(q_BHGD, records_BF, self.kept_LRX[layer], sinks_HG)
        turn = Turn.IN_SEARCH if remainder is None else remainder.turn
        self._attend_remainder(Turn.BESIDE_SEARCH, q_BHGD, records_BF)
        lists = self.selection.ask(layer, q_BHGD, records_BF)
        self._attend_remainder(Turn.AFTER_SEARCH, q_BHGD, records_BF)
        locations_RN = self.rows.locate(layer, records_BF, self.selection, lists, self.joined_RN)
        if turn is Turn.BESIDE_SEARCH:
            self._side.join()
        attend_lists(
            q_BHGD.flatten(0, 1),
            records_BF,
            lists,
            self.joined_RN,
            self._partials,
            q_BHGD.shape[3] ** -0.5,
            first_slot=0 if remainder is None else remainder.splits,
            kept_RX=self.kept_LRX[layer],
            take_out=None if remainder is None else remainder.take_out,
            locations_RN=locations_RN,
            planes=self.plan.planes,
        )
        if turn is Turn.AFTER_SEARCH:
            self._side.join()
        if remainder is not None:
            remainder.correct(q_BHGD, records_BF, lists, self.joined_RN, self._partials, locations_RN)
        return merge_partials(self._partials, q_BHGD.dtype, sinks_HG)[0].view_as(q_BHGD)

    def _attend_remainder(self, turn: Turn, q_BHGD: Tensor, records_BF: Tensor) -> None:
        """On a stream of its own, if it is its turn."""
        remainder = self._remainder
        if remainder is not None and remainder.turn is turn:
            with self._side.follow():
                remainder.attend(q_BHGD, records_BF, self._partials)

    def begin(self, sessions: Mapping[int, Session]) -> int:
        return self.selection.begin(sessions)

    def end(self) -> int:
        return self.selection.end()

    def kept_B(self) -> Tensor:
        return self.kept_LRX.view(len(self.kept_LRX), self.plan.size, -1).sum((0, 2))

    def fetched_B2(self) -> Tensor | None:
        return self.rows.found_B2()

    @classmethod
    def _selection_type(cls, method: Method) -> type[KeySelection]:
        return cls.selection_types["" if method.index is None else method.index.kind]
