"""Coarse rows on a GPU: a search that lists keys, and attention to all others by the same copy.

Shape legend: B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.partials import Partials, merge_partials
from decode_engine.kernels.coarse.coarse_pass import attend_all, attend_others, weigh_keys
from decode_engine.kernels.coarse.search import find_cuts
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork, coarse_shape
from decode_engine.kernels.families import coarse_refusal
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_parts import KeySelection, StepRemainder, Turn
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.parameters import CoarseParameters, value_groups
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.store.description.dtypes import INT8
from index_store.store.description.manifest import HIGH_PLANE, Manifest

_ADDRESSES = {
    records.KEY_CODES: "key_codes",
    records.KEY_SCALES: "key_scales",
    records.KEY_OFFSETS: "key_offsets",
    records.VALUE_CODES: "value_codes",
    records.VALUE_SCALES: "value_scales",
    records.VALUE_OFFSETS: "value_offsets",
}


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
        attend_all(q_BHGD, records_BF, self.sizes, self.work, self.lists, self._partials)
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
    return {field: arrays[name].data_ptr() for field, name in _ADDRESSES.items()}
