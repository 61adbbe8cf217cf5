"""The arena: budget, eviction, leases, one load for many, errors that leave nothing behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from index_store.errors import (
    ChecksumError,
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    MemoryBudgetError,
    StoreError,
)
from index_store.memory.arena import Arena, Books, Slot
from index_store.store.catalog import Store
from index_store.store.zarr_io import chunk_path
from tests.support.memory import resident_bytes
from tests.support.store import CREATED, RecordingLocker, SyntheticContext, synthetic_context
from tests.support.waiting import wait_until

SIZE = resident_bytes(synthetic_context().manifest)


def ids(contexts: list[SyntheticContext]) -> list[str]:
    return [context.id for context in contexts]


def touch(arena: Arena, store: Store, context: SyntheticContext) -> None:
    with arena.acquire(store, context.id):
        pass


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_second_acquire_shares(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    arena = Arena(SIZE)
    with arena.acquire(store, contexts[0].id) as first, arena.acquire(store, contexts[0].id) as second:
        assert first is second
        assert arena.stats().leases == 2
        assert arena.stats().leased_bytes == SIZE
    with arena.acquire(store, contexts[0].id) as third:
        assert third is first
    stats = arena.stats()
    assert (stats.loads, stats.hits, stats.leases, stats.contexts) == (1, 2, 0, 1)
    assert (stats.used_bytes, stats.leased_bytes) == (SIZE, 0)


def test_least_recently_used_goes_first(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    a, b, c, d = contexts
    arena = Arena(3 * SIZE)
    for context in (a, b, c, a):
        touch(arena, store, context)
    assert arena.ids() == ids([b, c, a])
    touch(arena, store, d)
    assert arena.ids() == ids([c, a, d])
    touch(arena, store, c)
    touch(arena, store, b)
    assert arena.ids() == ids([d, c, b])
    assert arena.stats().evictions == 2


def test_pinned_contexts_go_last(many: tuple[Store, list[SyntheticContext]]) -> None:
    """Whether they were pinned before they were loaded, or are while they are here."""
    store, contexts = many
    a, b, c, d = contexts
    store.update(a.id, lambda present: replace(present, pinned=True))
    arena = Arena(2 * SIZE)
    for context in (a, b, c):
        touch(arena, store, context)
    assert arena.ids() == ids([a, c])
    arena.note(store.update(c.id, lambda present: replace(present, pinned=True)))
    touch(arena, store, d)  # all that could go are pinned
    assert arena.ids() == ids([c, d])
    store.update(c.id, lambda present: replace(present, pinned=False))
    touch(arena, store, c)
    touch(arena, store, b)
    assert arena.ids() == ids([c, b])


def test_a_lease_counts_as_use_until_it_ends(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    a, b, c, _ = contexts
    arena = Arena(2 * SIZE)
    with arena.acquire(store, a.id):
        touch(arena, store, b)
    assert arena.ids() == ids([b, a])
    touch(arena, store, c)
    assert arena.ids() == ids([a, c])


def test_leased_contexts_are_not_evicted(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    a, b, c, _ = contexts
    arena = Arena(2 * SIZE)
    with arena.acquire(store, a.id) as resident:
        for context in (b, c, b):
            touch(arena, store, context)
        assert arena.ids() == ids([a, b])
        with arena.acquire(store, b.id), pytest.raises(MemoryBudgetError) as caught:
            touch(arena, store, c)
        assert arena.ids() == ids([a, b])
        assert bits(resident.kv(1)) == bits(a.kv[1])
    message = caught.value.message
    assert f"needs {SIZE} bytes" in message
    assert f"budget of {2 * SIZE} bytes" in message
    assert f"beside {2 * SIZE} bytes in use" in message
    assert "try again later" in message
    touch(arena, store, c)


def test_a_context_larger_than_the_budget(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    arena = Arena(SIZE - 1)
    with pytest.raises(
        MemoryBudgetError, match=rf"needs {SIZE} bytes .* budget of {SIZE - 1} bytes; raise"
    ) as caught:
        touch(arena, store, contexts[0])
    assert caught.value.metadata == {"needed": str(SIZE), "budget": str(SIZE - 1), "in_use": "0"}
    assert arena.stats().used_bytes == 0


def test_nothing_is_evicted_in_vain(store: Store) -> None:
    small, other, large = (synthetic_context(tokens=tokens, seed=tokens) for tokens in (20, 30, 400))
    for context in (small, other, large):
        context.write(store)
    arena = Arena(resident_bytes(large.manifest))
    touch(arena, store, small)
    with arena.acquire(store, other.id), pytest.raises(MemoryBudgetError):
        touch(arena, store, large)
    assert arena.ids() == ids([small, other])
    touch(arena, store, large)
    assert arena.ids() == [large.id]


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_is_positive(budget: int) -> None:
    with pytest.raises(InvalidArgumentError, match="positive"):
        Arena(budget)


def test_many_threads_load_once(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    locker = RecordingLocker()
    arena = Arena(SIZE, locker)
    locker.before = lambda: wait_until(lambda: arena.stats().leases == 16)
    begin, together = threading.Barrier(16), threading.Barrier(16)

    def use() -> int:
        begin.wait()
        with arena.acquire(store, contexts[0].id) as resident:
            together.wait(60)
            return id(resident)

    with ThreadPoolExecutor(16) as pool:
        found = {future.result() for future in [pool.submit(use) for _ in range(16)]}
    assert len(found) == 1
    assert len(locker.locked) == 1
    stats = arena.stats()
    assert (stats.loads, stats.hits, stats.leases) == (1, 15, 0)


def test_loading_one_does_not_hold_up_another(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, (slow, fast, other, _) = many
    locker = RecordingLocker()
    loading, proceed = threading.Event(), threading.Event()
    arena = Arena(2 * SIZE, locker)

    def wait_once() -> None:
        if not loading.is_set():
            loading.set()
            assert proceed.wait(60)

    locker.before = wait_once
    thread = threading.Thread(target=touch, args=(arena, store, slow))
    thread.start()
    assert loading.wait(60)
    with arena.acquire(store, fast.id):
        assert arena.ids() == [fast.id]
        assert arena.stats().used_bytes == 2 * SIZE
        with pytest.raises(MemoryBudgetError):  # what is being loaded cannot be evicted
            touch(arena, store, other)
    proceed.set()
    thread.join(60)
    assert set(arena.ids()) == {slow.id, fast.id}


def test_an_error_while_loading_reaches_everyone_and_leaves_nothing(
    stored: Store, context: SyntheticContext
) -> None:
    path = chunk_path(stored.path / "contexts" / context.id, context.manifest.kv, (2, 1))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    arena = Arena(SIZE)
    begin = threading.Barrier(8)

    def use() -> str:
        begin.wait()
        with pytest.raises(ChecksumError) as caught:
            touch(arena, stored, context)
        return caught.value.metadata["path"]

    with ThreadPoolExecutor(8) as pool:
        assert {future.result() for future in [pool.submit(use) for _ in range(8)]} == {str(path)}
    stats = arena.stats()
    assert (stats.used_bytes, stats.leases, stats.contexts, stats.loads) == (0, 0, 0, 0)
    path.write_bytes(good)
    touch(arena, stored, context)
    assert arena.ids() == [context.id]


def test_an_interrupted_load_frees_its_place(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    locker = RecordingLocker()
    arena = Arena(SIZE, locker)

    def interrupt() -> None:
        raise KeyboardInterrupt

    locker.before = interrupt
    with pytest.raises(StoreError, match="interrupted"):
        touch(arena, store, contexts[0])
    assert arena.stats().used_bytes == 0
    locker.before = lambda: None
    touch(arena, store, contexts[0])


def test_drop(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    a, b, *_ = contexts
    arena = Arena(2 * SIZE)
    assert not arena.drop(a.id)
    touch(arena, store, a)
    assert arena.drop(a.id)
    with arena.acquire(store, b.id) as resident:
        assert not arena.drop(b.id)
        assert bits(resident.kv(0)) == bits(b.kv[0])
        assert arena.stats().contexts == 1
    assert arena.stats().used_bytes == 0
    with arena.acquire(store, b.id):
        arena.drop(b.id)
        with arena.acquire(store, b.id):  # wanted again
            pass
    assert arena.ids() == [b.id]
    touch(arena, store, a)
    arena.clear()
    assert arena.stats().used_bytes == 0


def test_a_deleted_context_is_not_served_from_memory(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(SIZE)
    with arena.acquire(stored, context.id) as resident:
        stored.delete(context.id)
        assert bits(resident.kv(0)) == bits(context.kv[0])
        with pytest.raises(ContextNotFoundError):
            touch(arena, stored, context)
    assert arena.stats().used_bytes == 0


def test_an_expired_context_is_not_served_from_memory(store: Store) -> None:
    context = synthetic_context(ttl=timedelta(hours=1))
    context.write(store)
    now = [CREATED]
    ticking = Store(store.path, clock=lambda: now[0])
    arena = Arena(SIZE)
    touch(arena, ticking, context)
    now[0] += timedelta(hours=2)
    with pytest.raises(ContextExpiredError):
        touch(arena, ticking, context)
    assert arena.stats().used_bytes == 0


def test_an_error_of_the_user_ends_the_lease(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, contexts = many
    arena = Arena(SIZE)
    with pytest.raises(ZeroDivisionError), arena.acquire(store, contexts[0].id):
        raise ZeroDivisionError
    assert arena.stats().leases == 0


class SlowToUnlock(RecordingLocker):
    """Unlocks pages, which is done before memory is given back, only once `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving, self.go_on = threading.Event(), threading.Event()

    def unlock(self, tensor: Tensor) -> None:
        self.leaving.set()
        assert self.go_on.wait(60)
        super().unlock(tensor)


def test_memory_on_its_way_out_is_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves makes room for two; the second must not come in before it has left."""
    refused: list[str] = []
    can_hold = Books.can_hold

    def noted(books: Books, slot: Slot) -> bool:
        found = can_hold(books, slot)
        refused.extend([] if found else [slot.id])
        return found

    monkeypatch.setattr(Books, "can_hold", noted)
    large, first, second = (synthetic_context(tokens=tokens, seed=tokens) for tokens in (400, 20, 30))
    for context in (large, first, second):
        context.write(store)
    budget = resident_bytes(large.manifest)
    locker = SlowToUnlock()
    arena = Arena(budget, locker)
    touch(arena, store, large)
    with ThreadPoolExecutor(2) as pool:
        makes_room = pool.submit(touch, arena, store, first)
        assert locker.leaving.wait(60)
        finds_room = pool.submit(touch, arena, store, second)
        wait_until(lambda: len(refused) > 1)  # the second, while the first waits for the pages
        assert not makes_room.done()
        assert not finds_room.done()
        assert len(locker.locked) == 1
        stats = arena.stats()
        assert (stats.used_bytes, stats.contexts, stats.leases) == (budget, 0, 2)
        locker.go_on.set()
        makes_room.result(60)
        finds_room.result(60)
    assert set(arena.ids()) == {first.id, second.id}
    assert arena.stats().evictions == 1
