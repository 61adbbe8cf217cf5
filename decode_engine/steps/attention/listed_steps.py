"""Attention of captured steps: to everything, to a window, and to what a search lists, wherever rows lie.

Where keys and values are in host memory, indexes, clusters and tails are in the device's. Between search and attention,
the rows that the step attends to in the context are brought into a slot cache (`slot_fetch`).

Shape legend: L layers, B rows of a batch, H KV heads, R = B * H, N keys of the longest context, G query heads per KV
head, d head dim, F fields of a record, X programs that attend to lists, or that look keys up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import Partials, merge_partials
from decode_engine.kernels.attention.shared_attention import (
    RowGroups,
    Seat,
    attend_shared,
    attend_window,
    shared_programs,
    shared_shape,
)
from decode_engine.kernels.attention.sparse_attention import KeyLists, attend_lists, list_programs
from decode_engine.kernels.families import ATTENTION
from decode_engine.kernels.slots.slot_cache import CopyShape, SlotCache
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs
from decode_engine.steps.attention.selections import REMAINDERS, SELECTIONS
from decode_engine.steps.attention.step_attention import (
    KeySelection,
    RowsInPlace,
    SideStream,
    StepAttention,
    StepPlan,
    StepRemainder,
    Turn,
)
from index_store.errors import InvalidArgumentError
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import slots_per_head
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.selection.budgets import Remainder
from index_store.store.description.manifest import Manifest

_KEYS_PER_SPLIT = 64
"""Of a window."""


class DenseSteps(StepAttention):
    """Attends to every key of context and tail; a context is read once for all sessions on it."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self._scale = plan.model.head_dim**-0.5
        self._shape = shared_shape(plan.group, plan.model.head_dim, plan.planes, plan.size)
        programs = shared_programs(self._shape, plan.model.kv_heads, plan.device)
        self._groups = RowGroups.allocate(
            plan.size, programs, plan.group, self._shape.rows, plan.device, plan.queue
        )
        self._partials = Partials.allocate(
            plan.rows, self._groups.slots, plan.group, plan.model.head_dim, plan.device
        )

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        model = manifest.model
        if not model.full_layers:
            return None
        shape = model.shape(model.full_layers[0])
        return ATTENTION.refusal(shape.group, shape.head_dim)

    def arrange(self, seats: Sequence[Seat], steady: bool) -> None:
        self._groups.arrange(seats, steady=steady)

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        attend_shared(
            q_BHGD, records_BF, self._groups, self._partials, self._scale, self._shape, self.plan.planes
        )
        sinks_HG, slots_B = self.plan.sink_HG(layer), self._groups.slots_B
        out, _ = merge_partials(self._partials, q_BHGD.dtype, sinks_HG, slots_B)
        return out.view_as(q_BHGD)


class WindowSteps(StepAttention):
    """Attends to the last keys of context and tail, or to a chunk's, in layers that keep no others of the context.

    Their heads may be others than those of the layers that keep all keys.
    """

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        window = plan.model.window
        if window is None:
            raise ValueError("the model has no layers with a window")
        shape = window.shape
        rows, slots = plan.size * shape.kv_heads, -(-window.size // _KEYS_PER_SPLIT)
        slots = min(splits(plan.device), slots)
        self._partials = Partials.allocate(rows, slots, shape.group, shape.head_dim, plan.device)
        self._scale = shape.head_dim**-0.5

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        window = manifest.model.window
        return None if window is None else ATTENTION.refusal(window.shape.group, window.shape.head_dim)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        kv_HW2D, shape = context.kv(layer), context.manifest.model.shape(layer)
        window = (shape.window or 0) * (-1 if shape.chunked else 1)
        absent = context.manifest.token_count - kv_HW2D.shape[1]
        row = kv_HW2D.stride(1) * kv_HW2D.element_size()
        return {records.WINDOW: window, records.KV: kv_HW2D.data_ptr() - absent * row}

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        attend_window(q_BHGD, records_BF, self._partials, self._scale)
        return merge_partials(self._partials, q_BHGD.dtype, self.plan.sink_HG(layer))[0].view_as(q_BHGD)


def splits(device: torch.device) -> int:
    """Programs per KV head: with 8 KV heads, or a multiple, whole rounds of two programs on every multiprocessor."""
    if device.type != "cuda":
        return 2
    return min(64, max(4, torch.cuda.get_device_properties(device).multi_processor_count // 4))


class ListedSteps(StepAttention):
    """Searches by a `KeySelection`, attends to what it lists, and adds a `StepRemainder` unless the method drops it.

    What differs between methods and placements are the parts, by the kind of the index and of the remainder, and where
    rows are read. A remainder's launches run beside the search or beside what follows it, on a stream of their own, or
    are those of the search. Where a search can attend to everything itself, in one piece, it does.
    """

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = SELECTIONS
    remainder_types: ClassVar[Mapping[Remainder, type[StepRemainder]]] = REMAINDERS
    rows_type: ClassVar[type[RowsInPlace]] = RowsInPlace

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        method = plan.method
        self.rows = self.rows_type(plan)
        self.selection = search = self._selection_type(method)(plan)
        remainder_type = None if method.drops_remainder else self.remainder_types[method.remainder]
        self._remainder = None if remainder_type is None else remainder_type(plan, search, self.rows.in_place)
        self.attends_alone = self.rows.in_place and not plan.planes and search.attends_alone
        if self.attends_alone:
            programs, slots = search.lists.counts_RP.shape[1], search.slots
        else:
            programs = list_programs(plan.rows, search.lists)
            slots = programs + (0 if self._remainder is None else self._remainder.slots(programs))
        self._partials = Partials.allocate(plan.rows, slots, plan.group, plan.model.head_dim, plan.device)
        if self._remainder is not None:
            self._remainder.join(self._partials)
        # Where no launch joins lists there is no need of room for them.
        room = 0 if self.attends_alone else plan.max_keys
        self.joined_RN = torch.empty(plan.rows, room, dtype=torch.int32, device=plan.device)
        kept = (plan.model.layers, plan.rows, programs)
        self.kept_LRX = torch.zeros(kept, dtype=torch.int32, device=plan.device)
        self._side = SideStream(plan.device)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        if method.index is None or method.index.kind not in cls.selection_types:
            return "there are no kernels that search its index for lists of keys"
        if not method.drops_remainder:
            remainder = cls.remainder_types.get(method.remainder)
            if remainder is None:
                return (
                    f"its remainder, {method.remainder.name}, reads d x d numbers per cluster, which is more than the "
                    "keys"
                )
            refusal = remainder.refusal(method, manifest)
            if refusal is not None:
                return refusal
        return cls._selection_type(method).refusal(method, manifest)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        remainder = None if method.drops_remainder else cls.remainder_types[method.remainder]
        # Rows first: they refuse contexts that nothing here can read.
        return {
            **cls.rows_type.fields(context, layer),
            **cls._selection_type(method).fields(context, method, layer),
            **({} if remainder is None else remainder.fields(context, method, layer)),
        }

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        remainder, sinks_HG = self._remainder, self.plan.sink_HG(layer)
        if self.attends_alone:
            return self.selection.attend_all(q_BHGD, records_BF, self.kept_LRX[layer], sinks_HG)
        turn = Turn.IN_SEARCH if remainder is None else remainder.turn
        self._attend_remainder(Turn.BESIDE_SEARCH, q_BHGD, records_BF)
        lists = self.selection.ask(layer, q_BHGD, records_BF)
        self._attend_remainder(Turn.AFTER_SEARCH, q_BHGD, records_BF)
        locations_RN = self.rows.locate(layer, records_BF, self.selection, lists, self.joined_RN)
        if turn is Turn.BESIDE_SEARCH:
            self._side.join()
        attend_lists(
            q_BHGD.flatten(0, 1),
            records_BF,
            lists,
            self.joined_RN,
            self._partials,
            q_BHGD.shape[3] ** -0.5,
            first_slot=0 if remainder is None else remainder.splits,
            kept_RX=self.kept_LRX[layer],
            take_out=None if remainder is None else remainder.take_out,
            locations_RN=locations_RN,
            planes=self.plan.planes,
        )
        if turn is Turn.AFTER_SEARCH:
            self._side.join()
        if remainder is not None:
            remainder.correct(q_BHGD, records_BF, lists, self.joined_RN, self._partials, locations_RN)
        return merge_partials(self._partials, q_BHGD.dtype, sinks_HG)[0].view_as(q_BHGD)

    def _attend_remainder(self, turn: Turn, q_BHGD: Tensor, records_BF: Tensor) -> None:
        """On a stream of its own, if it is its turn."""
        remainder = self._remainder
        if remainder is not None and remainder.turn is turn:
            with self._side.follow():
                remainder.attend(q_BHGD, records_BF, self._partials)

    def kept_B(self) -> Tensor:
        return self.kept_LRX.view(len(self.kept_LRX), self.plan.size, -1).sum((0, 2))

    @classmethod
    def _selection_type(cls, method: Method) -> type[KeySelection]:
        return cls.selection_types["" if method.index is None else method.index.kind]


class RowsInSlots(RowsInPlace):
    """Rows of the layers in host memory, which are brought into slots on the device, one layer at a time.

    The sessions of a context share a slot cache per layer, which lives as long as the context: what one has
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
    def fields(cls, context: ResidentContext, layer: int) -> Mapping[int, int]:
        """The slots. Raises InvalidArgumentError for rows that the device cannot read in place."""
        rows = context.stored_rows(layer)
        if context.device.type == "cuda" and rows.device.type == "cpu" and not is_readable(rows):
            raise InvalidArgumentError(
                f"keys and values of layer {layer} of context {context.manifest.id[:12]} are in host memory that is "
                "not page-locked, which the device cannot read"
            )
        return slot_cache(context, layer).fields(layer)

    def locate(
        self, layer: int, records_BF: Tensor, selection: KeySelection, lists: KeyLists, joined_RN: Tensor
    ) -> Tensor | None:
        """Wave by wave: rows of one come from host memory while lists of the next are searched for."""
        locations_RN = None
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

    rows_type: ClassVar[type[RowsInPlace]] = RowsInSlots
    rows: RowsInSlots


def slot_cache(context: ResidentContext, layer: int) -> SlotCache:
    """A layer's slot cache of the context, made at first use."""
    model, keys = context.manifest.model, context.manifest.token_count

    def make() -> SlotCache:
        slots, rows = slots_per_head(keys, context.slot_share), context.stored_rows(layer)
        return SlotCache.make(
            (layer,), model.kv_heads, keys, slots, rows.shape[3], rows.dtype, context.device
        )

    return context.derived(("slot_cache", layer), make)
