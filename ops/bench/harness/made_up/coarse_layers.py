"""Layers with a coarse copy for benchmarks of `refined`: keys are random, clustered, or a trained model's."""

from __future__ import annotations

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.coarse.reference import CoarseSequence
from decode_engine.kernels.records import records_of
from harness.layer import COLD_BYTES, DEVICE, DTYPE, GROUP, HEAD_DIM, KV_HEADS, RECENT, SINKS, TAIL, Memory
from harness.made_up.trained_rows import TrainedRows
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import value_groups
from index_store.methods.method import INDEX_SPECS

LENGTH, CENTRES, RUN = 131072, 1024, 64
"""Keys of a context; centres of clustered ones, and how many keys one after the other are near the same."""


class CoarseMemory(Memory):
    """With coarse copies, of the bits that were asked for last."""

    spread = 2.0

    def __init__(
        self,
        length: int,
        batch: int,
        head_dim: int = HEAD_DIM,
        *,
        group: int = GROUP,
        clustered: bool = False,
        trained: TrainedRows | None = None,
    ) -> None:
        """Random numbers, unless `clustered`: moved to centres; or those of a trained model."""
        searched = batch * KV_HEADS * length * head_dim
        self.layers = max(2, min(8, -(-COLD_BYTES // searched)))
        super().__init__(length, batch, head_dim, group)
        for number in range(self.layers * batch):
            layer, b = divmod(number, batch)
            if clustered:
                gather_around_centres(self.kv[layer, b], self.q[layer, b])
            if trained is not None:
                self.kv[layer, b] = trained.kv(number, KV_HEADS, length, head_dim)
                self.q[layer, b] = trained.q(number, KV_HEADS, group, head_dim).to(DTYPE)
        self.sequences: list[list[CoarseSequence]] = []

    def code(self, bits: int, keep: int) -> None:
        """Codes keys and values as presets have it, and says how many keys are kept."""
        length, head_dim = self.kv.shape[3], self.kv.shape[5]
        groups = value_groups(head_dim, int(INDEX_SPECS["coarse_rows"].parameters["value_group"]))
        self.sequences.clear()  # copies of other bits are not needed any more
        for layer in range(self.layers):
            copies = (code_rows(kv, 0, bits, bits, groups) for kv in self.kv[layer])
            self.sequences.append([CoarseSequence(rows, SINKS, length - RECENT, keep) for rows in copies])

    def records(self, layer: int) -> Tensor:
        """[B, RECORD_FIELDS] on the device."""
        rows = records_of(self.sequences[layer], "cpu")
        for b, kv in enumerate(self.kv[layer]):
            rows[b, records.KV] = kv.data_ptr()
            rows[b, records.KV_HEAD] = kv.stride(0) * kv.element_size()
            rows[b, records.TAIL] = self.tail[b].data_ptr()
            rows[b, records.TAIL_HEAD] = self.tail.stride(1) * self.tail.element_size()
            rows[b, records.TAIL_KEYS] = TAIL
        return rows.to(DEVICE)


def gather_around_centres(kv_HN2D: Tensor, q_HGD: Tensor) -> None:
    """Moves keys near centres, run by run, spreads and shifts their channels, and moves queries towards centres."""
    heads, length, _, head_dim = kv_HN2D.shape
    centres = torch.randn(heads, CENTRES, head_dim, device=DEVICE)
    spread = 0.3 + torch.rand(heads, 1, head_dim, device=DEVICE) * 1.4
    shift = 2.0 * torch.randn(heads, 1, head_dim, device=DEVICE)
    chosen = torch.randint(0, CENTRES, (heads, -(-length // RUN)), device=DEVICE)
    own = chosen.repeat_interleave(RUN, 1)[:, :length, None].expand(-1, -1, head_dim)
    keys = 0.8 * centres.gather(1, own) + 0.6 * kv_HN2D[:, :, 0].float()
    kv_HN2D[:, :, 0] = (keys * spread + shift).to(kv_HN2D.dtype)
    near = torch.randint(0, CENTRES, (heads, q_HGD.shape[1], 1), device=DEVICE).expand(-1, -1, head_dim)
    q_HGD += (centres.gather(1, near) / spread).to(q_HGD.dtype)
