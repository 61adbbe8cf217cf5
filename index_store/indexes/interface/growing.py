"""Tensors that grow along their second dimension while a session appends keys."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Self

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.index_kind import SMALLEST, grown

Do = Callable[[Callable[[], object]], None]
"""Is given what is to be done, at once or behind other work."""


def do_now(work: Callable[[], object]) -> None:
    """Does it at once."""
    work()


class GrowingRows:
    """Rows [H, n, ...] at the start of a buffer that grows by doubling, so that room depends on n alone.

    room: rows that there is room for from the beginning. limit: rows that there will be at most, when that is known;
    a buffer never grows beyond it. addressed: rows that host memory has addresses for from the first row on; up to
    there rows stay where they are, and no growth copies them. What is beyond the room is not touched, so a system that
    gives memory when it is first written to has given none for it, and it does not count as held.
    count: n. Whoever writes rows into the buffer himself makes room for them before, and sets it after.
    """

    def __init__(
        self,
        heads: int,
        *row: int,
        dtype: torch.dtype = torch.float32,
        room: int = 0,
        limit: int | None = None,
        addressed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.buffer = torch.empty(heads, room, *row, dtype=dtype, device=device)
        self.count = 0
        self._limit = limit
        self._addressed = addressed if self.buffer.device.type == "cpu" else 0
        self._room = room

    @property
    def rows(self) -> Tensor:
        """View of the rows, [H, n, ...]: writing rows changes it, growing detaches it."""
        return self.buffer[:, : self.count]

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._room if self._addressed else self.buffer.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the room, rows still unused included."""
        return self.buffer[:, : self.capacity].numel() * self.buffer.element_size()

    def append(self, rows: Tensor) -> None:
        """Adds rows [H, k, ...] behind the last one."""
        self.put(self.count, rows)

    def put(self, start: int, rows: Tensor) -> None:
        """Puts rows [H, k, ...] at start..start+k-1; what stood from there on is gone.

        Raises InvalidArgumentError when rows before `start` are missing.
        """
        if start > self.count:
            raise InvalidArgumentError(f"rows {self.count}..{start - 1} were never written")
        end = start + rows.shape[1]
        self.reserve(end)
        self.buffer[:, start:end] = rows
        self.count = end

    def reserve(self, count: int, do: Do = do_now) -> None:
        """Makes room for `count` rows; those written so far may move.

        do: is given the copying, where a device may have yet to write rows behind the last one.
        """
        before = self.capacity
        if count <= before:
            return
        self._room = grown(count, max(SMALLEST, self.capacity), self._limit)
        if self._room <= self.buffer.shape[1]:
            return
        rows = max(self._room, self._addressed)
        buffer = self.buffer.new_empty(self.buffer.shape[0], rows, *self.buffer.shape[2:])
        do(partial(buffer[:, :before].copy_, self.buffer[:, :before]))
        self.buffer = buffer

    def fork(self) -> Self:
        """The same rows in a buffer of their own, with as much room."""
        other = copy(self)
        other.buffer = torch.empty_like(self.buffer)
        other.rows[:] = self.rows
        return other
