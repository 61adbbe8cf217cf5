"""Full attention on a GPU, and attention to a sliding window of the last keys.

Shape legend: B rows of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.partials import Partials, merge_partials
from decode_engine.kernels.attention.row_groups import RowGroups, Seat
from decode_engine.kernels.attention.shared_attention import (
    SharedShape,
    attend_shared,
    shared_programs,
    shared_shape,
)
from decode_engine.kernels.attention.window_attention import attend_window
from decode_engine.kernels.families import ATTENTION
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.description.manifest import Manifest

_KEYS_PER_SPLIT = 64
"""Of a window."""


class DenseSteps(StepAttention):
    """Attends to every key of context and tail; a context is read once for all sessions on it."""

    shape: ClassVar[SharedShape | None] = None
    """Of launches; by default one for the layers' shape."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self._scale = plan.model.head_dim**-0.5
        self._shape = self.shape or shared_shape(plan.group, plan.model.head_dim, plan.planes)
        programs = shared_programs(self._shape, plan.model.kv_heads, plan.device)
        self._groups = RowGroups.allocate(
            plan.size, programs, plan.group, self._shape.rows, plan.device, plan.queue
        )
        self._partials = Partials.allocate(
            plan.rows, self._groups.slots, plan.group, plan.model.head_dim, plan.device
        )
        self._kept_B = torch.zeros(plan.size, dtype=torch.int64, device=plan.device)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        model = manifest.model
        if not model.full_layers:
            return None
        shape = model.shape(model.full_layers[0])
        return ATTENTION.refusal(shape.group, shape.head_dim)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int, lane: int = 0) -> Mapping[int, int]:
        return {}

    def arrange(self, seats: Sequence[Seat], steady: bool) -> None:
        self._groups.arrange(seats, steady=steady)

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        # Lanes that take turns have contexts in host memory: this reads all of one, and another lane may compute.
        with self.plan.lane.out_of_turn():
            attend_shared(
                q_BHGD, records_BF, self._groups, self._partials, self._scale, self._shape, self.plan.planes
            )
        sinks_HG, slots_B = self.plan.sink_HG(layer), self._groups.slots_B
        out, _ = merge_partials(self._partials, q_BHGD.dtype, sinks_HG, slots_B)
        return out.view_as(q_BHGD)

    def kept_B(self) -> Tensor:
        return self._kept_B


class WindowSteps(StepAttention):
    """Attends to the last keys of context and tail, in layers that keep no others of the context.

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
        self._kept_B = torch.zeros(plan.size, dtype=torch.int64, device=plan.device)

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        window = manifest.model.window
        return None if window is None else ATTENTION.refusal(window.shape.group, window.shape.head_dim)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int, lane: int = 0) -> Mapping[int, int]:
        kv_HW2D, window = context.kv(layer), context.manifest.model.shape(layer).window or 0
        absent = context.manifest.token_count - kv_HW2D.shape[1]
        row = kv_HW2D.stride(1) * kv_HW2D.element_size()
        return {records.WINDOW: window, records.KV: kv_HW2D.data_ptr() - absent * row}

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        attend_window(q_BHGD, records_BF, self._partials, self._scale)
        return merge_partials(self._partials, q_BHGD.dtype, self.plan.sink_HG(layer))[0].view_as(q_BHGD)

    def kept_B(self) -> Tensor:
        return self._kept_B


def splits(device: torch.device) -> int:
    """Programs per KV head: with 8 KV heads, or a multiple, whole rounds of two programs on every multiprocessor."""
    if device.type != "cuda":
        return 2
    return min(64, max(4, torch.cuda.get_device_properties(device).multi_processor_count // 4))
