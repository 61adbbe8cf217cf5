"""Attention on a GPU to contexts whose keys and values lie in host memory.

Indexes, clusters and tails are in the device's memory. Between search and attention, the rows that the step attends to
in the context are brought into a slot cache (`slot_fetch`).

Shape legend: L layers, B rows (sessions) of a batch, H KV heads, R = B * H, N keys of the longest context, F fields of
a record, X programs that look keys up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.slots.gather_rows import CopyShape
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_parts import KeySelection, RowsInPlace
from index_store.errors import InvalidArgumentError
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import slots_per_head
from index_store.memory.resident import ResidentContext


class RowsInSlots(RowsInPlace):
    """Rows of the layers in host memory, which are brought into slots on the device, one layer at a time.

    The sessions of a context share a slot cache per layer and lane, which lives as long as the context: what one has
    fetched the others find, also sessions of other methods, whose steps run in other graphs. Its size is the context's
    (`index_store.memory.placement`): steps that attend to more read the rest from host memory.
    """

    in_place = False
    copy_shape: CopyShape | None = None
    """Of the launch that reads host memory; None for the usual one."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._buffers = FetchBuffers.allocate(plan.rows, plan.max_keys, plan.device)
        found = (plan.model.layers, plan.rows, find_programs(plan.rows, plan.max_keys), 2)
        self._found_LRX2 = torch.zeros(found, dtype=torch.int32, device=plan.device)

    @classmethod
    def fields(cls, context: ResidentContext, layer: int, lane: int) -> Mapping[int, int]:
        """Slots of the lane's own. Raises InvalidArgumentError for rows that the device cannot read in place."""
        rows = context.stored_rows(layer)
        if context.device.type == "cuda" and rows.device.type == "cpu" and not is_readable(rows):
            raise InvalidArgumentError(
                f"keys and values of layer {layer} of context {context.manifest.id[:12]} are in host memory that is "
                "not page-locked, which the device cannot read"
            )
        return slot_cache(context, layer, lane).fields(layer)

    def locate(
        self, layer: int, records_BF: Tensor, selection: KeySelection, lists: KeyLists, joined_RN: Tensor
    ) -> Tensor | None:
        """Wave by wave: rows of one come from host memory while lists of the next are searched for."""
        locations_RN = None
        with self._plan.lane.out_of_turn():
            for heads in selection.waves:
                selection.await_heads(layer, records_BF, heads)
                locations_RN = fetch_rows(
                    records_BF,
                    lists,
                    joined_RN,
                    self._buffers,
                    self._plan.row_bytes,
                    self.copy_shape,
                    found_RX2=self._found_LRX2[layer],
                    heads=heads,
                )
        return locations_RN

    def found_B2(self) -> Tensor:
        """Keys that were in no slot, and in one: sums over layers, KV heads and programs."""
        layers, _, programs, two = self._found_LRX2.shape
        return self._found_LRX2.view(layers, self._plan.size, -1, programs, two).sum((0, 2, 3))


class HybridSteps(ListedSteps):
    """`ListedSteps` over contexts in host memory: the same results, bit for bit."""

    laned: ClassVar[bool] = True
    rows_type: ClassVar[type[RowsInPlace]] = RowsInSlots
    rows: RowsInSlots


def slot_cache(context: ResidentContext, layer: int, lane: int = 0) -> SlotCache:
    """A layer's slot cache of the context, made at first use. lane: steps of one lane run one after another."""
    model, keys = context.manifest.model, context.manifest.token_count

    def make() -> SlotCache:
        slots, rows = slots_per_head(keys, context.slots.share), context.stored_rows(layer)
        return SlotCache.make(
            (layer,), model.kv_heads, keys, slots, rows.shape[3], rows.dtype, context.device
        )

    return context.derived(("slot_cache", layer, lane), make)
