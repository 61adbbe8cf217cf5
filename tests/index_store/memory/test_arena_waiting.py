"""Waiting for the arena: for memory that others use and a load under way, in turn, no longer than is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from index_store.errors import MemoryBudgetError
from index_store.memory.arena import Arena
from index_store.memory.patience import MAX_PASSED
from index_store.store.catalog import Store
from tests.support.memory import resident_bytes
from tests.support.store import RecordingLocker, SyntheticContext, synthetic_context

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


def test_nobody_waits_for_memory_unless_told_to(many: tuple[Store, list[SyntheticContext]]) -> None:
    store, (a, b, *_) = many
    arena = Arena(SIZE)
    with arena.acquire(store, a.id), pytest.raises(MemoryBudgetError), arena.acquire(store, b.id):
        pytest.fail("leased what does not fit")


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
