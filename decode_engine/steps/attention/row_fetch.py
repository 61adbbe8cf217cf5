"""Brings the rows of a layer that lie in host memory into its slots.

Shape legend: L layers, B rows (sessions) of a batch, H KV heads, R = B * H, N keys of the longest context, F fields of
a record, X programs that look keys up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.slots.gather_rows import CopyShape
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs
from decode_engine.steps.attention.step_attention import StepPlan


class RowFetch:
    """Fetches of the layers' rows, one layer at a time, and what came of them.

    copy_shape: of the launch that reads host memory; None for the usual one.
    """

    def __init__(self, plan: StepPlan, copy_shape: CopyShape | None = None) -> None:
        self.copy_shape = copy_shape
        self._size = plan.size
        self._row_bytes = plan.row_bytes
        self._buffers = FetchBuffers.allocate(plan.rows, plan.max_keys, plan.device)
        found = (plan.model.layers, plan.rows, find_programs(plan.rows, plan.max_keys), 2)
        self.found_LRX2 = torch.zeros(found, dtype=torch.int32, device=plan.device)

    def fetch(
        self, layer: int, records_BF: Tensor, lists: KeyLists, joined_RN: Tensor, heads: range | None = None
    ) -> Tensor:
        """Brings a layer's rows into slots: see `slot_fetch.fetch_rows`."""
        return fetch_rows(
            records_BF,
            lists,
            joined_RN,
            self._buffers,
            self._row_bytes,
            self.copy_shape,
            found_RX2=self.found_LRX2[layer],
            heads=heads,
        )

    def found_B2(self) -> Tensor:
        """Keys that were in no slot, and in one: sums over layers, KV heads and programs."""
        layers, _, programs, two = self.found_LRX2.shape
        return self.found_LRX2.view(layers, self._size, -1, programs, two).sum((0, 2, 3))
