"""Attention to lists of keys on a GPU, whoever selected them, and a remainder over a partition.

Shape legend: L layers, B rows of a batch, H KV heads, R = B * H, G query heads per KV head, d head dim, F fields of a
record, X programs that attend to lists.
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
    MONOPOLE,
    SUMS,
    ClusterScores,
    TakeOut,
    attend_lists,
    list_programs,
)
from decode_engine.kernels.clusters.lookup import look_up, lookup_slots
from decode_engine.kernels.clusters.remainder import correct_clusters
from decode_engine.steps.attention.cluster_steps import (
    ClusterSelection,
    cluster_width,
    device_clusters,
    joined_lists,
    kept_counts,
    sum_kept,
    window_refusal,
)
from decode_engine.steps.attention.code_steps import CodeSelection
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from decode_engine.steps.attention.table_steps import TableSelection
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.product_codes.index import ProductCodes
from index_store.indexes.query_tables.index import QueryTables
from index_store.memory.resident import ResidentContext
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import Method
from index_store.selection.remainders import Centred, Dipole, Monopole
from index_store.store.manifest import Manifest


class ListedSteps(StepAttention):
    """Searches by a `KeySelection`, attends to what it lists, and adds a remainder over the method's partition.

    The remainder attends to all clusters whatever is selected, so it runs on a second stream beside the search. What
    was attended exactly is taken out of the clusters afterwards.
    """

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = MappingProxyType(
        {
            KeyClusters.kind: ClusterSelection,
            QueryTables.kind: TableSelection,
            ProductCodes.kind: CodeSelection,
        }
    )
    """Searches by the kind of the index."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.selection = self._selection_type(plan.method)(plan)
        self._remainder = None if plan.method.drops_remainder else _Remainder(plan)
        on_gpu = plan.device.type == "cuda"
        self._beside = torch.cuda.Stream(plan.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._made: _Buffers | None = None

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        spec = method.index
        if spec is None or spec.kind not in cls.selection_types:
            return "there are no kernels that search its index for lists of keys"
        if not method.drops_remainder:
            partition = _partition(method)
            if not isinstance(method.remainder, Monopole | Centred) or isinstance(method.remainder, Dipole):
                return (
                    f"its remainder, {method.remainder.name}, reads d x d numbers per cluster, which is more than the "
                    "keys"
                )
            if partition is None or partition.kind != KeyClusters.kind:
                return "its remainder is over a tree of clusters"
            if partition.kind == spec.kind and partition.name != spec.name:
                return "it searches other clusters than its remainder is over"
            refusal = window_refusal(partition)
            if refusal is not None:
                return refusal
        return cls.selection_types[spec.kind].refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        fields = dict(cls._selection_type(method).fields(context, method, layer))
        partition = _partition(method)
        if partition is not None and not method.drops_remainder:
            fields |= device_clusters(context, partition, layer).fields()
        return fields

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        q_RGD = q_BHGD.flatten(0, 1)
        beside = None if self._made is None or self._remainder is None else self._beside
        if beside is not None and self._remainder is not None and self._made is not None:
            beside.wait_stream(torch.cuda.current_stream(self.plan.device))
            with torch.cuda.stream(beside):
                self._remainder.look_up(q_RGD, records_BF, self._made.partials)
        lists = self.selection.select(layer, q_BHGD, records_BF)
        made = self._buffers(lists)
        locations_RN = self.locate(layer, records_BF, lists, made.joined_RN)
        if beside is not None:
            torch.cuda.current_stream(self.plan.device).wait_stream(beside)
        elif self._remainder is not None:
            # The first call, which finds out how many slots there are, and machines without streams.
            self._remainder.look_up(q_RGD, records_BF, made.partials)
        attend_lists(
            q_RGD,
            records_BF,
            lists,
            made.joined_RN,
            made.partials,
            q_RGD.shape[2] ** -0.5,
            first_slot=0 if self._remainder is None else self._remainder.splits,
            kept_RX=made.kept_LRX[layer],
            take_out=None if self._remainder is None else self._remainder.take_out,
            locations_RN=locations_RN,
        )
        if self._remainder is not None:
            self._remainder.correct(q_RGD, records_BF, lists, made, locations_RN)
        return merge_partials(made.partials, q_BHGD.dtype)[0].view_as(q_BHGD)

    def locate(self, layer: int, records_BF: Tensor, lists: KeyLists, joined_RN: Tensor) -> Tensor | None:
        """Where the rows to attend to lie, [R, N] int32 (`slot_fetch.fetch_rows`); None: all where the context is."""
        return None

    def kept_B(self) -> Tensor:
        if self._made is None:
            return torch.zeros(self.plan.size, dtype=torch.int64, device=self.plan.device)
        return sum_kept(self._made.kept_LRX, self.plan)

    @classmethod
    def _selection_type(cls, method: Method) -> type[KeySelection]:
        return cls.selection_types["" if method.index is None else method.index.kind]

    def _buffers(self, lists: KeyLists) -> _Buffers:
        if self._made is None:
            self._made = _Buffers(self.plan, lists, self._remainder)
        return self._made


class _Remainder:
    """Attention to all clusters of the partition, and taking keys out of them."""

    def __init__(self, plan: StepPlan) -> None:
        centred = isinstance(plan.method.remainder, Centred)
        width = cluster_width(plan, _partition(plan.method))
        self._scores = ClusterScores.allocate(plan.rows, width, plan.group, centred, plan.device)
        self.take_out = TakeOut(self._scores, SUMS if centred else MONOPOLE)
        self.splits = lookup_slots(plan.rows, width)

    def slots(self, programs: int) -> int:
        """That are filled besides those of `attend_lists`."""
        return self.splits + (programs if self.take_out.mode == SUMS else 0)

    def look_up(self, q_RGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        look_up(q_RGD, records_BF, self._scores, partials, q_RGD.shape[2] ** -0.5)

    def correct(
        self,
        q_RGD: Tensor,
        records_BF: Tensor,
        lists: KeyLists,
        made: _Buffers,
        locations_RN: Tensor | None,
    ) -> None:
        if self.take_out.mode == SUMS:
            first_slot = self.splits + list_programs(len(q_RGD), lists)
            correct_clusters(
                q_RGD,
                records_BF,
                lists,
                made.joined_RN,
                self._scores,
                made.partials,
                first_slot,
                locations_RN,
            )


class _Buffers:
    """What depends on the shape of the lists."""

    def __init__(self, plan: StepPlan, lists: KeyLists, remainder: _Remainder | None) -> None:
        programs = list_programs(plan.rows, lists)
        slots = programs + (0 if remainder is None else remainder.slots(programs))
        self.partials = Partials.allocate(plan.rows, slots, plan.group, plan.model.head_dim, plan.device)
        self.joined_RN = joined_lists(plan)
        self.kept_LRX = kept_counts(plan, programs)


def _partition(method: Method) -> IndexSpec | None:
    return method.index if method.partition is None else method.partition
