"""Attention to lists of keys on a GPU, whoever selected them, and a remainder over a partition or a coarse copy.

Shape legend: L layers, B rows of a batch, H KV heads, R = B * H, N keys of the longest context, G query heads per KV
head, d head dim, F fields of a record, X programs that attend to lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.partials import Partials, merge_partials
from decode_engine.kernels.attention.sparse_attention import (
    MONOPOLE as WITHOUT_SUMS,
)
from decode_engine.kernels.attention.sparse_attention import (
    SUMS,
    ClusterScores,
    TakeOut,
    attend_lists,
    list_programs,
)
from decode_engine.kernels.clusters.lookup import look_up, lookup_slots
from decode_engine.kernels.clusters.remainder import correct_clusters
from decode_engine.steps.attention.cluster_selection import (
    ClusterSelection,
    cluster_refusal,
    cluster_width,
    device_clusters,
)
from decode_engine.steps.attention.coarse_steps import CoarseRemainder, CoarseSelection, coarse_refusal
from decode_engine.steps.attention.code_selection import CodeSelection
from decode_engine.steps.attention.step_attention import (
    KeySelection,
    SideStream,
    StepAttention,
    StepPlan,
    StepRemainder,
    Turn,
)
from decode_engine.steps.attention.table_steps import TableSelection
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.product_codes.index import ProductCodes
from index_store.indexes.query_tables.index import QueryTables
from index_store.memory.resident import ResidentContext
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import Method
from index_store.selection.remainders import CENTRED, COARSE, MONOPOLE
from index_store.store.description.manifest import Manifest


class ListedSteps(StepAttention):
    """Searches by a `KeySelection`, attends to what it lists, and adds a remainder over the method's partition.

    A remainder over clusters attends to all of them as their means, whatever is selected; what is attended exactly is
    taken out of the clusters afterwards. Where the search compares queries with these very means (Multipole Attention,
    sections 3.1-3.2), one launch does both. Else the remainder's runs beside the search, on a stream of its own.
    One over a coarse copy attends to the keys that were not listed after the others are, beside their fetch. Where that
    launch can do everything else as well (`CoarseSelection.attends_alone`), it does, unless rows are in two planes,
    which it does not read.
    """

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = MappingProxyType(
        {
            KeyClusters.kind: ClusterSelection,
            QueryTables.kind: TableSelection,
            ProductCodes.kind: CodeSelection,
            CoarseRows.kind: CoarseSelection,
        }
    )
    """Searches by the kind of the index."""

    joins_lookups: ClassVar[bool] = True
    """Whether search and remainder share a launch where they look at the same clusters."""

    rows_in_place: ClassVar[bool] = True
    """Whether all rows are read where the context has them."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.selection = self._selection_type(plan.method)(plan)
        sharing = self._sharing_search()
        self._remainder = None if plan.method.drops_remainder else self._make_remainder(sharing is not None)
        in_place = sharing if self.rows_in_place and not plan.planes else None
        self._alone = in_place if isinstance(in_place, CoarseSelection) and in_place.attends_alone else None
        programs = list_programs(plan.rows, self.selection.lists)
        slots = programs + (0 if self._remainder is None else self._remainder.slots(programs))
        if self._alone is not None:
            programs, slots = self._alone.lists.counts_RP.shape[1], self._alone.slots
        self._partials = Partials.allocate(plan.rows, slots, plan.group, plan.model.head_dim, plan.device)
        if sharing is not None:
            sharing.attend_too(self._partials)
        # Where no launch joins lists there is no need of room for them.
        self.joined_RN = joined_lists(plan, 0 if self._alone is not None else plan.max_keys)
        kept = (plan.model.layers, plan.rows, programs)
        self._kept_LRX = torch.zeros(kept, dtype=torch.int32, device=plan.device)
        self._side = SideStream(plan.device)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        spec = method.index
        if spec is None or spec.kind not in cls.selection_types:
            return "there are no kernels that search its index for lists of keys"
        if not method.drops_remainder:
            partition = _partition(method)
            if method.remainder is COARSE:
                return coarse_refusal(method, manifest)
            if method.remainder not in (MONOPOLE, CENTRED):
                return (
                    f"its remainder, {method.remainder.name}, reads d x d numbers per cluster, which is more than the "
                    "keys"
                )
            if partition is None or partition.kind != KeyClusters.kind:
                return "its remainder is over a tree of clusters"
            if partition.kind == spec.kind and partition.name != spec.name:
                return "it searches other clusters than its remainder is over"
            refusal = cluster_refusal(partition, manifest)
            if refusal is not None:
                return refusal
        return cls.selection_types[spec.kind].refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        fields = dict(cls._selection_type(method).fields(context, method, layer))
        partition = _partition(method)
        if partition is not None and partition.kind == KeyClusters.kind and not method.drops_remainder:
            fields |= device_clusters(context, partition, layer).fields()
        return fields

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        if self._alone is not None:
            self._alone.attend_all(q_BHGD, records_BF, self._kept_LRX[layer], self._partials)
            return merge_partials(self._partials, q_BHGD.dtype, self.plan.sink_HG(layer))[0].view_as(q_BHGD)
        q_RGD, scale, remainder = q_BHGD.flatten(0, 1), q_BHGD.shape[3] ** -0.5, self._remainder
        turn = Turn.IN_SEARCH if remainder is None else remainder.turn
        self._attend_remainder(Turn.BESIDE_SEARCH, q_BHGD, records_BF)
        lists, locations_RN = self.find(layer, q_BHGD, records_BF)
        if turn is Turn.BESIDE_SEARCH:
            self._side.join()
        attend_lists(
            q_RGD,
            records_BF,
            lists,
            self.joined_RN,
            self._partials,
            scale,
            first_slot=0 if remainder is None else remainder.splits,
            kept_RX=self._kept_LRX[layer],
            take_out=None if remainder is None else remainder.take_out,
            locations_RN=locations_RN,
            planes=self.plan.planes,
        )
        if turn is Turn.AFTER_SEARCH:
            self._side.join()
        if remainder is not None:
            remainder.correct(q_BHGD, records_BF, lists, self.joined_RN, self._partials, locations_RN)
        return merge_partials(self._partials, q_BHGD.dtype, self.plan.sink_HG(layer))[0].view_as(q_BHGD)

    def find(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> tuple[KeyLists, Tensor | None]:
        """The keys to attend to, and where their rows lie, [R, N] int32 (`slot_fetch.fetch_rows`).

        None for the locations: all are where the context is.
        """
        return self.search(layer, q_BHGD, records_BF), None

    def search(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        """The keys to attend to. A remainder that can follow does so, beside what comes next."""
        lists = self.selection.select(layer, q_BHGD, records_BF)
        self._attend_remainder(Turn.AFTER_SEARCH, q_BHGD, records_BF)
        return lists

    def _attend_remainder(self, turn: Turn, q_BHGD: Tensor, records_BF: Tensor) -> None:
        """On a stream of its own, if it is its turn."""
        remainder = self._remainder
        if remainder is not None and remainder.turn is turn:
            with self._side.follow():
                remainder.attend(q_BHGD, records_BF, self._partials)

    def kept_B(self) -> Tensor:
        return self._kept_LRX.view(len(self._kept_LRX), self.plan.size, -1).sum((0, 2))

    @classmethod
    def _selection_type(cls, method: Method) -> type[KeySelection]:
        return cls.selection_types["" if method.index is None else method.index.kind]

    def _sharing_search(self) -> ClusterSelection | CoarseSelection | None:
        """The search, where it looks up the very clusters or rows that the remainder attends to."""
        method, search = self.plan.method, self.selection
        if method.partition is not None:
            return None
        if isinstance(search, ClusterSelection):
            return search if self.joins_lookups and method.remainder is MONOPOLE else None
        return search if isinstance(search, CoarseSelection) and not method.drops_remainder else None

    def _make_remainder(self, shared: bool) -> StepRemainder:
        """shared: the search's launches attend to what it is over."""
        if isinstance(self.selection, CoarseSelection):
            return CoarseRemainder(self.selection)
        searched = self.selection.scores if shared and isinstance(self.selection, ClusterSelection) else None
        return _Clusters(self.plan, searched)


class _Clusters(StepRemainder):
    """All clusters of the partition as their means; what is taken out of them."""

    def __init__(self, plan: StepPlan, searched: ClusterScores | None) -> None:
        """searched: what the search's own lookup fills, which is then the remainder's, too."""
        centred = plan.method.remainder is CENTRED
        width = cluster_width(plan, _partition(plan.method))
        self.turn = Turn.BESIDE_SEARCH if searched is None else Turn.IN_SEARCH
        self._scores = searched or ClusterScores.allocate(plan.rows, width, plan.group, centred, plan.device)
        self.take_out = TakeOut(self._scores, SUMS if centred else WITHOUT_SUMS)
        self.splits = lookup_slots(plan.rows, width)
        self._corrects, self._planes = centred, plan.planes

    def slots(self, programs: int) -> int:
        return self.splits + (programs if self._corrects else 0)

    def attend(self, q_BHGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        look_up(q_BHGD.flatten(0, 1), records_BF, self._scores, partials, q_BHGD.shape[3] ** -0.5)

    def correct(
        self,
        q_BHGD: Tensor,
        records_BF: Tensor,
        lists: KeyLists,
        joined_RN: Tensor,
        partials: Partials,
        locations_RN: Tensor | None,
    ) -> None:
        if self._corrects:
            q_RGD = q_BHGD.flatten(0, 1)
            first_slot = self.splits + list_programs(len(q_RGD), lists)
            correct_clusters(
                q_RGD,
                records_BF,
                lists,
                joined_RN,
                self._scores,
                partials,
                first_slot,
                locations_RN,
                self._planes,
            )


def joined_lists(plan: StepPlan, keys: int) -> Tensor:
    """[R, N] int32, for `attend_lists` to fill."""
    return torch.empty(plan.rows, keys, dtype=torch.int32, device=plan.device)


def _partition(method: Method) -> IndexSpec | None:
    return method.index if method.partition is None else method.partition
