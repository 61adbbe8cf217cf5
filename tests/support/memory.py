"""Contexts and arrays in memory, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.memory.context_loading import (
    DeviceBlock,
    LoadedContext,
    device_bytes,
    placed_bytes,
    start_loading,
)
from index_store.memory.placement import Placement
from index_store.memory.resident import IndexKinds
from index_store.store.description.manifest import Manifest
from index_store.store.stored_context import Context


def resident_bytes(manifest: Manifest, device: torch.device | None = None) -> int:
    """Bytes that a context takes where it is in one memory only."""
    return placed_bytes(manifest, device).total


def load_context(
    context: Context,
    kinds: IndexKinds | None = None,
    device: torch.device | None = None,
    placement: Placement = Placement.DEVICE,
) -> LoadedContext:
    """Reads every array into memory, and returns when all is there; nothing is kept of what cannot be read."""
    loaded = start_loading(context, None, kinds, device, placement)
    try:
        loaded.wait()
    except BaseException:
        loaded.release()
        raise
    return loaded


def copy_padded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy of an array [H, ...] as it lies in device memory."""
    block = DeviceBlock(device_bytes(tuple(tensor.shape), tensor.dtype), device)
    return block.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)
