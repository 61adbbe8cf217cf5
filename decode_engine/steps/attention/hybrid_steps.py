"""Attention on a GPU to contexts whose keys and values lie in host memory.

Indexes, clusters and tails are in the device's memory. Between search and attention, the rows that the step attends to
in the context are brought into a slot cache (`kernels.slot_fetch`).

Shape legend: L layers, B rows of a batch, H KV heads, R = B * H, N keys of the longest context, F fields of a record,
X programs that look keys up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decode_engine.host_search.turns_triton import give_turn, take_turn
from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.slots.gather_rows import CopyShape
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs
from decode_engine.steps.attention.fetch_ahead import FetchAhead
from decode_engine.steps.attention.listed_steps import ListedSteps
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

    A layer whose queries are foretold gets rows before its turn (`fetch_ahead`).
    """

    copy_shape: CopyShape | None = None
    """Of the launch that reads host memory; None for the usual one."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self._fetch = FetchBuffers.allocate(plan.rows, plan.max_keys, plan.device)
        found = (plan.model.layers, plan.rows, find_programs(plan.rows, plan.max_keys), 2)
        self._found_LRX2 = torch.zeros(found, dtype=torch.int32, device=plan.device)
        self._row_bytes = 2 * plan.model.head_dim * plan.dtype.itemsize
        self._ahead: FetchAhead | None = None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """As in general. Raises InvalidArgumentError for keys and values that the device cannot read in place."""
        kv = context.kv(layer)
        if context.device.type == "cuda" and kv.device.type == "cpu" and not is_readable(kv):
            raise InvalidArgumentError(
                f"keys and values of layer {layer} of context {context.manifest.id[:12]} are in host memory that is "
                "not page-locked, which the device cannot read"
            )
        return {**super().fields(context, method, layer), **slot_cache(context, layer).fields(layer)}

    def own_fields(self, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """Slots of a lane's own, since steps of several lanes run at once; the first lane has the usual ones."""
        return slot_cache(context, layer, self.plan.lane).fields(layer) if self.plan.lane else {}

    @property
    def foresees(self) -> bool:
        return self.plan.searching is None  # threads of the host search for one layer at a time

    def foresee(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> None:
        if self._ahead is None:
            selection = self._selection_type(self.plan.method)(self.plan)
            self._ahead = FetchAhead(self.plan, selection, self._row_bytes)
        self._ahead.expect(layer, q_BHGD, records_BF)

    def locate(self, layer: int, records_BF: Tensor, lists: KeyLists, joined_RN: Tensor) -> Tensor | None:
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead.search()
        give_turn(self.plan.turn_1, self.plan.lane)
        locations_RN = self.fetch(layer, records_BF, lists, joined_RN)
        if self._ahead is not None:
            self._ahead.fetch()
        take_turn(self.plan.turn_1, self.plan.lane)
        return locations_RN

    def fetch(
        self, layer: int, records_BF: Tensor, lists: KeyLists, joined_RN: Tensor, heads: range | None = None
    ) -> Tensor:
        """Brings a layer's rows into slots: see `slot_fetch.fetch_rows`."""
        return fetch_rows(
            records_BF,
            lists,
            joined_RN,
            self._fetch,
            self._row_bytes,
            self.copy_shape,
            found_RX2=self._found_LRX2[layer],
            heads=heads,
        )

    def fetched_B2(self) -> Tensor:
        found_B2 = self._of_rows(self._found_LRX2)
        if self._ahead is not None:
            # Those that found no slot are counted, too, though they were not read: few, if any.
            found_B2[:, 0] += self._of_rows(self._ahead.found_LRX2)[:, 0]
        return found_B2

    def _of_rows(self, found_LRX2: Tensor) -> Tensor:
        """Sums over layers, KV heads and programs, [B, 2]."""
        layers, _, programs, two = found_LRX2.shape
        return found_LRX2.view(layers, self.plan.size, -1, programs, two).sum((0, 2, 3))


def slot_cache(context: ResidentContext, layer: int, lane: int = 0) -> SlotCache:
    """A layer's slot cache of the context, made at first use. lane: steps of one lane run one after another."""
    model, keys = context.manifest.model, context.manifest.token_count

    def make() -> SlotCache:
        slots, dtype = slots_per_head(keys), context.kv(layer).dtype
        return SlotCache.make((layer,), model.kv_heads, slots, model.head_dim, dtype, context.device)

    return context.derived(("slot_cache", layer, lane), make)
