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

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._kv = torch.empty(heads, _FIRST_CAPACITY, 2, head_dim, dtype=dtype)
        self.length = 0

    def write(self, start: int, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        """Stores T rows as tail rows start..start+T-1 and makes start+T the length.

        Raises InvalidArgumentError when rows before `start` are missing.
        """
        if start > self.length:
            raise InvalidArgumentError(f"tail rows {self.length}..{start - 1} were never written")
        end = start + keys_HTD.shape[1]
        if end > self._kv.shape[1]:
            heads, capacity, _, head_dim = self._kv.shape
            grown = torch.empty(heads, max(2 * capacity, end), 2, head_dim, dtype=self._kv.dtype)
            grown[:, :start] = self._kv[:, :start]
            self._kv = grown
        self._kv[:, start:end, 0] = keys_HTD
        self._kv[:, start:end, 1] = values_HTD
        self.length = end

    @property
    def rows(self) -> Tensor:
        """All rows written so far, [H, t, 2, d], without copying."""
        return self._kv[:, : self.length]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._kv.numel() * self._kv.element_size()
