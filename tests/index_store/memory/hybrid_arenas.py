"""Arenas whose contexts lie in host memory, with the CPU in place of a device, and what they have to hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from decode_engine.layers.session import Session
from index_store.memory.arena import Arena
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.store.catalog import Store
from tests.support.store import KINDS, RecordedIndex, RecordingLocker, SyntheticContext, synthetic_context

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
NEEDED = placed_bytes(synthetic_context().manifest, CPU, Placement.HYBRID)
ROOM = MemoryBytes(2**30, 2**30)


def hybrid_arena(
    budget: MemoryBytes = ROOM, locker: RecordingLocker | None = None, device: torch.device = CPU
) -> Arena:
    return Arena(budget, locker or RecordingLocker(), KINDS, device, Placement.HYBRID)


def touch(arena: Arena, store: Store, context: SyntheticContext) -> None:
    with arena.acquire(store, context.id):
        pass


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit: random floats may be NaN."""
    left, right = (tensor.cpu().contiguous().view(torch.uint8) for tensor in (found, expected))
    return torch.equal(left, right)


def check_contents(
    resident: ResidentContext,
    context: SyntheticContext,
    rows: torch.device,
    tables: torch.device,
    padded: bool = True,
) -> None:
    """Every tensor is there, bit for bit. rows, tables: where. padded: rows of int8 begin at multiples of 256 bytes."""
    assert resident.manifest == context.manifest
    assert torch.equal(resident.tokens().cpu(), context.tokens)
    for layer in range(3):
        kv = resident.kv(layer)
        assert (kv.is_contiguous(), kv.dtype, kv.device.type) == (True, context.kv.dtype, rows.type)
        assert same(kv, context.kv[layer])
    for row, layer in enumerate((1, 2)):
        index = resident.index("tables", layer)
        assert isinstance(index, RecordedIndex)
        assert index.keys_HND.data_ptr() == resident.kv(layer).data_ptr()
        for entry, data in context.entries():
            stored = index.stored[entry.path.rpartition("/")[2]]
            assert same(stored, data[row])
            assert (stored.device.type, stored.stride(2)) == (tables.type, 1)
            if padded and stored.dtype == torch.int8:
                assert stored.stride(1) == -(-len(context.tokens) // 256) * 256
                assert stored.stride(0) == stored.shape[1] * stored.stride(1)
            else:
                assert stored.is_contiguous()


@contextmanager
def no_collector() -> Iterator[None]:
    """Memory comes back by reference counts alone: what is part of a cycle stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def decode(session: Session, prompt: int, device: torch.device = CPU) -> Tensor:
    """A prompt, then three steps, of a session at position 150; outputs of layers that search, [2, T, 2, 16]."""
    generator = torch.Generator().manual_seed(1)
    outs, position = [], 150
    for count in (prompt, 1, 1, 1):
        q = torch.randn(2, count, 2, 16, generator=generator)
        k, v = torch.randn(2, 2, count, 16, generator=generator)
        outs += [
            layer.attend(q.to(device), k.to(device), v.to(device), position).cpu()
            for layer in session.layers[1:]
        ]
        position += count
    return torch.cat(outs, dim=1)
