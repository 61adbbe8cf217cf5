"""Indexes that a published context gains: readers see it as it was or as it is, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.errors import ContextNotFoundError, InvalidArgumentError, UnexpectedFileError
from index_store.store import listing
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up, find_leftovers
from index_store.store.writer import ContextWriter
from tests.index_store.store.writing.writer_processes import add
from tests.support.forking import killed_at_each_step
from tests.support.store import CREATED, SyntheticContext, add_index, synthetic_context


def names(store: Store) -> list[str]:
    return sorted(os.listdir(store.path / "contexts"))


def test_readers_keep_their_view(stored: Store, context: SyntheticContext) -> None:
    path = context.draft.indexes[0].arrays[0].path
    with stored.open(context.id) as before:
        added, arrays = add_index(stored, context.manifest)
        assert before.manifest == context.manifest
        assert torch.equal(before.array(path, 1, 1), context.arrays[path][0, 1])
        with pytest.raises(InvalidArgumentError, match="no array 'index/more/a'"):
            before.array("index/more/a", 0, 0)
    assert stored.manifest(context.id) == Store(stored.path).manifest(context.id) == added
    assert [index.name for index in added.indexes] == ["tables", "more"]
    with stored.open(context.id) as after, stored.open(context.id, context.manifest) as earlier:
        for name, data in arrays.items():
            head = torch.empty(3)
            after.read_head(name, 2, 1, head)
            assert torch.equal(head, data[2, 1])
        assert torch.equal(after.array(path, 1, 1), context.arrays[path][0, 1])
        assert earlier.manifest == context.manifest
    assert stored.verify(context.id) == []
    assert names(stored) == [context.id]
    assert clean_up(stored) == []


def test_a_context_without_any_index_gains_two(store: Store) -> None:
    context = synthetic_context(index_dtypes=())
    context.write(store)
    assert not (store.path / "contexts" / context.id / "index").exists()
    first, _ = add_index(store, context.manifest, "one")
    second, _ = add_index(store, first, "two", seed=1)
    assert [index.name for index in second.indexes] == ["tables", "one", "two"]
    assert store.manifest(context.id) == second
    assert store.verify(context.id) == []


def test_a_list_that_is_in_memory_shows_what_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_SETTLED_S", -60.0)  # trusts the folder's times at once
    contexts = [synthetic_context(seed=seed, name=f"context {seed}") for seed in range(3)]
    for context in contexts:
        context.write(store)
    assert len(store.list()) == 3
    other = Store(store.path)  # another process
    later = contexts[1].manifest.created_at + timedelta(days=1)
    changed, _ = add_index(other, contexts[1].manifest, name="more", seed=3, expires_at=later)
    assert changed in store.list()
    with other.lock(changed.id), other.writer(changed.id) as writer:
        renamed = writer.publish_into(changed, replace(changed, name="renamed"))
    assert store.resolve("renamed") == renamed.id
    with pytest.raises(ContextNotFoundError):
        store.resolve("context 1")
    assert len(store.list()) == 3


@pytest.mark.parametrize(
    "changes",
    [{"dense_layers": ()}, {"indexes": ()}, {"prefill": {}}, {"created_at": CREATED + timedelta(1)}],
)
def test_nothing_else_changes(stored: Store, context: SyntheticContext, changes: dict[str, Any]) -> None:
    present = context.manifest
    with stored.writer(present.id) as writer, pytest.raises(InvalidArgumentError, match="nothing else"):
        writer.publish_into(present, replace(present, **changes))
    assert stored.manifest(present.id) == present


def test_what_the_manifest_promises_must_have_been_written(stored: Store, context: SyntheticContext) -> None:
    present = context.manifest
    added, _ = add_index(stored, present)
    with (
        stored.writer(present.id) as writer,
        pytest.raises(InvalidArgumentError, match="the manifest lists arrays"),
    ):
        writer.publish_into(present, added)


def test_a_context_that_is_deleted_meanwhile(
    stored: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ContextWriter.write_chunk

    def delete_first(self: ContextWriter, *arguments: Any) -> None:
        if names(stored) != [] and context.id in names(stored):
            stored.delete(context.id)
        write(self, *arguments)

    monkeypatch.setattr(ContextWriter, "write_chunk", delete_first)
    with pytest.raises(ContextNotFoundError, match="was deleted while something was added"):
        add_index(stored, context.manifest)
    assert names(stored) == []


@pytest.mark.parametrize("indexes", [("int8",), ()])
def test_killed_at_any_step(tmp_path: Path, indexes: tuple[str, ...]) -> None:
    context = synthetic_context(tokens=20, index_dtypes=indexes)
    context.write(Store(tmp_path / "pristine", create=True))
    whole, path = tmp_path / "whole", tmp_path / "killed"
    for copy in (whole, path):
        shutil.copytree(tmp_path / "pristine", copy)
    added, _ = add_index(Store(whole), context.manifest)
    states = {"old": 0, "stray": 0, "new": 0}
    for step in killed_at_each_step(add, path, context.id):
        store = Store(path)
        found = store.manifest(context.id)
        assert found in (context.manifest, added)
        problems = store.verify(context.id)
        assert all(isinstance(problem, UnexpectedFileError) for problem in problems)
        store.open(context.id).close()
        removed = {item.kind for item in clean_up(store)}
        assert removed <= {"temporary", "index", "lock"}
        assert ("index" in removed) == bool(problems)
        states["new" if found == added else "stray" if problems else "old"] += 1
        assert store.verify(context.id) == []
        assert clean_up(store) == []
        assert names(store) == [context.id]
        if found != added and step % 4 == 0:
            assert add_index(store, found)[0] == added
            assert store.verify(context.id) == []
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "pristine", path)
    # 12 chunks, the sync and the index's rename; its sync and the manifest's rename; its sync, and the removal
    assert states == {"old": 12 + 2, "stray": 2, "new": 2}


def test_an_addition_replaces_what_a_killed_one_left(stored: Store, context: SyntheticContext) -> None:
    left = stored.path / "contexts" / context.id / "index" / "more" / "a"
    left.mkdir(parents=True)
    (left / "zarr.json").write_text("half")
    (left.parent / "c").write_text("more")
    add_index(stored, context.manifest)
    assert stored.verify(context.id) == []


def test_an_addition_brings_the_groups_metadata_that_a_killed_clean_up_removed(store: Store) -> None:
    context = synthetic_context()
    bare = replace(context, draft=replace(context.draft, indexes=()), arrays={})
    bare.write(store)
    (store.folders.context(bare.id) / "index" / "dead").mkdir(parents=True)
    added, _ = add_index(store, store.manifest(bare.id))
    with store.open(bare.id) as found:
        assert found.manifest == added
    assert [item.kind for item in clean_up(store)] == ["index"]
    assert store.verify(bare.id) == []


def test_clean_up_leaves_what_a_living_writer_has_moved(stored: Store, context: SyntheticContext) -> None:
    moved = stored.path / "contexts" / context.id / "index" / "more"
    moved.mkdir()
    (moved / "zarr.json").write_text("{}")
    with stored.lock(context.id):
        assert clean_up(stored) == []
        assert find_leftovers(stored) == []
    assert [item.kind for item in clean_up(stored, dry_run=True)] == ["index"]
    assert moved.is_dir()
    assert [item.path for item in clean_up(stored)] == [moved]
    assert not moved.exists()
    assert stored.verify(context.id) == []
