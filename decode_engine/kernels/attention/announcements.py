"""What a search says of keys while it runs: queues that a launch beside it reads (`slots.early_rows`).

Shape legend: R rows (sequence x KV head), Q queues, C cells of a queue, P programs that read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

READERS_OF_QUEUE = 4
"""Programs that read it by turns: what a search lists lies together, and so comes to few queues at a time."""
ROW_SHIFT = 32
"""Of a cell, which holds a row above, and a key plus 1."""
_LEAST_CELLS = 256


@dataclass(frozen=True, slots=True)
class Announcements:
    """Queues of keys, shared by all layers. Made by `allocate`; zeros to begin with.

    cells_QC: [Q, C] int64, a ring for each queue, C a power of two: a row and a key (`ROW_SHIFT`), 0 where there is
    none. told_Q: [Q] int32, keys that were announced over all steps; taken_P: [P] int32, those when a reader's last
    step ended. ended_1: [1] int32, programs of searches that have ended, over all steps; awaited_P: [P] int32, those
    that a reader has waited for. brought_R: [R] int32, rows that were brought in this step, until its fetch counts
    them.
    """

    cells_QC: Tensor
    told_Q: Tensor
    taken_P: Tensor
    ended_1: Tensor
    awaited_P: Tensor
    brought_R: Tensor

    @staticmethod
    def allocate(rows: int, keys: int, readers: int, device: torch.device | str) -> Announcements:
        """readers: a multiple of `READERS_OF_QUEUE`. keys: that a row announces, about.

        Where there are more, the oldest of those that wait are forgotten.
        """
        queues, cells = readers // READERS_OF_QUEUE, _LEAST_CELLS
        while cells * queues < rows * keys:
            cells *= 2
        return Announcements(
            torch.zeros(queues, cells, dtype=torch.int64, device=device),
            torch.zeros(queues, dtype=torch.int32, device=device),
            torch.zeros(readers, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(readers, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def of_search(self) -> tuple[Tensor, Tensor, Tensor]:
        """What its kernel is given."""
        return self.cells_QC, self.told_Q, self.ended_1

    @property
    def cells(self) -> int:
        """C."""
        return self.cells_QC.shape[1]
