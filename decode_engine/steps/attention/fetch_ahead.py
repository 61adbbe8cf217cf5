"""Brings the rows of a layer into its slots, also while the layer before it computes.

A layer's queries are nearly known one layer early (`layer_ahead`). What a search finds for them is fetched on a stream
of its own, by few programs, beside attention and the rest of the layer before: PCIe is busy while the device reads
weights. When the layer's turn comes, it searches with its own queries, and what was foretold rightly is in slots. So
nothing but times depends on what was foretold.

The search runs beside the other layer's fetch, and the fetch ahead begins when that one has ended, since both need
PCIe. A fetch ahead is a step of the layer's slot cache like any other (`slot_fetch`): no other step of that cache runs
until it has ended, since the layer's own waits for it. What it brought may take the places of rows used longest ago,
and is the last to leave.

Shape legend: L layers, B rows (sessions) of a batch, H KV heads, R = B * H, N keys of the longest context, G query
heads per KV head, d head dim, F fields of a record, X programs that look keys up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.slots.gather_rows import CopyShape
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs
from decode_engine.steps.attention.listed_steps import joined_lists
from decode_engine.steps.attention.step_attention import KeySelection, SideStream, StepPlan


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


class FetchAhead:
    """One layer at a time: `expect`, then `search` and `fetch` before and after the fetch of the layer before, `wait`.

    selection: used by nothing else.
    """

    copy_shape = CopyShape()
    """Of the launch that reads host memory: few programs."""

    def __init__(self, plan: StepPlan, selection: KeySelection) -> None:
        self.rows = RowFetch(plan, self.copy_shape)
        self._selection = selection
        self._joined_RN = joined_lists(plan, plan.max_keys)
        self._side = SideStream(plan.device)
        self._searched: torch.cuda.Event | None = None
        self._expected: tuple[int, Tensor, Tensor] | None = None
        self._lists: KeyLists | None = None
        self._fetching = False

    def expect(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> None:
        """What the layer's queries will be, about. The caller keeps them until `fetch` has returned."""
        self._expected = layer, q_BHGD, records_BF

    def search(self) -> None:
        """Begins to search for the expected layer; what was launched before is waited for first."""
        if self._expected is None:
            return
        layer, q_BHGD, records_BF = self._expected
        with self._side.follow():
            self._lists = self._selection.select(layer, q_BHGD, records_BF)
            self._searched = self._side.mark()

    def fetch(self) -> None:
        """Begins to fetch for it, when what was launched before has ended; the current stream waits for the search."""
        if self._expected is None or self._lists is None:
            return
        layer, _, records_BF = self._expected
        with self._side.follow():
            self.rows.fetch(layer, records_BF, self._lists, self._joined_RN)
        if self._searched is not None:
            # The queries' memory is free for other use once this layer has returned.
            self._side.join(self._searched)
        self._expected, self._lists, self._searched, self._fetching = None, None, None, True

    def wait(self) -> None:
        """What is launched next follows the fetch that was begun, if one was."""
        if self._fetching:
            self._side.join()
        self._fetching = False
