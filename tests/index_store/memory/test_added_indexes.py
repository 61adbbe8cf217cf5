"""Contexts in memory that gain an index at rest: who uses one keeps it, who comes next gets what was added."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from index_store.errors import MemoryBudgetError
from index_store.memory.arena import Arena
from index_store.store.catalog import Store
from tests.support.memory import resident_bytes
from tests.support.store import KINDS, SyntheticContext, add_index


def test_the_next_lease_has_the_index(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    size = resident_bytes(context.manifest)
    with arena.acquire(stored, context.id) as before:
        added, arrays = add_index(stored, context.manifest)
        larger = resident_bytes(added)
        with arena.acquire(stored, context.id) as after, arena.acquire(stored, context.id) as again:
            assert after is again
            assert before.manifest == context.manifest
            assert after.manifest == added
            index = after.index("more", 2)
            assert torch.equal(index.stored["a"], arrays["index/more/a"][2])  # type: ignore[attr-defined]
            assert torch.equal(before.kv(1), after.kv(1))
            assert arena.stats().used_bytes == size + larger
            assert arena.ids() == [context.id]
        assert arena.stats().leases == 1
    stats = arena.stats()
    assert (stats.contexts, stats.loads, stats.used_bytes) == (1, 2, larger)


def test_what_is_not_in_use_goes_first(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    with arena.acquire(stored, context.id):
        pass
    added, _ = add_index(stored, context.manifest)
    with arena.acquire(stored, context.id) as resident:
        assert resident.manifest == added
    assert arena.stats().used_bytes == resident_bytes(added)


def test_another_name_loads_nothing(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    with arena.acquire(stored, context.id) as before:
        with stored.writer(context.id) as writer:
            writer.publish_into(context.manifest, replace(context.manifest, name="renamed"))
        with arena.acquire(stored, context.id) as after:
            assert after is before
    assert arena.stats().loads == 1


def test_where_both_do_not_fit_the_new_one_waits_for_the_old_one(
    stored: Store, context: SyntheticContext
) -> None:
    size = resident_bytes(context.manifest)
    arena = Arena(2 * size, kinds=KINDS)
    came, looks = threading.Event(), threading.Semaphore(0)

    def acquire() -> None:
        with arena.acquire(stored, context.id, wait_for_memory=True, check=looks.release) as resident:
            if resident.manifest != context.manifest:
                came.set()

    with arena.acquire(stored, context.id):
        added, _ = add_index(stored, context.manifest)
        assert size < resident_bytes(added) <= 2 * size
        with pytest.raises(MemoryBudgetError, match="try again later"), arena.acquire(stored, context.id):
            pass
        waiting = threading.Thread(target=acquire)
        waiting.start()
        for _ in range(3):  # it has looked, and waits on
            assert looks.acquire(timeout=60)
        assert not came.is_set()
    assert came.wait(60)
    waiting.join()
    assert arena.stats().used_bytes == resident_bytes(added)


def test_dropping_frees_every_place_of_a_context(stored: Store, context: SyntheticContext) -> None:
    arena = Arena(1 << 22, kinds=KINDS)
    with arena.acquire(stored, context.id):
        add_index(stored, context.manifest)
        with arena.acquire(stored, context.id):
            assert not arena.drop(context.id)
    assert arena.stats().used_bytes == 0
    with arena.acquire(stored, context.id):
        pass
    assert arena.drop(context.id)
    assert arena.stats().used_bytes == 0
