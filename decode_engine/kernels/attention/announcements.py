"""What a search says of keys while it runs: queues that a launch beside it reads (`slots.early_rows`).

Shape legend: R rows (sequence x KV head), Q queues, C cells of a queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

READERS_OF_QUEUE = 4
"""Programs that read it by turns: what a search lists lies together, and so comes to few queues at a time."""
ROW_SHIFT, TURN_SHIFT, TURNS = 32, 48, 2**14
"""Of a cell: a key plus 1, above it a row, and above that the step's number, of so many, plus 1."""
_LEAST_CELLS = 256


@dataclass(frozen=True, slots=True)
class Announcements:
    """Queues of keys, shared by all layers. Made by `allocate`; zeros to begin with.

    cells_QC: [Q, C] int64, a ring for each queue, C a power of two: announcements (`ROW_SHIFT`) of this step or of any
    before. counts_X: [Q + 2] int32: keys that were announced in each queue in this step, programs of the search that
    have ended, and steps that have. brought_R: [R] int32, rows that were brought in this step. The fetch behind it
    counts these, and sets all but the steps to 0 (`slot_lookup`).
    """

    cells_QC: Tensor
    counts_X: Tensor
    brought_R: Tensor
    readers: int

    @staticmethod
    def allocate(rows: int, keys: int, readers: int, device: torch.device | str) -> Announcements:
        """readers: a multiple of `READERS_OF_QUEUE`. keys: that a row announces, about.

        Of more, the oldest of those that wait are forgotten: the fetch brings them.
        """
        queues, cells = readers // READERS_OF_QUEUE, _LEAST_CELLS
        while cells * queues < rows * keys:
            cells *= 2
        return Announcements(
            torch.zeros(queues, cells, dtype=torch.int64, device=device),
            torch.zeros(queues + 2, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            readers,
        )

    @property
    def queues(self) -> int:
        """Q."""
        return len(self.cells_QC)

    @property
    def cells(self) -> int:
        """C."""
        return self.cells_QC.shape[1]
