"""What can be changed of a published context: name, expiry, labels and pin, all at once and by one at a time."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from index_store.errors import (
    ContextBusyError,
    ContextNotFoundError,
    InvalidArgumentError,
    ManifestError,
    QuotaExceededError,
    StoreBoundError,
    UnexpectedFileError,
)
from index_store.family.children import publish_child
from index_store.store import listing
from index_store.store.catalog import Store
from index_store.store.clean_up import KEPT_BEGINNING, MARGIN, StoreRoom, clean_up, find_leftovers, note_use
from index_store.store.description.json_fields import render_document
from index_store.store.description.manifest import FORMAT_VERSION, MANIFEST_NAME, MANIFESTS, Manifest
from index_store.store.files import durable
from index_store.store.writer import ContextWriter
from tests.index_store.store.writing.writer_processes import add
from tests.support.forking import killed_at_each_step
from tests.support.store import CREATED, SyntheticContext, add_index, continuation, synthetic_context


def test_a_change_is_there_for_everybody(store: Store) -> None:
    context = synthetic_context()
    id_ = context.write(store)
    with store.open(id_) as opened:
        changed = store.update(
            id_, lambda present: replace(present, name="book", labels={"a": "b"}, pinned=True)
        )
        assert opened.tokens().tolist() == context.tokens.tolist()
    other = Store(store.path)
    assert (
        changed
        == store.manifest(id_)
        == other.manifest(id_)
        == replace(context.manifest, name="book", labels={"a": "b"}, pinned=True)
    )
    assert [entry.name for entry in store.list()] == ["book"]
    assert store.resolve("book") == id_
    assert store.verify(id_) == []
    assert sorted(os.listdir(store.path / "contexts")) == [id_]


def test_a_pinned_context_expires_when_it_is_unpinned(store: Store) -> None:
    id_ = synthetic_context(ttl=timedelta(hours=1)).write(store)
    assert store.expired(store.manifest(id_))
    store.update(id_, lambda present: replace(present, pinned=True))
    assert not store.expired(store.manifest(id_))
    assert clean_up(store) == []
    store.update(id_, lambda present: replace(present, pinned=False))
    assert [item.kind for item in clean_up(store)] == ["expired"]


def test_an_older_manifest_is_written_as_one_of_this_version(store: Store) -> None:
    context = synthetic_context()
    id_ = context.write(store)
    path = store.path / "contexts" / id_ / MANIFEST_NAME
    document: dict[str, Any] = json.loads(path.read_bytes())
    del document["checksum"]
    path.write_bytes(render_document(document | {"format_version": 2, "salt": "owner"}))
    assert store.manifest(id_).format_version == 2
    store.update(id_, lambda present: replace(present, labels={"a": "b"}))
    assert Store(store.path).manifest(id_) == replace(context.manifest, labels={"a": "b"})
    assert store.manifest(id_).format_version == FORMAT_VERSION


def test_nothing_else_can_be_changed(store: Store) -> None:
    id_ = synthetic_context().write(store)
    before = store.manifest(id_)
    with pytest.raises(
        InvalidArgumentError, match="only name, expires_at, labels, pinned, readers, renew can be changed"
    ):
        store.update(id_, lambda present: replace(present, methods=("full",)))
    with pytest.raises(ManifestError, match="'labels key' is 'A'"):
        store.update(id_, lambda present: replace(present, labels={"A": "b"}))
    assert store.manifest(id_) == before
    with pytest.raises(ContextNotFoundError):
        store.update("0" * 64, lambda present: present)


def test_who_changes_a_context_waits_for_no_job(store: Store) -> None:
    id_ = synthetic_context().write(store)
    with store.lock(id_), pytest.raises(ContextBusyError, match="try again when it is done"):
        store.update(id_, lambda present: replace(present, pinned=True), wait_s=0.0)


def test_a_context_that_is_deleted_meanwhile_stays_deleted(store: Store) -> None:
    id_ = synthetic_context().write(store)

    def change(present: Manifest) -> Manifest:
        store.delete(id_)
        return replace(present, pinned=True)

    with pytest.raises(ContextNotFoundError):
        store.update(id_, change)
    assert os.listdir(store.path / "contexts") == []


def test_what_a_killed_update_leaves_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    context = synthetic_context(created=CREATED)
    id_ = context.write(store)
    left: list[Path] = []

    class Killed(BaseException):
        pass

    def kill(source: Path, target: Path) -> None:
        left.append(Path(source).rename(f"{source}x"))  # as if nothing had been cleaned up
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "replace", kill)
        with pytest.raises(Killed):
            store.update(id_, lambda present: replace(present, pinned=True))
    assert store.manifest(id_) == context.manifest
    assert [item.path for item in clean_up(store)] == left
    assert not left[0].exists()


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
    # 12 chunks, the sync and the index's rename; its sync and the manifest's rename; the removal
    assert states == {"old": 12 + 2, "stray": 2, "new": 1}


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


HOUR = timedelta(hours=1)


class Ticking:
    """A store whose clock is set by hand."""

    def __init__(self, path: Path) -> None:
        self.now = CREATED
        self.store = Store(path, create=True, clock=lambda: self.now)

    def make(self, seed: int, used: datetime = CREATED, **options: Any) -> SyntheticContext:
        """Writes a context that was used last then."""
        context = synthetic_context(seed=seed, **options)
        context.write(self.store)
        self.use(context.id, used)
        return context

    def use(self, id_: str, at: datetime = CREATED) -> None:
        os.utime(self.store.folders.context(id_), (at.timestamp(), at.timestamp()))

    def ids(self) -> set[str]:
        return {manifest.id for manifest in self.store.list()}


@pytest.fixture
def ticking(tmp_path: Path) -> Ticking:
    return Ticking(tmp_path / "ticking")


def size(context: SyntheticContext) -> int:
    return context.manifest.kv_bytes + context.manifest.index_bytes


def test_what_expired_goes_after_a_margin(ticking: Ticking) -> None:
    short, long = ticking.make(1, ttl=HOUR), ticking.make(2, ttl=3 * HOUR)
    room = StoreRoom(ticking.store)
    ticking.now = CREATED + HOUR + MARGIN / 2
    assert room.sweep() == []
    ticking.now = CREATED + HOUR + MARGIN
    note_use(ticking.store, short.id)  # by a server whose session goes on, now by the clock of the machine
    ticking.use(short.id, ticking.now)
    assert room.sweep() == []
    ticking.now += 2 * MARGIN
    assert room.sweep() == [short.id]
    assert ticking.ids() == {long.id}


def test_a_parent_stays_while_a_child_lives_and_a_pinned_one_for_good(ticking: Ticking) -> None:
    pinned = ticking.make(1, ttl=HOUR)
    ticking.store.update(pinned.id, lambda manifest: replace(manifest, pinned=True))
    locked = ticking.make(2, ttl=HOUR)
    parent = ticking.make(3, ttl=HOUR)
    child = publish_child(ticking.store, continuation(ticking.store, parent.id))
    ticking.now = CREATED + 24 * HOUR
    for id_ in (pinned.id, child.id):
        ticking.use(id_)
    with ticking.store.lock(locked.id):
        assert StoreRoom(ticking.store).sweep() == []
    assert StoreRoom(ticking.store).sweep() == [locked.id]
    assert ticking.ids() == {pinned.id, parent.id, child.id}


def test_a_bound_takes_only_what_may_go_the_least_recently_used_first(ticking: Ticking) -> None:
    wanted = ticking.make(1)  # without an expiry: somebody wants it for good
    later = ticking.make(2, used=CREATED + HOUR, ttl=100 * HOUR)
    sooner = ticking.make(3, ttl=100 * HOUR)
    beginning = ticking.make(4, used=CREATED + 2 * HOUR)
    ticking.store.update(beginning.id, lambda manifest: replace(manifest, labels={KEPT_BEGINNING: ""}))
    ticking.use(beginning.id, CREATED + 2 * HOUR)
    ticking.now = CREATED + 10 * HOUR
    one = size(wanted)
    room = StoreRoom(ticking.store, 4 * one)
    assert room.used() == 4 * one
    room.require(3 * one)
    with pytest.raises(StoreBoundError, match=r"does not fit.*may go, and --store-bytes is"):
        room.make(3 * one + 1)
    assert len(ticking.ids()) == 4  # nothing went for nothing
    assert room.make(one) == [sooner.id]
    assert room.make(2 * one) == [later.id]
    assert StoreRoom(ticking.store, 1).sweep() == [beginning.id]
    assert ticking.ids() == {wanted.id}
    assert StoreRoom(ticking.store).make(10**18) == []


def test_a_tenants_quota_takes_what_of_its_own_may_go(ticking: Ticking) -> None:
    kept, gone, others = ticking.make(1), ticking.make(2, ttl=100 * HOUR), ticking.make(3, ttl=100 * HOUR)
    owners = {kept.id: "ant", gone.id: "ant", others.id: "bee"}
    for id_, tenant in owners.items():
        path = ticking.store.folders.context(id_) / "manifest.json"
        path.write_bytes(MANIFESTS.render(replace(ticking.store.manifest(id_), tenant=tenant)))
    ticking.now = CREATED + 10 * HOUR
    one = size(kept)
    for id_ in owners:
        ticking.use(id_)
    room = StoreRoom(ticking.store, quota={"ant": 2 * one, "bee": 2 * one}.get)
    assert (room.used("ant"), room.used("bee"), room.used()) == (2 * one, one, 3 * one)
    room.require(one, "ant")
    for coming, nbytes in ((0, one + 1), (1, one)):
        with pytest.raises(QuotaExceededError) as caught:
            room.require(nbytes, "ant", coming)
        assert caught.value.metadata == {
            "limit": "stored_bytes",
            "found": str(2 * one + coming),
            "wanted": str(nbytes),
            "allowed": str(2 * one),
        }
    assert caught.value.retry_after_s is None
    assert room.make(one, "bee") == []
    assert room.make(one, "ant") == [gone.id]
    assert ticking.ids() == {kept.id, others.id}
    assert room.make(10**18, "cat") == []


def test_what_was_used_lately_does_not_go(ticking: Ticking) -> None:
    context = ticking.make(1, ttl=100 * HOUR)
    ticking.now = CREATED + MARGIN / 2
    with pytest.raises(StoreBoundError):
        StoreRoom(ticking.store, size(context)).make(1)
    ticking.now = CREATED + 2 * MARGIN
    assert StoreRoom(ticking.store, size(context)).make(1) == [context.id]


def test_what_a_context_will_take(ticking: Ticking) -> None:
    room = StoreRoom(ticking.store)
    context = synthetic_context()
    kind = (context.draft.model, context.draft.dtype, context.draft.token_count)
    rows = context.manifest.kv_bytes
    assert room.needed("0" * 64, *kind, ()) == rows
    assert room.needed("0" * 64, *kind, context.draft.methods) == 2 * rows
    ticking.make(0)
    assert room.needed("0" * 64, *kind, context.draft.methods) == size(context)
    assert room.needed(context.id, *kind, context.draft.methods) == 0
