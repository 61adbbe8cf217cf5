"""Leases that come before the layers: loading goes on behind them, fails there, and ends with the last one."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import Tensor

from index_store.errors import ChecksumError
from index_store.memory.arena import Arena
from index_store.memory.context_loading import LoadedContext
from index_store.memory.placement import (
    MemoryBytes,
)
from index_store.store.catalog import Store
from index_store.store.stored_context import Context
from index_store.store.zarr_io import chunk_path
from tests.index_store.memory.hybrid_arenas import NEEDED, hybrid_arena, no_collector, same
from tests.support.store import KINDS, RecordedIndex, RecordingLocker, SyntheticContext, synthetic_context
from tests.support.waiting import wait_until

SOON = 60.0


class Doors:
    """Lets the layers of hybrid contexts through one by one: each is locked after it has been read."""

    def __init__(self, arena_locker: RecordingLocker) -> None:
        self._locker = arena_locker
        self.open = threading.Semaphore(0)
        self._locker.before = self._wait

    def _wait(self) -> None:
        assert self.open.acquire(timeout=SOON)

    def let(self, layers: int) -> None:
        self.open.release(layers)


def test_a_lease_comes_before_the_layers(stored: Store, context: SyntheticContext) -> None:
    locker = RecordingLocker()
    doors = Doors(locker)
    arena = hybrid_arena(locker=locker)
    with (
        ThreadPoolExecutor(4) as pool,
        arena.acquire(stored, context.id, early=True) as resident,
        arena.acquire(stored, context.id, early=True) as shared,
    ):
        assert shared is resident
        assert resident.tokens().tolist() == context.tokens.tolist()
        first = pool.submit(resident.kv, 0)
        late = pool.submit(resident.index, "tables", 2)
        whole = pool.submit(arena.acquire(stored, context.id).__enter__)
        doors.let(1)
        assert same(first.result(SOON), context.kv[0])
        assert not late.done()
        assert arena.ids() == []
        assert resident.all_layers_ns == 0 < resident.first_layer_ns
        doors.let(2)
        assert isinstance(late.result(SOON), RecordedIndex)
        assert whole.result(SOON) is resident
        resident.wait_for_layers()
        assert resident.first_layer_ns < resident.all_layers_ns
        assert arena.ids() == [context.id]
        assert (arena.stats().loads, arena.stats().hits) == (1, 2)
    assert arena.ids() == [context.id]


def test_layers_come_in_order_on_the_cpu_too(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(2**20, kinds=KINDS)
    with arena.acquire(stored, context.id, early=True) as resident:
        for layer in range(3):
            assert same(resident.kv(layer), context.kv[layer])


def test_damage_reaches_those_who_need_the_layer(store: Store) -> None:
    context, other = synthetic_context(seed=1), synthetic_context(seed=2)
    for each in (context, other):
        each.write(store)
    path = chunk_path(store.path / "contexts" / context.id, context.manifest.kv, (2, 1))
    good = path.read_bytes()
    path.write_bytes(good[:5] + bytes([good[5] ^ 1]) + good[6:])
    locker = RecordingLocker()
    arena = hybrid_arena(locker=locker)
    with arena.acquire(store, other.id) as undisturbed:
        with arena.acquire(store, context.id, early=True) as resident:
            assert same(resident.kv(1), context.kv[1])
            for ask in (resident.kv, lambda layer: resident.index("tables", layer)):
                with pytest.raises(ChecksumError, match="array 'kv'") as caught:
                    ask(2)
                assert caught.value.metadata["path"] == str(path)
            with pytest.raises(ChecksumError):
                resident.wait_for_layers()
            for early in (True, False):
                with pytest.raises(ChecksumError), arena.acquire(store, context.id, early=early):
                    pytest.fail("leased what could not be loaded")
            assert same(resident.kv(1), context.kv[1])
            assert arena.ids() == [other.id]
        assert arena.stats().used == NEEDED
        assert len(locker.locked) == 3
        assert same(undisturbed.kv(2), other.kv[2])
    path.write_bytes(good)
    with arena.acquire(store, context.id, early=True) as resident:
        assert same(resident.kv(2), context.kv[2])


def test_a_reader_that_dies(
    stored: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Context.read_head

    def die(self: Context, path: str, layer: int, head: int, out: Tensor) -> None:
        if layer == 1:
            raise OSError("the disk is gone")
        read(self, path, layer, head, out)

    arena = hybrid_arena()
    monkeypatch.setattr(Context, "read_head", die)
    with arena.acquire(stored, context.id, early=True) as resident:
        assert same(resident.kv(0), context.kv[0])
        for layer in (1, 2):
            with pytest.raises(OSError, match="the disk is gone"):
                resident.kv(layer)
    assert arena.stats().used == MemoryBytes()


@no_collector()
def test_loading_ends_with_the_last_lease(
    stored: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, release = threading.Event(), LoadedContext.release
    monkeypatch.setattr(LoadedContext, "release", lambda *given: (release(*given), stopped.set())[0])
    locker = RecordingLocker()
    doors = Doors(locker)
    arena = hybrid_arena(locker=locker)
    lease = arena.acquire(stored, context.id, early=True)
    resident = lease.__enter__()
    doors.let(1)
    storage = weakref.ref(resident.kv(0).untyped_storage())
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(resident.kv, 2)
        ending = pool.submit(lease.__exit__, None, None, None)
        assert stopped.wait(SOON)
        assert arena.stats().leases == 0
        doors.let(1)  # the layer that was being locked
        ending.result(SOON)
        assert "released while it was being loaded" in str(waiting.exception(SOON))
    assert locker.locked == []
    assert arena.stats().used == MemoryBytes()
    assert arena.stats().loads == 0
    del resident, lease, waiting, ending
    wait_until(lambda: storage() is None)  # a thread that has just ended may still let go of it
