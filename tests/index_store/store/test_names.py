"""Names of contexts: one living context of a model has it, and it moves to another one in one step."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from index_store.errors import ContextAmbiguousError, NameTakenError
from index_store.store.catalog import Store, free_name, require_free, take_name, told_apart
from index_store.store.files.durable import locked_file
from tests.support.store import CREATED, SyntheticContext, synthetic_context


def model_of(context: SyntheticContext) -> str:
    return context.manifest.model.fingerprint


def test_a_name_belongs_to_one_context(store: Store) -> None:
    first = synthetic_context(name="handbook")
    first.write(store)
    model = model_of(first)
    require_free(store, "handbook", model, first.id)  # its own
    require_free(store, "another", model, "0" * 64)
    require_free(store, "handbook", "another model", "0" * 64)
    with pytest.raises(NameTakenError, match=f"belongs to context {first.id[:12]}.*--move-name"):
        require_free(store, "handbook", model, "0" * 64)
    assert free_name(store, "handbook", model, "1" * 64) == "handbook 111111"
    assert free_name(store, "handbook", model, first.id) == "handbook"
    assert len(told_apart("n" * 500, "1" * 64)) == 500


def test_one_that_has_expired_holds_no_name(store: Store) -> None:
    now = CREATED
    ticking = Store(store.path, clock=lambda: now)
    old = synthetic_context(name="handbook", ttl=timedelta(hours=1))
    old.write(ticking)
    now += timedelta(hours=2)
    require_free(ticking, "handbook", model_of(old), "0" * 64)


def test_a_name_moves_and_nothing_is_lost(store: Store) -> None:
    old, new = synthetic_context(name="handbook"), synthetic_context(seed=1, name="draft")
    for context in (old, new):
        context.write(store)
    assert take_name(store, new.id, "handbook").name == "handbook"
    assert store.resolve("handbook") == new.id
    assert store.resolve(f"handbook {old.id[:6]}") == old.id
    assert store.resolve(old.id) == old.id


def test_stores_with_several_of_one_name_open_and_are_mended(store: Store) -> None:
    contexts = [synthetic_context(seed=seed, name="same") for seed in range(3)]
    for context in contexts:
        context.write(store)
    assert len(store.list()) == 3
    with pytest.raises(ContextAmbiguousError, match="index-store name ID NAME --move-name"):
        store.resolve("same")
    take_name(store, contexts[1].id, "same")
    assert store.resolve("same") == contexts[1].id
    assert len({manifest.name for manifest in store.list()}) == 3


def test_a_name_means_the_context_of_the_model_that_asks(store: Store) -> None:
    one = synthetic_context(name="handbook")
    other = synthetic_context(name="handbook", model=replace(one.draft.model, fingerprint="f" * 64))
    for context in (one, other):
        context.write(store)
    assert store.resolve("handbook", model_of(one)) == one.id
    assert store.resolve("handbook", model_of(other)) == other.id
    with pytest.raises(ContextAmbiguousError):
        store.resolve("handbook")


def test_who_looks_while_a_name_moves_waits(store: Store) -> None:
    old, new = synthetic_context(name="handbook"), synthetic_context(seed=1, name="handbook")
    for context in (old, new):
        context.write(store)  # as in the middle of a move
    found: list[str] = []
    with locked_file(store.folders.names_lock_path()):
        looking = threading.Thread(target=lambda: found.append(store.resolve("handbook")))
        looking.start()
        store.update(old.id, lambda manifest: replace(manifest, name="older"))
    looking.join()
    assert found == [new.id]
