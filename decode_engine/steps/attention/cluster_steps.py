"""Key clusters on a GPU: the heaviest are attended key by key, the others through their means or not at all.

Shape legend: L layers, B rows of a batch, H KV heads, R = B * H, G query heads per KV head, d head dim, F fields of a
record, X programs that attend to lists.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.partials import Partials, merge_partials
from decode_engine.kernels.attention.sparse_attention import (
    MONOPOLE,
    ClusterScores,
    TakeOut,
    attend_lists,
    list_programs,
)
from decode_engine.kernels.clusters.device_clusters import DeviceClusters, most_clusters
from decode_engine.kernels.clusters.lookup import look_up, lookup_slots
from decode_engine.kernels.clusters.selection import SelectionBuffers, select_clusters
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.key_clusters.parameters import ClusterParameters
from index_store.memory.resident import ResidentContext
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import Method
from index_store.selection.remainders import Monopole
from index_store.store.manifest import Manifest


class ClusterSelection(KeySelection):
    """The keys of the heaviest clusters, as many clusters as fit into the budget."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        rows, width = plan.rows, cluster_width(plan, plan.method.index)
        self.scores = ClusterScores.allocate(rows, width, plan.group, False, plan.device)
        # Peaks and totals only, where nothing is attended.
        self._normaliser = Partials.allocate(rows, lookup_slots(rows, width), plan.group, 0, plan.device)
        self._buffers = SelectionBuffers.allocate(rows, width, plan.device)
        self.lists = KeyLists.allocate(rows, 1, plan.max_keys, plan.device)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        if method.index is None or method.index.kind != KeyClusters.kind:
            return "it does not search key clusters"
        return window_refusal(method.index)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return {} if method.index is None else device_clusters(context, method.index, layer).fields()

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        return self.look_up_and_select(q_BHGD.flatten(0, 1), records_BF, None)

    def look_up_and_select(self, q_RGD: Tensor, records_BF: Tensor, partials: Partials | None) -> KeyLists:
        """The lists. With partials, their first slots attend to the means of all clusters (`lookup_slots`)."""
        scale = q_RGD.shape[2] ** -0.5
        into = self._normaliser if partials is None else partials
        splits = look_up(q_RGD, records_BF, self.scores, into, scale, attend=partials is not None)
        select_clusters(records_BF, self.scores, into, splits, self._buffers, self.lists)
        return self.lists


class ClusterSteps(StepAttention):
    """Multipole Attention (sections 3.1-3.2), and Squeezed Attention's lookup with a budget instead of a threshold.

    Four launches: attend to all clusters as their means, select, attend to the selected keys and take their clusters'
    share away, merge.
    """

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        rows = plan.rows
        self.selection = ClusterSelection(plan)
        self._take_out = None
        self._splits = 0
        if isinstance(plan.method.remainder, Monopole):
            self._take_out = TakeOut(self.selection.scores, MONOPOLE)
            self._splits = lookup_slots(rows, self.selection.scores.logits_RCG.shape[1])
        programs = list_programs(rows, self.selection.lists)
        slots = self._splits + programs
        self._partials = Partials.allocate(rows, slots, plan.group, plan.model.head_dim, plan.device)
        self._joined_RN = joined_lists(plan)
        self._kept_LRX = kept_counts(plan, programs)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        if not method.drops_remainder and not (
            isinstance(method.remainder, Monopole) and method.partition is None
        ):
            return (
                f"its remainder, {method.remainder.name}, is not one over the means of the clusters searched"
            )
        return ClusterSelection.refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return ClusterSelection.fields(context, method, layer)

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        q_RGD = q_BHGD.flatten(0, 1)
        partials = self._partials if self._take_out else None
        lists = self.selection.look_up_and_select(q_RGD, records_BF, partials)
        attend_lists(
            q_RGD,
            records_BF,
            lists,
            self._joined_RN,
            self._partials,
            q_RGD.shape[2] ** -0.5,
            first_slot=self._splits,
            kept_RX=self._kept_LRX[layer],
            take_out=self._take_out,
        )
        return merge_partials(self._partials, q_BHGD.dtype)[0].view_as(q_BHGD)

    def kept_B(self) -> Tensor:
        return sum_kept(self._kept_LRX, self.plan)


def cluster_width(plan: StepPlan, spec: IndexSpec | None) -> int:
    """The most clusters per head of any context that the plan allows."""
    if spec is None:
        return 1
    parameters = ClusterParameters.parse(spec.parameters)
    return most_clusters(plan.max_keys, parameters.keys_per_cluster, parameters.block)


def device_clusters(context: ResidentContext, spec: IndexSpec, layer: int) -> DeviceClusters:
    """A layer's clusters in the form of the kernels; made once and kept with the context."""
    dtype = context.kv(layer).dtype

    def make() -> DeviceClusters:
        sinks = ClusterParameters.parse(spec.parameters).sinks
        return DeviceClusters.of(context.index(spec.name, layer).arrays(), sinks, dtype, context.device)

    return context.derived(("device_clusters", spec.name, layer), make)


def window_refusal(spec: IndexSpec) -> str | None:
    """Why the clusters cannot be compared with queries as they are; None when they can."""
    if spec.parameters.get("window", 0):
        return "its clusters are of keys moved by windowed RoPE"
    return None


def joined_lists(plan: StepPlan) -> Tensor:
    """[R, N] int32, for `attend_lists` to fill."""
    return torch.empty(plan.rows, plan.max_keys, dtype=torch.int32, device=plan.device)


def kept_counts(plan: StepPlan, programs: int) -> Tensor:
    """[L, R, X] int32, for `attend_lists` to fill."""
    return torch.zeros(plan.model.layers, plan.rows, programs, dtype=torch.int32, device=plan.device)


def sum_kept(kept_LRX: Tensor, plan: StepPlan) -> Tensor:
    """[B] int64."""
    return kept_LRX.view(len(kept_LRX), plan.size, -1).sum((0, 2))
