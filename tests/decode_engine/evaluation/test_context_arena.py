"""Memory of commands that use one context at a time. The CPU stands for a device of its own memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode_engine.evaluation import machine
from decode_engine.evaluation.machine import arena_for
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import MemoryBytes, Placement
from index_store.store.catalog import Store
from tests.support.memory import resident_bytes
from tests.support.store import SyntheticContext, synthetic_context

CPU = torch.device("cpu")


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[Store, list[SyntheticContext]]:
    store = Store(tmp_path / "store", create=True)
    made = [synthetic_context(tokens=tokens) for tokens in (20, 400)]
    for context in made:
        context.write(store)
    return store, made


def test_without_a_gpu_there_is_one_memory(contexts: tuple[Store, list[SyntheticContext]]) -> None:
    store, made = contexts
    for placement in ("auto", "device"):
        arena = arena_for([context.manifest for context in made], CPU, placement)
        assert arena.stats().budget == MemoryBytes(host=resident_bytes(made[1].manifest))
        for context in made:
            with arena.acquire(store, context.id) as resident:
                assert resident.placement is Placement.DEVICE
    with pytest.raises(InvalidArgumentError, match="use auto or device"):
        arena_for([made[0].manifest], CPU, "hybrid")


@pytest.mark.parametrize(
    ("placement", "room", "expected"),
    [
        ("auto", 2**30, ["device", "device"]),
        ("auto", 0, ["device", "hybrid"]),
        ("device", 0, ["device", "device"]),
        ("hybrid", 0, ["hybrid", "hybrid"]),
    ],
)
def test_beside_a_gpu_each_context_has_room(
    contexts: tuple[Store, list[SyntheticContext]],
    placement: str,
    room: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, made = contexts
    room = room or resident_bytes(made[1].manifest, CPU) - 1
    monkeypatch.setattr(machine, "context_device", lambda device: device)
    monkeypatch.setattr(machine, "default_budget", lambda device: room)
    arena = arena_for([context.manifest for context in made], CPU, placement)
    found = []
    for context in made:
        with arena.acquire(store, context.id) as resident:
            found.append(resident.placement.value)
    assert found == expected
