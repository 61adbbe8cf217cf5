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
from decode_engine.kernels.coarse.coarse_pass import attend_all, attend_others, list_keys, weigh_keys
from decode_engine.kernels.coarse.search import find_cuts
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork, coarse_shape
from decode_engine.kernels.families import coarse_refusal
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_parts import KeySelection, StepRemainder, Turn
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.parameters import CoarseParameters
from index_store.indexes.coarse_rows.scalars.row_sizes import value_groups
from index_store.memory.resident import ResidentContext
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import Method
from index_store.store.description.dtypes import INT8
from index_store.store.description.manifest import HIGH_PLANE, Manifest

_SCALAR_ADDRESSES = {
    records.KEY_CODES: "key_codes",
    records.KEY_SCALES: "key_scales",
    records.KEY_OFFSETS: "key_offsets",
    records.VALUE_CODES: "value_codes",
    records.VALUE_SCALES: "value_scales",
    records.VALUE_OFFSETS: "value_offsets",
}
_PRODUCT_ADDRESSES = {
    records.KEY_CODES: "key_codes",
    records.KEY_SCALES: "key_codebooks",
    records.VALUE_CODES: "value_codes",
    records.VALUE_SCALES: "value_codebooks",
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
            _value_groups(parameters, model.head_dim),
            plan.max_keys,
            coarse_shape(plan.device, plan.max_keys),
            parameters.coding == "product",
        )
        self.work = CoarseWork.make(self.sizes, plan.size, plan.device, attends=False)
        self.lists = KeyLists.allocate(
            plan.rows, self.sizes.splits(plan.rows), self.sizes.width(plan.rows), plan.device
        )
        self._partials: Partials | None = None

    @property
    def attends_alone(self) -> bool:
        method = self.plan.method
        over_others = method.partition is None and not method.drops_remainder
        return over_others and self.sizes.in_registers and self.plan.dtype == torch.bfloat16

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
        """From now on all keys that are not listed are attended to as well, into the first slots.

        By the launch that lists the others; for sizes in registers by one of its own, `attend_others`.
        """
        self._partials = partials
        self.work = CoarseWork.make(self.sizes, self.plan.size, self.plan.device)

    def attend_others(self, q_BHGD: Tensor, records_BF: Tensor, partials: Partials) -> None:
        """After `select`, for sizes in registers: coarse attention to all keys that are not listed."""
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
            _value_groups(parameters, model.head_dim),
            manifest.token_count,
            parameters.coding == "product",
        )

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        return coarse_fields(context, cls.searched(method).name, layer)

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        find_cuts(q_BHGD, records_BF, self.sizes, self.work)
        if self.sizes.in_registers:
            weigh = self._partials is not None
            weigh_keys(q_BHGD, records_BF, self.sizes, self.work, self.lists, weigh=weigh)
        else:
            list_keys(q_BHGD, records_BF, self.sizes, self.work, self.lists, self._partials)
        return self.lists


class CoarseOthers(StepRemainder):
    """Attention to the coarse copies of all keys that a search over the same copy has not listed: by that search.

    Where its launches leave weights for another one, that one runs beside a fetch of the listed rows.
    """

    def __init__(self, plan: StepPlan, selection: KeySelection, in_place: bool) -> None:
        """Raises TypeError for a search over anything else."""
        if not isinstance(selection, CoarseSelection):
            raise TypeError(f"{type(selection).__name__} scores no coarse rows")
        self._search = selection
        self.splits = selection.sizes.value_programs(plan.rows)
        self.turn = Turn.AFTER_SEARCH if selection.sizes.in_registers else Turn.IN_SEARCH

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
    addresses = _PRODUCT_ADDRESSES if "key_codebooks" in arrays else _SCALAR_ADDRESSES
    return {field: arrays[name].data_ptr() for field, name in addresses.items()}


def _value_groups(parameters: CoarseParameters, head_dim: int) -> int:
    """Groups of channels of a value with scales of their own; product codes have none, so all are of one."""
    return value_groups(head_dim, parameters.value_group) if parameters.coding == "scalar" else 1
