"""Brings the rows of a layer into its slots while the layer before it computes.

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

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.slots.gather_rows import CopyShape
from decode_engine.kernels.slots.slot_fetch import FetchBuffers, fetch_rows, find_programs
from decode_engine.steps.attention.cluster_steps import joined_lists
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan


class FetchAhead:
    """One layer at a time: `expect`, then `search` and `fetch` before and after the fetch of the layer before, `wait`.

    selection: used by nothing else. row_bytes: of keys and values of one token and KV head. On a device without
    streams everything runs in place.
    """

    copy_shape = CopyShape()
    """Of the launch that reads host memory: few programs."""

    def __init__(self, plan: StepPlan, selection: KeySelection, row_bytes: int) -> None:
        self._device = plan.device
        self._selection = selection
        self._row_bytes = row_bytes
        self._buffers = FetchBuffers.allocate(plan.rows, plan.max_keys, plan.device)
        self._joined_RN = joined_lists(plan)
        found = (plan.model.layers, plan.rows, find_programs(plan.rows, plan.max_keys), 2)
        self.found_LRX2 = torch.zeros(found, dtype=torch.int32, device=plan.device)
        on_gpu = plan.device.type == "cuda"
        self._beside = torch.cuda.Stream(plan.device) if on_gpu else None  # type: ignore[no-untyped-call]
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
        with self._after_all():
            self._lists = self._selection.select(layer, q_BHGD, records_BF)
            self._searched = None if self._beside is None else self._beside.record_event()

    def fetch(self) -> None:
        """Begins to fetch for it, when what was launched before has ended; the current stream waits for the search."""
        if self._expected is None or self._lists is None:
            return
        layer, _, records_BF = self._expected
        with self._after_all():
            fetch_rows(
                records_BF,
                self._lists,
                self._joined_RN,
                self._buffers,
                self._row_bytes,
                self.copy_shape,
                found_RX2=self.found_LRX2[layer],
            )
        if self._searched is not None:
            # The queries' memory is free for other use once this layer has returned.
            torch.cuda.current_stream(self._device).wait_event(self._searched)
        self._expected, self._lists, self._searched, self._fetching = None, None, None, True

    def wait(self) -> None:
        """What is launched next follows the fetch that was begun, if one was."""
        if self._fetching and self._beside is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._beside)
        self._fetching = False

    @contextmanager
    def _after_all(self) -> Iterator[None]:
        """The stream beside, after all that the current one was given."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            yield
