"""Contexts whose keys and values are in host memory and whose indexes are in a device's, loaded behind their use.

On the CPU the same code takes the CPU for the device.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MemoryBudgetError
from index_store.memory import memory_sizes
from index_store.memory.arena import Arena
from index_store.memory.context_loading import choose_placement, placed_bytes
from index_store.memory.host_memory import BlockReader
from index_store.memory.memory_sizes import free_memory, parse_size
from index_store.memory.placement import SLOT_SHARE, MemoryBytes, Placement, parse_placement, slot_bytes
from index_store.store.catalog import Store
from index_store.store.description.dtypes import STORED_DTYPES
from tests.index_store.memory.hybrid_arenas import (
    CPU,
    DEVICES,
    NEEDED,
    ROOM,
    check_contents,
    hybrid_arena,
    same,
)
from tests.support.memory import load_context, resident_bytes
from tests.support.store import KINDS, RecordedIndex, RecordingLocker, SyntheticContext, synthetic_context
from tests.support.waiting import wait_until


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [37, 300])
def test_contents(store: Store, device: torch.device, tokens: int) -> None:
    context = synthetic_context(tokens=tokens, index_dtypes=tuple(STORED_DTYPES))
    context.write(store)
    needed = placed_bytes(context.manifest, device, Placement.HYBRID)
    locker = RecordingLocker()
    arena = hybrid_arena(needed, locker, device)
    with arena.acquire(store, context.id) as resident:
        stats = arena.stats()
        assert stats.used == stats.leased == needed
        assert stats.page_locked_bytes == needed.host - -(-tokens * 8 // 256) * 256
        assert (resident.placement, resident.device.type) == (Placement.HYBRID, device.type)
        check_contents(resident, context, CPU, device)
        for layer in range(3):
            assert resident.kv(layer).data_ptr() % mmap.PAGESIZE == 0
            assert resident.kv(layer).data_ptr() in locker.locked
    arena.clear()
    assert locker.locked == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["query_tables", "key_clusters"])
def test_what_the_host_searches_is_there(store: Store, device: torch.device, kind: str) -> None:
    """Its pages are not locked, since no device reads them; other indexes stay on the device."""
    context = synthetic_context(tokens=300, index_kind=kind)
    context.write(store)
    needed = placed_bytes(context.manifest, device, Placement.HOST)
    locker, kinds = RecordingLocker(), {kind: KINDS[RecordedIndex.kind]}
    arena = Arena(needed, locker, kinds, device, Placement.HOST)
    with arena.acquire(store, context.id) as resident:
        assert arena.stats().used == needed
        assert (resident.placement, resident.kv(0).device) == (Placement.HOST, CPU)
        assert len(locker.locked) == 3
        here = kind == "query_tables"
        check_contents(resident, context, CPU, CPU if here else device, padded=not here)
    hybrid = placed_bytes(context.manifest, device, Placement.HYBRID)
    assert (needed.device < hybrid.device) == (kind == "query_tables")


@pytest.mark.parametrize(
    ("kind", "spared", "placement"),
    [
        ("query_tables", 0, Placement.HYBRID),
        ("query_tables", 1, Placement.HOST),
        ("recorded", 1, Placement.HYBRID),
    ],
)
def test_indexes_that_do_not_fit_are_searched_on_the_host(
    kind: str, spared: int, placement: Placement
) -> None:
    manifest = synthetic_context(tokens=400, index_kind=kind).manifest
    room = placed_bytes(manifest, CPU, Placement.HYBRID).device - spared
    chosen, why = choose_placement(manifest, CPU, room)
    assert chosen is placement
    assert ("nor do its indexes'" in why) == (placement is Placement.HOST)


def test_sizes() -> None:
    manifest = synthetic_context().manifest
    kv = manifest.kv_bytes // manifest.model.layers
    pages = -(-kv // mmap.PAGESIZE) * mmap.PAGESIZE
    assert NEEDED.host == manifest.model.layers * pages + 512
    slots = slot_bytes(manifest)
    assert 0 < slots < NEEDED.device < resident_bytes(manifest, CPU) - manifest.kv_bytes + slots
    most = placed_bytes(manifest, CPU, Placement.HYBRID, 1)
    assert most == NEEDED + MemoryBytes(device=slot_bytes(manifest, 1) - slots)
    assert placed_bytes(manifest) == MemoryBytes(host=resident_bytes(manifest))
    assert placed_bytes(manifest, CPU) == MemoryBytes(device=resident_bytes(manifest, CPU))


def test_slots_count_into_the_budget(stored: Store, context: SyntheticContext) -> None:
    usual, more = (
        Arena(NEEDED, RecordingLocker(), KINDS, CPU, Placement.HYBRID, share) for share in (SLOT_SHARE, 1)
    )
    with pytest.raises(MemoryBudgetError), more.acquire(stored, context.id):
        pass
    with usual.acquire(stored, context.id):
        pass


def test_hybrid_needs_a_device(stored: Store, context: SyntheticContext) -> None:
    with pytest.raises(InvalidArgumentError, match="use auto or device"):
        Arena(ROOM, placement=Placement.HYBRID)
    with stored.open(context.id) as opened, pytest.raises(InvalidArgumentError, match="needs a device"):
        load_context(opened, placement=Placement.HYBRID)


def test_names() -> None:
    assert [parse_placement(name) for name in ("auto", "device", "hybrid", "host")] == [None, *Placement]
    with pytest.raises(InvalidArgumentError, match="expected auto, device, hybrid, host"):
        parse_placement("disk")


def test_what_fits_goes_to_the_device(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    small, large = synthetic_context(tokens=20), synthetic_context(tokens=400)
    for context in (small, large):
        context.write(store)
    budget = MemoryBytes(2**20, resident_bytes(large.manifest, CPU) - 1)
    arena = Arena(budget, kinds=KINDS, device=CPU)
    assert arena.placement(large.manifest) is Placement.HYBRID
    with (
        caplog.at_level(logging.INFO),
        arena.acquire(store, small.id) as first,
        arena.acquire(store, large.id) as second,
    ):
        assert (first.placement, second.placement) == (Placement.DEVICE, Placement.HYBRID)
        assert same(second.kv(2), large.kv[2])
        assert arena.placement(small.manifest) is Placement.DEVICE
        device = (
            resident_bytes(small.manifest, CPU) + placed_bytes(large.manifest, CPU, Placement.HYBRID).device
        )
        assert arena.stats().used.device == device
    told = [record.getMessage() for record in caplog.records if "goes to" in record.getMessage()]
    assert len(told) == 2
    assert "placement device: its" in told[0]
    assert f"placement hybrid: its {budget.device + 1} bytes do not fit into the device budget" in told[1]
    alone = Arena(MemoryBytes(host=2**20))
    assert alone.placement(large.manifest) is Placement.DEVICE


@pytest.mark.parametrize(
    ("lacking", "flag"), [("host", "raise --memory"), ("device", "raise --device-memory")]
)
def test_each_budget_binds(many: tuple[Store, list[SyntheticContext]], lacking: str, flag: str) -> None:
    store, contexts = many
    a, b, c, d = (context.id for context in contexts)
    host, device = NEEDED.host, NEEDED.device
    short = MemoryBytes(host - 1, 2**20) if lacking == "host" else MemoryBytes(2**20, device - 1)
    with pytest.raises(MemoryBudgetError, match=flag), hybrid_arena(short).acquire(store, a):
        pass
    two = MemoryBytes(2 * host, 2**20) if lacking == "host" else MemoryBytes(2**20, 2 * device)
    arena = hybrid_arena(two)
    for id_ in (a, b, a, c):
        with arena.acquire(store, id_):
            pass
    assert arena.ids() == [a, c]
    with arena.acquire(store, a), arena.acquire(store, d):
        assert arena.ids() == [a, d]
        with pytest.raises(MemoryBudgetError, match=f"{flag} or try again later"), arena.acquire(store, b):
            pass


def test_many_threads_under_both_budgets(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    budget = MemoryBytes(3 * NEEDED.host, 2 * NEEDED.device)
    locker = RecordingLocker()
    arena = hybrid_arena(budget, locker)

    def use(seed: int) -> None:
        for turn in range(12):
            context = contexts[(seed + turn * 3) % len(contexts)]
            early = (seed + turn) % 2 == 0
            with arena.acquire(store, context.id, wait_for_memory=True, early=early) as resident:
                layer = (seed + turn) % 3
                assert same(resident.kv(layer), context.kv[layer])
                assert arena.stats().used.fits(budget)
                assert arena.stats().page_locked_bytes <= budget.host
                if turn % 5 == seed:
                    arena.drop(contexts[turn % len(contexts)].id)
                    assert same(resident.kv(layer), context.kv[layer])

    with ThreadPoolExecutor(5) as pool:
        for future in [pool.submit(use, seed) for seed in range(5)]:
            future.result(240)
    assert arena.stats().leases == 0
    arena.clear()
    wait_until(lambda: locker.locked == [])  # loads that were given up end on their own threads


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("42", 42), (" 1TB ", 10**12)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "much", "-1GiB", "0", "8 GiBs", "8gib", "1e9", "GiB", "9" * 400, "١GiB"]
)
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="8GiB"):
        parse_size(text)


def test_free_memory_is_less_than_the_machine_has() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50


V2 = {"memory.max": "{limit}", "memory.current": "{used}", "memory.stat": "anon 5\ninactive_file {cached}"}
V1 = {
    "memory/memory.limit_in_bytes": "{limit}",
    "memory/memory.usage_in_bytes": "{used}",
    "memory/memory.stat": "inactive_file 5\ntotal_inactive_file {cached}",
}
MIB = 2**20


@pytest.mark.parametrize("files", [V2, V1])
@pytest.mark.parametrize(("used", "free"), [(10, 9), (16, 3), (40, 0)])
def test_what_a_container_uses_is_not_free(
    files: dict[str, str], used: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text.format(limit=16 * MIB, used=used * MIB, cached=3 * MIB) + "\n")
    monkeypatch.setattr(memory_sizes, "_CGROUP", tmp_path)
    assert free_memory(torch.device("cpu")) == free * MIB


def test_a_container_without_a_limit_has_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(memory_sizes, "_CGROUP", tmp_path)
    assert free_memory(torch.device("cpu")) > 2**20


def make_layers(count: int, layers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, count, 2, 8, generator=generator) for _ in range(layers)]


def pieces_of(layers: list[Tensor], rows: int, asked: list[int]) -> Iterator[Tensor]:
    for layer in layers:
        for start in range(0, layer.shape[1], rows):
            asked.append(start)
            yield layer[:, start : start + rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_pieces_come_in_order_and_one_ahead(rows: int, device: torch.device) -> None:
    layers = make_layers(8, 3)
    reader = BlockReader((2, rows, 2, 8), torch.float32, device)
    for again in range(2):  # the same blocks serve any number of starts
        asked: list[int] = []
        reader.start(pieces_of(layers, rows, asked))
        for layer in layers:
            read = []
            for start in range(0, 8, rows):
                before = len(asked)
                read.append(reader.next().cpu().clone())
                assert len(asked) in (before, before + 1)
                assert read[-1].shape[1] == min(rows, 8 - start)
            assert torch.equal(torch.cat(read, dim=1), layer), again
        with pytest.raises(ValueError, match="all pieces"):
            reader.next()
    assert reader.nbytes == 2 * 2 * rows * 2 * 8 * 4
    reader.end()
    assert reader.nbytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_start_forgets_what_was_left(device: torch.device) -> None:
    layers = make_layers(8, 2)
    reader = BlockReader((2, 4, 2, 8), torch.float32, device)
    reader.start(pieces_of(layers, 4, []))
    reader.next()
    reader.start(pieces_of(layers[1:], 4, []))
    assert torch.equal(reader.next().cpu(), layers[1][:, :4])
    reader.start(iter(()))
    with pytest.raises(ValueError, match="all pieces"):
        reader.next()


@pytest.mark.gpu
def test_blocks_are_not_overwritten_while_they_are_read() -> None:
    """Slow reading on the main stream, fast copies on the side."""
    device = torch.device("cuda")
    layers = [torch.full((2, 4096, 2, 64), float(n)).pin_memory() for n in range(12)]
    reader = BlockReader((2, 4096, 2, 64), torch.float32, device)
    reader.start(iter(layers))
    seen = []
    for _ in layers:
        block = reader.next()
        torch.cuda._sleep(20_000_000)
        seen.append((block.amin(), block.amax()))
    reader.end()
    assert [(float(low), float(high)) for low, high in seen] == [(n, n) for n in range(12)]
