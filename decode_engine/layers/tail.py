"""Keys and values that one session adds after its context."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import GrowingRows

_FIRST_CAPACITY = 128


class Tail(GrowingRows):
    """Tail of one layer: rows [H, t, 2, d] in the context's dtype.

    Rows are written at their position, so a step that failed half way can be run again.
    """

    def __init__(
        self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(heads, 2, head_dim, dtype=dtype, room=_FIRST_CAPACITY, device=device)

    def write(self, start: int, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        """Stores T rows as tail rows start..start+T-1 and makes start+T their count.

        Rows below 0 are those of the context's last tokens, read again, which it has. Raises InvalidArgumentError when
        rows before `start` are missing.
        """
        known = max(0, -start)
        self.put(start + known, torch.stack((keys_HTD[:, known:], values_HTD[:, known:]), dim=2))

    def adopt(self, other: Tail) -> None:
        """Takes over the other tail's rows, in a copy."""
        self.put(0, other.rows)

    @property
    def address(self) -> int:
        """Of the first row of KV head 0, for kernels that write rows themselves and then set `count`."""
        return self.buffer.data_ptr()

    @property
    def head_bytes(self) -> int:
        """From the rows of one KV head to those of the next."""
        return self.buffer.stride(0) * self.buffer.element_size()
