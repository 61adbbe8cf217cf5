"""Keys and values that one session adds after its context."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError

_FIRST_CAPACITY = 128


class Tail:
    """Tail of one layer: rows [H, t, 2, d] in the context's dtype, grown by doubling.

    Rows are written at their position, so a step that failed half way can be run again.
    """

    def __init__(
        self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._kv = torch.empty(heads, _FIRST_CAPACITY, 2, head_dim, dtype=dtype, device=device)
        self.length = 0

    def write(self, start: int, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        """Stores T rows as tail rows start..start+T-1 and makes start+T the length.

        Raises InvalidArgumentError when rows before `start` are missing.
        """
        if start > self.length:
            raise InvalidArgumentError(f"tail rows {self.length}..{start - 1} were never written")
        end = start + keys_HTD.shape[1]
        self.reserve(end)
        self._kv[:, start:end, 0] = keys_HTD
        self._kv[:, start:end, 1] = values_HTD
        self.length = end

    def reserve(self, length: int) -> None:
        """Makes room for `length` rows; those written so far may move. Room depends on `length` alone."""
        heads, capacity, _, head_dim = self._kv.shape
        if length > capacity:
            while capacity < length:
                capacity *= 2
            grown = self._kv.new_empty(heads, capacity, 2, head_dim)
            grown[:, : self.length] = self.rows
            self._kv = grown

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._kv.shape[1]

    @property
    def address(self) -> int:
        """Of the first row of KV head 0, for kernels that write rows themselves and then set `length`."""
        return self._kv.data_ptr()

    @property
    def head_bytes(self) -> int:
        """From the rows of one KV head to those of the next."""
        return self._kv.stride(0) * self._kv.element_size()

    @property
    def rows(self) -> Tensor:
        """All rows written so far, [H, t, 2, d], without copying."""
        return self._kv[:, : self.length]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._kv.numel() * self._kv.element_size()
