"""Searches and remainders on a GPU: query tables, key clusters and coarse rows.

Tables and coarse rows may attend to what they find, in a few launches. Clusters and coarse rows make remainders: over
the means of all clusters, or by the codes of all keys that are not listed.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record, P
tiles of a context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import Partials, merge_partials
from decode_engine.kernels.attention.sparse_attention import (
    MONOPOLE,
    SUMS,
    ClusterScores,
    KeyLists,
    TakeOut,
    list_programs,
)
from decode_engine.kernels.clusters.lookup import (
    DeviceClusters,
    correct_clusters,
    look_up,
    lookup_slots,
    most_clusters,
)
from decode_engine.kernels.clusters.selection import SelectionBuffers, select_clusters
from decode_engine.kernels.coarse.search import find_cuts
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork, coarse_shape
from decode_engine.kernels.coarse.warp_pass import weigh_keys
from decode_engine.kernels.coarse.warp_values import attend_others
from decode_engine.kernels.families import KEY_CLUSTERS, QUERY_TABLES, coarse_refusal
from decode_engine.kernels.tables.selection import select, table_attention
from decode_engine.kernels.tables.sizes import (
    TableContext,
    TableSizes,
    TableWork,
    has_padded_rows,
    padded_rows,
    table_shape,
)
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan, StepRemainder, Turn
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.parameters import CoarseParameters, value_groups
from index_store.indexes.coarse_rows.two_planes import TwoPlanes
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.key_clusters.parameters import ClusterParameters
from index_store.indexes.query_tables.index import QueryTables
from index_store.indexes.query_tables.parameters import TableParameters, TableSearch
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.selection import budgets
from index_store.store.description.dtypes import INT8
from index_store.store.description.manifest import HIGH_PLANE, Manifest


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


_COPY = ("key_codes", "value_codes", "key_scales", "key_offsets", "value_scales", "value_offsets")
"""Arrays of an index of coarse rows, in the order of `records.COARSE_COPY`."""


class CoarseSelection(KeySelection):
    """Search by a coarse copy: a list for each program that goes over a part of it."""

    kind, what = CoarseRows.kind, "coarse rows"

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        parameters, model = CoarseParameters.parse(self.searched(plan.method).parameters), plan.model
        self.sizes = CoarseSizes(
            model.kv_heads,
            plan.group,
            model.head_dim,
            parameters.key_bits,
            parameters.value_bits,
            value_groups(model.head_dim, parameters.value_group),
            plan.max_keys,
            coarse_shape(plan.device, plan.max_keys),
        )
        self.work = CoarseWork.make(self.sizes, plan.size, plan.device, attends=False)
        self.lists = KeyLists.allocate(
            plan.rows, self.sizes.splits(plan.rows), self.sizes.width(plan.rows), plan.device
        )
        self._partials: Partials | None = None

    @property
    def attends_alone(self) -> bool:
        method = self.plan.method
        return method.partition is None and not method.drops_remainder and self.plan.dtype == torch.bfloat16

    @property
    def slots(self) -> int:
        return self.sizes.slots(len(self.lists.counts_RP))

    def attend_all(
        self, q_BHGD: Tensor, records_BF: Tensor, kept_RX: Tensor, sink_HG: Tensor | None
    ) -> Tensor:
        if self._partials is None:
            raise RuntimeError("a search attends to nothing before `attend_too`")
        self.lists = replace(self.lists, counts_RP=kept_RX)
        find_cuts(q_BHGD, records_BF, self.sizes, self.work)
        weigh_keys(q_BHGD, records_BF, self.sizes, self.work, self.lists)
        attend_others(q_BHGD, records_BF, self.sizes, self.work, self.lists, self._partials, exact=True)
        return merge_partials(self._partials, q_BHGD.dtype, sink_HG)[0].view_as(q_BHGD)

    def attend_too(self, partials: Partials) -> None:
        """From now on the launch that lists keys leaves what `attend_others` needs of all others."""
        self._partials = partials
        self.work = CoarseWork.make(self.sizes, self.plan.size, self.plan.device)

    def attend_others(self, q_BHGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        """After `select`: coarse attention to all keys that are not listed, into the first slots."""
        attend_others(q_BHGD, records_BF, self.sizes, self.work, self.lists, partials)

    @classmethod
    def index_refusal(cls, spec: IndexSpec, method: Method, manifest: Manifest) -> str | None:
        if manifest.rows == INT8 and spec.name != HIGH_PLANE:
            return (
                f"it searches {spec.name}, and a record has room for one coarse copy, here that of the rows"
            )
        parameters, model = CoarseParameters.parse(spec.parameters), manifest.model
        return coarse_refusal(
            model.query_heads // model.kv_heads,
            model.head_dim,
            (parameters.key_bits, parameters.value_bits),
            value_groups(model.head_dim, parameters.value_group),
            manifest.token_count,
        )

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return coarse_fields(context, cls.searched(method).name, layer)

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        find_cuts(q_BHGD, records_BF, self.sizes, self.work)
        weigh = self._partials is not None
        weigh_keys(q_BHGD, records_BF, self.sizes, self.work, self.lists, weigh=weigh)
        return self.lists


class CoarseOthers(StepRemainder):
    """Attention to the coarse copies of all keys that a search over the same copy has not listed: by that search.

    Its launches leave weights for another one, which runs beside a fetch of the listed rows.
    """

    turn = Turn.AFTER_SEARCH

    def __init__(self, plan: StepPlan, selection: KeySelection, in_place: bool) -> None:
        """Raises TypeError for a search over anything else."""
        if not isinstance(selection, CoarseSelection):
            raise TypeError(f"{type(selection).__name__} scores no coarse rows")
        self._search = selection
        self.splits = selection.sizes.value_programs(plan.rows)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        if method.partition is not None:
            return f"its remainder, {method.remainder.name}, is over rows that its search does not score"
        return CoarseSelection.refusal(method, manifest)

    def join(self, partials: Partials) -> None:
        self._search.attend_too(partials)

    def attend(self, q_BHGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        self._search.attend_others(q_BHGD, records_BF, partials)


def coarse_fields(context: ResidentContext, index: str, layer: int) -> Mapping[int, int]:
    """What a layer's record says about a coarse copy."""
    arrays = context.index(index, layer).arrays()
    return {field: arrays[name].data_ptr() for field, name in zip(records.COARSE_COPY, _COPY, strict=True)}


SELECTIONS: Mapping[str, type[KeySelection]] = MappingProxyType(
    {each.kind: each for each in (ClusterSelection, TableSelection, CoarseSelection)}
)
"""By the kind of the index that they search."""
REMAINDERS: Mapping[budgets.Remainder, type[StepRemainder]] = MappingProxyType(
    {budgets.COARSE: CoarseOthers, budgets.MONOPOLE: ClusterMeans, budgets.CENTRED: ClusterMeans}
)
