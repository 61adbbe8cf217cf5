"""Arenas whose contexts lie in host memory, with the CPU in place of a device."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement
from tests.support.store import KINDS, RecordingLocker, synthetic_context

CPU = torch.device("cpu")
NEEDED = placed_bytes(synthetic_context().manifest, CPU, Placement.HYBRID)
ROOM = MemoryBytes(2**30, 2**30)


def hybrid_arena(
    budget: MemoryBytes = ROOM, locker: RecordingLocker | None = None, device: torch.device = CPU
) -> Arena:
    return Arena(budget, locker or RecordingLocker(), KINDS, device, Placement.HYBRID)


def same(found: Tensor, expected: Tensor) -> bool:
    left, right = (tensor.cpu().contiguous().view(torch.uint8) for tensor in (found, expected))
    return torch.equal(left, right)
