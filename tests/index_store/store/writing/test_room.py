"""What a store may hold: what expired goes by itself, and what may go makes room within a bound."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from index_store.errors import StoreBoundError
from index_store.family.children import publish_child
from index_store.store.catalog import Store
from index_store.store.clean_up import KEPT_BEGINNING, MARGIN, StoreRoom, note_use
from tests.support.store import CREATED, SyntheticContext, continuation, synthetic_context

HOUR = timedelta(hours=1)


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.now = CREATED


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ticking(store: Store, clock: Clock) -> Store:
    return Store(store.path, clock=lambda: clock.now)


@pytest.fixture
def made(ticking: Store, clock: Clock) -> Callable[..., SyntheticContext]:
    """Writes contexts that were used last when they were made."""

    def make(seed: int, used: datetime = CREATED, **options: object) -> SyntheticContext:
        context = synthetic_context(seed=seed, **options)  # type: ignore[arg-type]
        context.write(ticking)
        os.utime(ticking.folders.context(context.id), (used.timestamp(), used.timestamp()))
        return context

    return make


def ids(store: Store) -> set[str]:
    return {manifest.id for manifest in store.list()}


def size(context: SyntheticContext) -> int:
    return context.manifest.kv_bytes + context.manifest.index_bytes


def test_what_expired_goes_after_a_margin(
    ticking: Store, clock: Clock, made: Callable[..., SyntheticContext]
) -> None:
    short, long = made(1, ttl=HOUR), made(2, ttl=3 * HOUR)
    room = StoreRoom(ticking)
    clock.now = CREATED + HOUR + MARGIN / 2
    assert room.sweep() == []
    clock.now = CREATED + HOUR + MARGIN
    note_use(ticking, short.id)  # by a server whose session goes on, now by the clock of the machine
    os.utime(ticking.folders.context(short.id), (clock.now.timestamp(), clock.now.timestamp()))
    assert room.sweep() == []
    clock.now += 2 * MARGIN
    assert room.sweep() == [short.id]
    assert ids(ticking) == {long.id}


def test_a_parent_stays_while_a_child_lives_and_a_pinned_one_for_good(
    ticking: Store, clock: Clock, made: Callable[..., SyntheticContext]
) -> None:
    pinned = made(1, ttl=HOUR)
    ticking.update(pinned.id, lambda manifest: replace(manifest, pinned=True))
    locked = made(2, ttl=HOUR)
    parent = made(3, ttl=HOUR)
    child = publish_child(ticking, continuation(ticking, parent.id))
    clock.now = CREATED + 24 * HOUR
    for id_ in (pinned.id, child.id):
        os.utime(ticking.folders.context(id_), (CREATED.timestamp(), CREATED.timestamp()))
    with ticking.lock(locked.id):
        assert StoreRoom(ticking).sweep() == []
    assert StoreRoom(ticking).sweep() == [locked.id]
    assert ids(ticking) == {pinned.id, parent.id, child.id}


def test_a_bound_takes_only_what_may_go_the_least_recently_used_first(
    ticking: Store, clock: Clock, made: Callable[..., SyntheticContext]
) -> None:
    wanted = made(1)  # without an expiry: somebody wants it for good
    later = made(2, used=CREATED + HOUR, ttl=100 * HOUR)
    sooner = made(3, ttl=100 * HOUR)
    beginning = made(4, used=CREATED + 2 * HOUR)
    ticking.update(beginning.id, lambda manifest: replace(manifest, labels={KEPT_BEGINNING: ""}))
    used = CREATED + 2 * HOUR
    os.utime(ticking.folders.context(beginning.id), (used.timestamp(), used.timestamp()))
    clock.now = CREATED + 10 * HOUR
    one = size(wanted)
    room = StoreRoom(ticking, 4 * one)
    assert room.used() == 4 * one
    room.require(3 * one)
    with pytest.raises(StoreBoundError, match=r"does not fit.*may go, and --store-bytes is"):
        room.make(3 * one + 1)
    assert len(ids(ticking)) == 4  # nothing went for nothing
    assert room.make(one) == [sooner.id]
    assert room.make(2 * one) == [later.id]
    assert StoreRoom(ticking, 1).sweep() == [beginning.id]
    assert ids(ticking) == {wanted.id}
    assert StoreRoom(ticking).make(10**18) == []


def test_what_was_used_lately_does_not_go(
    ticking: Store, clock: Clock, made: Callable[..., SyntheticContext]
) -> None:
    context = made(1, ttl=100 * HOUR)
    clock.now = CREATED + MARGIN / 2
    with pytest.raises(StoreBoundError):
        StoreRoom(ticking, size(context)).make(1)
    clock.now = CREATED + 2 * MARGIN
    assert StoreRoom(ticking, size(context)).make(1) == [context.id]


def test_what_a_context_will_take(ticking: Store, made: Callable[..., SyntheticContext]) -> None:
    room = StoreRoom(ticking)
    context = synthetic_context()
    kind = (context.draft.model, context.draft.dtype, context.draft.token_count)
    rows = context.manifest.kv_bytes
    assert room.needed("0" * 64, *kind, ()) == rows
    assert room.needed("0" * 64, *kind, context.draft.methods) == 2 * rows
    made(0)
    assert room.needed("0" * 64, *kind, context.draft.methods) == size(context)
    assert room.needed(context.id, *kind, context.draft.methods) == 0
