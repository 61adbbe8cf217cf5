"""Contexts in device memory: padded rows, staging, checksums on the way. On the CPU the same code copies to the CPU."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from decode_engine.layers.session import Session
from index_store.errors import ChecksumError, InvalidArgumentError, MemoryBudgetError
from index_store.memory import context_loading
from index_store.memory.arena import Arena
from index_store.memory.context_loading import DeviceBlock, StagedArray, StagingBuffers, device_bytes
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import get_method
from index_store.store.catalog import Store
from index_store.store.description.dtypes import STORED_DTYPES
from tests.index_store.memory.hybrid_arenas import CPU, DEVICES, check_contents, decode, no_collector
from tests.support.layers import build_index, small_spec
from tests.support.memory import copy_padded, load_context, resident_bytes
from tests.support.store import KINDS, SyntheticContext, indexed_context, synthetic_context


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("piece", [97, 1000, 2**20])
@pytest.mark.parametrize("tokens", [37, 256, 300])
def test_contents(
    store: Store, device: torch.device, piece: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_loading, "PIECE_BYTES", piece)
    context = synthetic_context(tokens=tokens, index_dtypes=tuple(STORED_DTYPES))
    context.write(store)
    needed = resident_bytes(context.manifest, device)
    arena = Arena(needed, kinds=KINDS, device=device)
    with arena.acquire(store, context.id) as resident:
        assert arena.stats().used_bytes == needed
        assert arena.stats().page_locked_bytes == 0
        assert resident.device.type == device.type
        check_contents(resident, context, device, device)
        stored = resident.index("tables", 1).stored.values()  # type: ignore[attr-defined]
        assert all((each.data_ptr() - resident.kv(0).data_ptr()) % 256 == 0 for each in stored)


def test_padding_counts() -> None:
    shape = (2, 4, 8, 37)
    assert device_bytes(shape, torch.int8) == 2 * 4 * 8 * 256
    assert device_bytes(shape, torch.uint8) == 2 * 4 * 8 * 37
    assert device_bytes((2, 37), torch.int8) == 2 * 37
    assert device_bytes(shape, torch.float16) == 2 * 2 * 4 * 8 * 37
    manifest = synthetic_context(index_dtypes=("int8",)).manifest
    # Two layers of an array [2, 4, 37].
    assert resident_bytes(manifest, CPU) - resident_bytes(manifest) == 2 * (2 * 4 * 256 - 512)


@pytest.mark.parametrize("piece", [1, 5, 16, 40, 41, 120])
def test_every_piece_finds_its_place(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_loading, "PIECE_BYTES", piece)
    contents = torch.randint(-128, 128, (3, 8, 40), dtype=torch.int8)
    out = copy_padded(torch.zeros(2, 3, 8, 40, dtype=torch.int8), CPU)[1]
    pieces = StagedArray(out, StagingBuffers(CPU))
    raw = contents.flatten().view(torch.uint8).numpy()
    done = 0
    while done < raw.size:
        buffer = pieces.buffer(done, raw.size - done)
        assert 1 <= buffer.size <= piece
        buffer[:] = raw[done : done + buffer.size]
        pieces.filled(done, buffer.size)
        done += buffer.size
    assert torch.equal(out, contents)


def test_damage_is_found_on_the_way(stored: Store, context: SyntheticContext) -> None:
    path: Path = next(
        p
        for p in sorted((stored.path / "contexts" / context.id / "kv").rglob("*"))
        if p.is_file() and p.name != "zarr.json"
    )
    opened = stored.open(context.id)
    contents = bytearray(path.read_bytes())
    contents[5] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ChecksumError, match="altered or damaged"):
        load_context(opened, kinds=KINDS, device=CPU)


def test_a_context_too_large_for_the_budget_is_refused(stored: Store, context: SyntheticContext) -> None:
    unpadded = resident_bytes(context.manifest)
    with (
        pytest.raises(MemoryBudgetError, match="do not fit"),
        Arena(unpadded, kinds=KINDS, device=CPU).acquire(stored, context.id),
    ):
        pass
    with pytest.raises(MemoryBudgetError, match="refused"):
        DeviceBlock(1 << 60, CPU)


@pytest.mark.parametrize("device", [None, CPU])
def test_memory_is_freed(many: tuple[Store, list[SyntheticContext]], device: torch.device | None) -> None:
    store, contexts = many
    arena = Arena(resident_bytes(contexts[0].manifest, device), device=device)
    with no_collector():
        with arena.acquire(store, contexts[0].id) as resident:
            storage = weakref.ref(resident.kv(0).untyped_storage())
            kept = resident.derived("twice", partial(torch.mul, resident.kv(0), 2))
            derived = weakref.ref(kept)
        del resident, kept
        assert storage() is not None
        with arena.acquire(store, contexts[1].id):
            assert storage() is None
            assert derived() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["csattention+dropped", "csattention-paper", "pq+dropped", "multipole+dropped"]
)
def test_padding_changes_no_answer(store: Store, name: str, device: torch.device) -> None:
    method = replace(get_method(name), recent=16, append_block=8)
    assert method.index is not None
    kv = torch.randn(3, 2, 150, 2, 16, generator=torch.Generator().manual_seed(0))
    built = [build_index(method.index, kv[layer], group=2) for layer in (1, 2)]
    parameters = small_spec(method.index).parameters
    context = indexed_context(method.index.name, parameters, built, kv, group=2)
    context.write(store)
    outs = []
    for where in (None, device):
        with Arena(2**24, device=where).acquire(store, context.id) as resident:
            outs.append(decode(Session(resident, method.on(resident.manifest)), 40, where or CPU))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def resident_context() -> ResidentContext:
    context = synthetic_context()
    return ResidentContext(context.manifest, context.tokens, dict(enumerate(context.kv)), {})


def test_derived_objects_are_made_once() -> None:
    resident = resident_context()
    made: list[int] = []

    def make() -> list[int]:
        made.append(len(made))
        return resident.derived("inner", lambda: made)

    threads = [threading.Thread(target=lambda: resident.derived(("outer", 1), make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [0]
    assert resident.derived(("outer", 1), list) is resident.derived("inner", list)
    assert resident.derived(("outer", 2), list) == []


def test_nothing_is_derived_after_the_release() -> None:
    resident = resident_context()
    resident.derived("kept", list)
    resident.release()
    with pytest.raises(InvalidArgumentError, match="released"):
        resident.derived("kept", list)


def test_what_could_not_be_made_is_tried_again() -> None:
    resident = resident_context()

    def fail() -> int:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        resident.derived("number", fail)
    assert resident.derived("number", lambda: 7) == 7
