"""The last keys and values of layers whose queries see a sliding window, while a model reads a context.

They stay on the device, wherever other layers are kept: no more than a window's rows of each.

Shape legend: H KV heads, T tokens of a chunk, W tokens kept, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WindowRows:
    """Rows [H, <= window, 2, d] of some layers, in the dtype in which they are stored."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._rows: dict[int, Tensor] = {}

    def add(self, layer: int, chunk_HT2D: Tensor) -> Tensor:
        """Keeps a chunk; returns what was kept before and the chunk, [H, <= window + T, 2, d]."""
        kept = self._rows.get(layer)
        rows = chunk_HT2D if kept is None else torch.cat([kept, chunk_HT2D], dim=1)
        # A copy, so that a long chunk does not stay with its last rows.
        self._rows[layer] = rows[:, max(0, rows.shape[1] - self._window) :].clone()
        return rows

    def kept(self, layer: int) -> Tensor:
        """What is kept of a layer. Raises ValueError before anything was added, and once released."""
        if layer not in self._rows:
            raise ValueError(f"the window of layer {layer} has not seen any key, or was released")
        return self._rows[layer]

    def release(self, layer: int) -> None:
        """Frees a layer."""
        self._rows.pop(layer, None)
