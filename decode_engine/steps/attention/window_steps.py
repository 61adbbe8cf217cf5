"""Attention to a sliding window of the last keys on a GPU.

Shape legend: B rows of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a record.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.dense_attention import attend_dense
from decode_engine.kernels.attention.partials import Partials, merge_partials
from decode_engine.steps.attention.dense_steps import shape_refusal, splits
from decode_engine.steps.attention.step_attention import StepAttention, StepPlan
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.store.manifest import Manifest

_KEYS_PER_SPLIT = 64


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
        return None if window is None else shape_refusal(window.shape)

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        kv_HW2D, window = context.kv(layer), context.manifest.model.shape(layer).window or 0
        absent = context.manifest.token_count - kv_HW2D.shape[1]
        row = kv_HW2D.stride(1) * kv_HW2D.element_size()
        return {records.WINDOW: window, records.KV: kv_HW2D.data_ptr() - absent * row}

    def attend(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> Tensor:
        attend_dense(q_BHGD, records_BF, self._partials, self._scale, windowed=True)
        return merge_partials(self._partials, q_BHGD.dtype, self.plan.sink_HG(layer))[0].view_as(q_BHGD)

    def kept_B(self) -> Tensor:
        return self._kept_B
