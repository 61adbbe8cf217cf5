"""The arena: budget, eviction, leases, one load for many, errors that leave nothing behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta

import pytest
from torch import Tensor

from index_store.errors import (
    ChecksumError,
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    MemoryBudgetError,
    QuotaExceededError,
    StoreError,
)
from index_store.memory.arena import Arena, Books, Slot
from index_store.memory.context_loading import LoadedContext
from index_store.memory.patience import MAX_PASSED
from index_store.memory.placement import MemoryBytes
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.stored_context import Context
from index_store.store.zarr_io import chunk_path
from tests.index_store.memory.hybrid_arenas import NEEDED, hybrid_arena, no_collector, same
from tests.support.memory import resident_bytes
from tests.support.store import (
    CREATED,
    KINDS,
    RecordedIndex,
    RecordingLocker,
    SyntheticContext,
    bits,
    raising,
    synthetic_context,
)
from tests.support.waiting import wait_until

Many = tuple[Store, list[SyntheticContext]]
"""A store, and contexts that are in it."""

SIZE = resident_bytes(synthetic_context().manifest)


def ids(contexts: list[SyntheticContext]) -> list[str]:
    return [context.id for context in contexts]


def touch(arena: Arena, store: Store, context: SyntheticContext) -> None:
    with arena.acquire(store, context.id):
        pass


def test_second_acquire_shares(many: Many) -> None:
    store, contexts = many
    arena = Arena(SIZE)
    with arena.acquire(store, contexts[0].id) as first, arena.acquire(store, contexts[0].id) as second:
        assert first is second
        assert arena.stats().leases == 2
        assert arena.stats().leased.total == SIZE
    with arena.acquire(store, contexts[0].id) as third:
        assert third is first
    stats = arena.stats()
    assert (stats.loads, stats.hits, stats.leases, stats.contexts) == (1, 2, 0, 1)
    assert (stats.used.total, stats.leased.total) == (SIZE, 0)


def test_least_recently_used_goes_first(many: Many) -> None:
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


def test_pinned_contexts_go_last(many: Many) -> None:
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


def hold_once(arena: Arena, store: Store, manifest: Manifest) -> str:
    with arena.acquire(store, manifest.id, manifest=manifest, wait_for_memory=True) as resident:
        return resident.manifest.id


def test_a_tenant_has_its_own_contexts_evicted_for_its_quota(many: Many) -> None:
    store, contexts = many
    a, b, c, d = contexts
    tenants = {
        context.id: tenant for context, tenant in zip(contexts, ("ant", "ant", "bee", "ant"), strict=True)
    }
    owned = {id_: replace(store.manifest(id_), tenant=tenant) for id_, tenant in tenants.items()}
    arena = Arena(4 * SIZE, quota=lambda tenant: 2 * SIZE if tenant == "ant" else None)

    def take(context: SyntheticContext) -> AbstractContextManager[object]:
        return arena.acquire(store, context.id, manifest=owned[context.id], wait_for_memory=True)

    for context in (a, c, b):
        with take(context):
            pass
    assert arena.held_by_tenant() == {"ant": 2 * SIZE, "bee": SIZE}
    with take(b), take(d):
        assert arena.ids() == ids([c, b, d]), (
            "not the one that was used least of all, which is another tenant's"
        )
        with pytest.raises(QuotaExceededError) as caught, take(a):
            pass
        assert caught.value.metadata["limit"] == "resident_bytes"
        assert (caught.value.metadata["found"], caught.value.retry_after_s) == (str(2 * SIZE), 1.0)
        with take(d), take(c):
            pass
    with take(a):
        assert arena.stats().contexts == 3
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:  # all begin while it is not there, and are one load
            one = Arena(4 * SIZE, quota=lambda tenant: SIZE)
            holding = [pool.submit(hold_once, one, store, owned[a.id]) for _ in range(4)]
            assert {each.result() for each in holding} == {a.id}
    small = Arena(4 * SIZE, quota=lambda tenant: SIZE - 1)
    with pytest.raises(QuotaExceededError) as caught, small.acquire(store, a.id, manifest=owned[a.id]):
        pass
    assert caught.value.retry_after_s is None, "it never fits"


def test_a_lease_counts_as_use_until_it_ends(many: Many) -> None:
    store, contexts = many
    a, b, c, _ = contexts
    arena = Arena(2 * SIZE)
    with arena.acquire(store, a.id):
        touch(arena, store, b)
    assert arena.ids() == ids([b, a])
    touch(arena, store, c)
    assert arena.ids() == ids([a, c])


def test_leased_contexts_are_not_evicted(many: Many) -> None:
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


def test_a_context_larger_than_the_budget(many: Many) -> None:
    store, contexts = many
    arena = Arena(SIZE - 1)
    with pytest.raises(
        MemoryBudgetError, match=rf"needs {SIZE} bytes .* budget of {SIZE - 1} bytes; raise"
    ) as caught:
        touch(arena, store, contexts[0])
    assert caught.value.metadata == {"needed": str(SIZE), "budget": str(SIZE - 1), "in_use": "0"}
    assert arena.stats().used.total == 0


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


def test_many_threads_load_once(many: Many) -> None:
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


def test_loading_one_does_not_hold_up_another(many: Many) -> None:
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
        assert arena.stats().used.total == 2 * SIZE
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
    assert (stats.used.total, stats.leases, stats.contexts, stats.loads) == (0, 0, 0, 0)
    path.write_bytes(good)
    touch(arena, stored, context)
    assert arena.ids() == [context.id]


def test_an_interrupted_load_frees_its_place(many: Many) -> None:
    store, contexts = many
    locker = RecordingLocker()
    arena = Arena(SIZE, locker)

    locker.before = raising(KeyboardInterrupt)
    with pytest.raises(StoreError, match="interrupted"):
        touch(arena, store, contexts[0])
    assert arena.stats().used.total == 0
    locker.before = lambda: None
    touch(arena, store, contexts[0])


def test_drop(many: Many) -> None:
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
    assert arena.stats().used.total == 0
    with arena.acquire(store, b.id):
        arena.drop(b.id)
        with arena.acquire(store, b.id):  # wanted again
            pass
    assert arena.ids() == [b.id]
    touch(arena, store, a)
    arena.clear()
    assert arena.stats().used.total == 0


def test_a_deleted_context_is_not_served_from_memory(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(SIZE)
    with arena.acquire(stored, context.id) as resident:
        stored.delete(context.id)
        assert bits(resident.kv(0)) == bits(context.kv[0])
        with pytest.raises(ContextNotFoundError):
            touch(arena, stored, context)
    assert arena.stats().used.total == 0


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
    assert arena.stats().used.total == 0


def test_an_error_of_the_user_ends_the_lease(many: Many) -> None:
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
        assert (stats.used.total, stats.contexts, stats.leases) == (budget, 0, 2)
        locker.go_on.set()
        makes_room.result(60)
        finds_room.result(60)
    assert set(arena.ids()) == {first.id, second.id}
    assert arena.stats().evictions == 1


SOON = 60.0  # seconds; far more than 50 ms, also on a busy machine


class GoneError(Exception):
    """The one who waits has lost interest."""


class Interest:
    """A check that raises once it is told to, and knows that it was asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.lost = threading.Event()

    def __call__(self) -> None:
        self.asked.set()
        if self.lost.is_set():
            raise GoneError

    def still_waits(self) -> None:
        """Returns when it was asked again."""
        self.asked.clear()
        assert self.asked.wait(SOON)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def lease(arena: Arena, store: Store, context: SyntheticContext, check: Callable[[], None]) -> str:
    with arena.acquire(store, context.id, check=check, wait_for_memory=True) as resident:
        return resident.manifest.id


def start_waiting(
    pool: ThreadPoolExecutor, arena: Arena, store: Store, context: SyntheticContext
) -> tuple[Interest, Future[str]]:
    interest = Interest()
    future = pool.submit(lease, arena, store, context, interest)
    assert interest.asked.wait(SOON)
    return interest, future


def test_memory_is_waited_for(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        waiting = [start_waiting(pool, arena, store, b) for _ in range(3)]
        for interest, _ in waiting:
            interest.still_waits()
        assert arena.ids() == [a.id]
    assert [future.result(SOON) for _, future in waiting] == [b.id] * 3
    stats = arena.stats()
    assert (stats.loads, stats.hits, stats.evictions, stats.leases) == (2, 2, 1, 0)


def test_a_dropped_context_makes_room_too(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        _, waiting = start_waiting(pool, arena, store, b)
        arena.drop(a.id)
    assert waiting.result(SOON) == b.id
    assert arena.ids() == [b.id]


def test_waiting_ends_with_the_interest(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        interest, waiting = start_waiting(pool, arena, store, b)
        interest.lost.set()
        with pytest.raises(GoneError):
            waiting.result(SOON)
        stats = arena.stats()
        assert (stats.leases, stats.used.total, stats.loads) == (1, SIZE, 1)
    assert lease(arena, store, b, lambda: None) == b.id


def test_what_can_never_fit_is_refused_at_once(many: Many) -> None:
    store, (a, *_) = many
    interest = Interest()
    with pytest.raises(MemoryBudgetError, match="raise --memory"):
        lease(Arena(SIZE - 1), store, a, interest)
    assert not interest.asked.is_set()


def test_waiting_for_a_load_ends_with_the_interest(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, *_) = many
    locker = RecordingLocker()
    loading, proceed = threading.Event(), threading.Event()

    def hold() -> None:
        loading.set()
        assert proceed.wait(SOON)

    locker.before = hold
    arena = Arena(SIZE, locker)
    loader = pool.submit(lease, arena, store, a, lambda: None)
    assert loading.wait(SOON)
    impatient, gone = start_waiting(pool, arena, store, a)
    _, patient = start_waiting(pool, arena, store, a)
    impatient.lost.set()
    with pytest.raises(GoneError):
        gone.result(SOON)
    assert not loader.done()
    proceed.set()
    assert loader.result(SOON) == patient.result(SOON) == a.id
    stats = arena.stats()
    assert (stats.loads, stats.hits, stats.leases) == (1, 1, 0)


def test_a_load_that_nobody_wants_any_more_is_kept_for_the_next(many: Many) -> None:
    store, (a, *_) = many
    interest = Interest()
    interest.lost.set()
    arena = Arena(SIZE)
    with pytest.raises(GoneError):
        lease(arena, store, a, interest)
    assert arena.ids() == [a.id]
    assert arena.stats().leases == 0


def test_leases_that_overlap_do_not_keep_others_out_for_ever(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    held = arena.acquire(store, a.id, wait_for_memory=True)
    held.__enter__()
    waiting = start_waiting(pool, arena, store, b)[1]
    for _ in range(MAX_PASSED):  # each begins before the one before ends
        following = arena.acquire(store, a.id, wait_for_memory=True)
        following.__enter__()
        held.__exit__(None, None, None)
        held = following
    interest, late = start_waiting(pool, arena, store, a)
    interest.still_waits()
    assert not waiting.done()
    held.__exit__(None, None, None)
    assert waiting.result(SOON) == b.id
    assert late.result(SOON) == a.id
    assert arena.stats().loads == 3


def test_nobody_waits_behind_one_who_has_lost_interest(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        interest, gone = start_waiting(pool, arena, store, b)
        for _ in range(MAX_PASSED):
            assert lease(arena, store, a, lambda: None) == a.id
        late = start_waiting(pool, arena, store, a)[1]
        interest.lost.set()
        with pytest.raises(GoneError):
            gone.result(SOON)
        assert late.result(SOON) == a.id


def test_who_waits_is_served_in_order_of_arrival(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, *others) = many
    arena = Arena(SIZE)
    served: list[str] = []

    def note(context: SyntheticContext, interest: Interest) -> None:
        with arena.acquire(store, context.id, check=interest, wait_for_memory=True):
            served.append(context.id)

    with arena.acquire(store, a.id):
        futures = []
        for context in others:
            interest = Interest()
            futures.append(pool.submit(note, context, interest))
            assert interest.asked.wait(SOON)
    for future in futures:
        future.result(SOON)
    assert served == [context.id for context in others]


def test_who_does_not_wait_is_never_held_back(pool: ThreadPoolExecutor, many: Many) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        waiting = start_waiting(pool, arena, store, b)[1]
        for _ in range(2 * MAX_PASSED):
            with arena.acquire(store, a.id):
                assert not waiting.done()
    assert waiting.result(SOON) == b.id


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
        assert resident.gate.all_layers_ns == 0 < resident.gate.first_layer_ns
        doors.let(2)
        assert isinstance(late.result(SOON), RecordedIndex)
        assert whole.result(SOON) is resident
        resident.gate.wait_for_all()
        assert resident.gate.first_layer_ns < resident.gate.all_layers_ns
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
                resident.gate.wait_for_all()
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
