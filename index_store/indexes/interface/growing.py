"""Tensors that grow along their second dimension while a session appends keys."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 64


class GrowingRows:
    """Rows [H, n, ...] at the start of a buffer whose capacity doubles when it is full.

    limit: rows that there will be at most, when that is known; a buffer never grows beyond it.
    """

    def __init__(
        self,
        heads: int,
        *row: int,
        dtype: torch.dtype = torch.float32,
        limit: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.buffer = torch.empty(heads, 0, *row, dtype=dtype, device=device)
        self._count = 0
        self._limit = limit

    @property
    def rows(self) -> Tensor:
        """View of the rows, [H, n, ...]: writing rows changes it, growing detaches it."""
        return self.buffer[:, : self._count]

    @property
    def count(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, rows still unused included."""
        return self.buffer.numel() * self.buffer.element_size()

    def append(self, rows: Tensor) -> None:
        """Adds rows [H, k, ...] behind the last one."""
        self.write(self._count, rows)

    def write(self, start: int, rows: Tensor) -> None:
        """Puts rows [H, k, ...] at start..start+k-1; what stood from there on is gone. `start` is at most n."""
        end = start + rows.shape[1]
        capacity = self.buffer.shape[1]
        if end > capacity:
            wanted = max(_SMALLEST, 2 * capacity)
            if self._limit is not None:
                wanted = min(wanted, self._limit)
            grown = self.buffer.new_empty(self.buffer.shape[0], max(wanted, end), *self.buffer.shape[2:])
            grown[:, :start] = self.buffer[:, :start]
            self.buffer = grown
        self.buffer[:, start:end] = rows
        self._count = end
