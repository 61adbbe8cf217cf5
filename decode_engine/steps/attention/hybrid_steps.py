"""Attention on a GPU to contexts whose keys and values lie in host memory.

Indexes, clusters and tails are in the device's memory. Between search and attention, the rows that the step attends to
in the context are brought into a slot cache (`slot_fetch`).

Shape legend: B rows of a batch, H KV heads, R = B * H, N keys of the longest context, G query heads per KV head, d head
dim, F fields of a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.row_fetch import RowFetch
from decode_engine.steps.attention.step_attention import StepPlan
from index_store.errors import InvalidArgumentError
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import slots_per_head
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method


class HybridSteps(ListedSteps):
    """`ListedSteps` over contexts in host memory: the same results, bit for bit.

    The sessions of a context share a slot cache per layer and lane, which lives as long as the context: what one has
    fetched the others find, also sessions of other methods, whose steps run in other graphs. Its size is the context's
    (`index_store.memory.placement`): steps that attend to more read the rest from host memory.
    """

    joins_lookups: ClassVar[bool] = False  # the remainder's hides behind the fetch
    rows_in_place: ClassVar[bool] = False

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.rows = RowFetch(plan)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """As in general. Raises InvalidArgumentError for keys and values that the device cannot read in place."""
        rows = context.stored_rows(layer)
        if context.device.type == "cuda" and rows.device.type == "cpu" and not is_readable(rows):
            raise InvalidArgumentError(
                f"keys and values of layer {layer} of context {context.manifest.id[:12]} are in host memory that is "
                "not page-locked, which the device cannot read"
            )
        return {**super().fields(context, method, layer), **slot_cache(context, layer).fields(layer)}

    def own_fields(self, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """Slots of a lane's own, since steps of several lanes run at once; the first lane has the usual ones."""
        lane = self.plan.lane.number
        return slot_cache(context, layer, lane).fields(layer) if lane else {}

    def find(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> tuple[KeyLists, Tensor | None]:
        lists = self.search(layer, q_BHGD, records_BF)
        with self.plan.lane.out_of_turn():
            locations_RN = self.rows.fetch(layer, records_BF, lists, self.joined_RN)
        return lists, locations_RN

    def fetched_B2(self) -> Tensor:
        return self.rows.found_B2()


def slot_cache(context: ResidentContext, layer: int, lane: int = 0) -> SlotCache:
    """A layer's slot cache of the context, made at first use. lane: steps of one lane run one after another."""
    model, keys = context.manifest.model, context.manifest.token_count

    def make() -> SlotCache:
        slots, rows = slots_per_head(keys, context.slots.share), context.stored_rows(layer)
        return SlotCache.make(
            (layer,), model.kv_heads, keys, slots, rows.shape[3], rows.dtype, context.device
        )

    return context.derived(("slot_cache", layer, lane), make)
