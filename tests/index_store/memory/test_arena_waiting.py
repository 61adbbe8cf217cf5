"""Waiting for the arena, and leases that come before the layers, which end with the last one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch import Tensor

from index_store.errors import ChecksumError, MemoryBudgetError
from index_store.memory.arena import Arena
from index_store.memory.context_loading import LoadedContext
from index_store.memory.patience import MAX_PASSED
from index_store.memory.placement import MemoryBytes
from index_store.store.catalog import Store
from index_store.store.stored_context import Context
from index_store.store.zarr_io import chunk_path
from tests.index_store.memory.hybrid_arenas import NEEDED, hybrid_arena, no_collector, same
from tests.support.memory import resident_bytes
from tests.support.store import KINDS, RecordedIndex, RecordingLocker, SyntheticContext, synthetic_context
from tests.support.waiting import wait_until

SIZE = resident_bytes(synthetic_context().manifest)
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


def test_memory_is_waited_for(pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]) -> None:
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


def test_a_dropped_context_makes_room_too(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        _, waiting = start_waiting(pool, arena, store, b)
        arena.drop(a.id)
    assert waiting.result(SOON) == b.id
    assert arena.ids() == [b.id]


def test_waiting_ends_with_the_interest(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id):
        interest, waiting = start_waiting(pool, arena, store, b)
        interest.lost.set()
        with pytest.raises(GoneError):
            waiting.result(SOON)
        stats = arena.stats()
        assert (stats.leases, stats.used_bytes, stats.loads) == (1, SIZE, 1)
    assert lease(arena, store, b, lambda: None) == b.id


def test_what_can_never_fit_is_refused_at_once(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, (a, *_) = many
    interest = Interest()
    with pytest.raises(MemoryBudgetError, match="raise --memory"):
        lease(Arena(SIZE - 1), store, a, interest)
    assert not interest.asked.is_set()


def test_waiting_for_a_load_ends_with_the_interest(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
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


def test_a_load_that_nobody_wants_any_more_is_kept_for_the_next(
    many: tuple[Store, list[SyntheticContext]],
) -> None:
    store, (a, *_) = many
    interest = Interest()
    interest.lost.set()
    arena = Arena(SIZE)
    with pytest.raises(GoneError):
        lease(arena, store, a, interest)
    assert arena.ids() == [a.id]
    assert arena.stats().leases == 0


def test_leases_that_overlap_do_not_keep_others_out_for_ever(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
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


def test_nobody_waits_behind_one_who_has_lost_interest(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
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


def test_who_waits_is_served_in_order_of_arrival(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
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


def test_who_does_not_wait_is_never_held_back(
    pool: ThreadPoolExecutor, many: tuple[Store, list[SyntheticContext]]
) -> None:
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
