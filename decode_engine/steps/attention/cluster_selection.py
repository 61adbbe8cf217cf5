"""Key clusters on a GPU: a search that lists the keys of the heaviest, and a remainder over all of them.

Shape legend: B rows of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.partials import Partials
from decode_engine.kernels.attention.sparse_attention import (
    MONOPOLE,
    SUMS,
    ClusterScores,
    TakeOut,
    list_programs,
)
from decode_engine.kernels.clusters.device_clusters import DeviceClusters, most_clusters
from decode_engine.kernels.clusters.lookup import look_up, lookup_slots
from decode_engine.kernels.clusters.remainder import correct_clusters
from decode_engine.kernels.clusters.selection import SelectionBuffers, select_clusters
from decode_engine.kernels.families import KEY_CLUSTERS
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_parts import KeySelection, StepRemainder, Turn
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.key_clusters.parameters import ClusterParameters
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.selection import budgets
from index_store.store.description.manifest import Manifest


class ClusterSelection(KeySelection):
    """The keys of the heaviest clusters, as many clusters as fit into the budget.

    Multipole Attention's (sections 3.1-3.2), and Squeezed Attention's with a budget instead of a threshold.
    """

    kind, what = KeyClusters.kind, "key clusters"

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        rows, width = plan.rows, cluster_width(plan, self.searched(plan.method))
        self.scores = ClusterScores.allocate(rows, width, plan.group, False, plan.device)
        # Peaks and totals only, where nothing is attended.
        self._partials = Partials.allocate(rows, lookup_slots(rows, width), plan.group, 0, plan.device)
        self._attends = False
        self._buffers = SelectionBuffers.allocate(rows, width, plan.device)
        self.lists = KeyLists.allocate(rows, 1, plan.max_keys, plan.device)

    def attend_too(self, partials: Partials) -> None:
        """From now on the lookup attends to the means of all clusters, into the first slots (`lookup_slots`)."""
        self._partials, self._attends = partials, True

    @classmethod
    def index_refusal(cls, spec: IndexSpec, method: Method, manifest: Manifest) -> str | None:
        return cluster_refusal(spec, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return device_clusters(context, cls.searched(method), layer).fields()

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        q_RGD, scale = q_BHGD.flatten(0, 1), q_BHGD.shape[3] ** -0.5
        splits = look_up(q_RGD, records_BF, self.scores, self._partials, scale, attend=self._attends)
        select_clusters(records_BF, self.scores, self._partials, splits, self._buffers, self.lists)
        return self.lists


class ClusterMeans(StepRemainder):
    """All clusters of the partition as their means, whatever is selected; listed keys are taken out of them.

    Where the search compares queries with these very means (Multipole Attention, sections 3.1-3.2), one launch does
    both, unless the remainder's hides behind a fetch. Else its own runs beside the search.
    """

    def __init__(self, plan: StepPlan, selection: KeySelection, in_place: bool) -> None:
        method = plan.method
        centred = method.remainder is budgets.CENTRED
        width = cluster_width(plan, _partition(method))
        same = method.partition is None and in_place and method.remainder is budgets.MONOPOLE
        self._shared = selection if same and isinstance(selection, ClusterSelection) else None
        self.turn = Turn.BESIDE_SEARCH if self._shared is None else Turn.IN_SEARCH
        self._scores = (
            ClusterScores.allocate(plan.rows, width, plan.group, centred, plan.device)
            if self._shared is None
            else self._shared.scores
        )
        self.take_out = TakeOut(self._scores, SUMS if centred else MONOPOLE)
        self.splits = lookup_slots(plan.rows, width)
        self._corrects, self._planes = centred, plan.planes

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        searched = method.index
        partition = searched if method.partition is None else method.partition
        if partition is None or partition.kind != KeyClusters.kind:
            return "its remainder is over a tree of clusters"
        if searched is not None and partition.kind == searched.kind and partition.name != searched.name:
            return "it searches other clusters than its remainder is over"
        return cluster_refusal(partition, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return device_clusters(context, _partition(method), layer).fields()

    def slots(self, programs: int) -> int:
        return self.splits + (programs if self._corrects else 0)

    def join(self, partials: Partials) -> None:
        if self._shared is not None:
            self._shared.attend_too(partials)

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


def _partition(method: Method) -> IndexSpec:
    """What a remainder over clusters is over."""
    return ClusterSelection.searched(method) if method.partition is None else method.partition


def cluster_width(plan: StepPlan, spec: IndexSpec) -> int:
    """The most clusters per head of any context that the plan allows."""
    parameters = ClusterParameters.parse(spec.parameters)
    return most_clusters(plan.max_keys, parameters.keys_per_cluster, parameters.block)


def device_clusters(context: ResidentContext, spec: IndexSpec, layer: int) -> DeviceClusters:
    """A layer's clusters in the form of the kernels; made once and kept with the context."""
    dtype = context.rows(layer).dtype

    def make() -> DeviceClusters:
        sinks = ClusterParameters.parse(spec.parameters).sinks
        return DeviceClusters.of(context.index(spec.name, layer).arrays(), sinks, dtype, context.device)

    return context.derived(("device_clusters", spec.name, layer), make)


def cluster_refusal(spec: IndexSpec, manifest: Manifest) -> str | None:
    """Why kernels cannot compare queries with the clusters, as a clause; None when they can."""
    if spec.parameters.get("window", 0):
        return "its clusters are of keys moved by windowed RoPE"
    model = manifest.model
    return KEY_CLUSTERS.refusal(model.query_heads // model.kv_heads, model.head_dim)
