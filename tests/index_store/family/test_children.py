"""Children in a store: what they hold, what their parents are kept for, and what is refused.

What nobody can read now may be a living child: what it may need stays.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from index_store.cli.command_line import app
from index_store.errors import (
    ChecksumError,
    ContextExpiredError,
    ContextHasChildrenError,
    ContextNotFoundError,
    InvalidArgumentError,
    ManifestError,
    ParentMissingError,
    StoreError,
    StoreUnavailableError,
    UnexpectedFileError,
)
from index_store.family.children import Continuation, attention_of, joined, publish_child, read_own_rows
from index_store.family.parents import parent_of
from index_store.memory.arena import Arena
from index_store.store import listing
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up, find_leftovers
from index_store.store.description.array_entry import kv_entry, window_entry
from index_store.store.description.context_id import Parent, WindowLayers, continued_digests, first_digest
from index_store.store.description.manifest import MANIFESTS, Manifest
from tests.index_store.store.writing.writer_processes import add_all, continue_it
from tests.support.forking import killed_at_each_step
from tests.support.store import CREATED, SyntheticContext, continuation, flip, other_model, synthetic_context

NOW = CREATED + timedelta(days=1)


class Shelf:
    """A store with a parent, whose clock is set by hand."""

    def __init__(self, path: Path, parent: SyntheticContext) -> None:
        self.now = NOW
        self.store = Store(path, create=True, clock=lambda: self.now)
        self.parent = parent
        self.root = self.store.manifest(parent.write(self.store))

    def made(
        self,
        count: int = 5,
        seed: int = 1,
        expires_at: datetime | None = None,
        attention: str = "exact",
        name: str = "child",
    ) -> Continuation:
        return continuation(self.store, self.root, count, seed, expires_at, attention, name)

    def child(self, count: int = 5, seed: int = 1, expires_at: datetime | None = None) -> Manifest:
        return publish_child(self.store, self.made(count, seed, expires_at))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "store", synthetic_context(tokens=300))


def test_a_child_holds_its_own_rows_alone_and_gives_them_back(shelf: Shelf) -> None:
    made = shelf.made()
    child = publish_child(shelf.store, made)
    assert child == shelf.store.manifest(made.id())
    assert (child.token_count, child.own_tokens) == (305, 5)
    assert child.parent == Parent(shelf.root.id, 300)
    assert child.kv_bytes == shelf.root.kv_bytes // 300 * 5
    read = read_own_rows(shelf.store, child)
    assert torch.equal(read.token_ids, made.own.token_ids)
    assert all(torch.equal(found, rows) for found, rows in zip(read.rows, made.own.rows, strict=True))
    assert parent_of(shelf.store, child) == shelf.root
    assert parent_of(shelf.store, shelf.root) is None
    assert MANIFESTS.parse(MANIFESTS.render(child), "here") == child
    assert not shelf.store.verify(child.id)


def test_a_child_of_layers_with_windows_has_all_of_its_rows_in_every_layer(tmp_path: Path) -> None:
    model = other_model(window=WindowLayers((1,), 3, 4, 1, 4))
    parent = synthetic_context(tokens=40, model=replace(model, window=None))
    shelf = Shelf(tmp_path / "store", parent)
    shelf.root = replace(
        shelf.root,
        model=model,
        kv=kv_entry(model, 40, "bfloat16"),
        indexes=(),
        window=window_entry(model, 40, "bfloat16"),
        queries=None,
        query_positions=(),
    )
    made = shelf.made(count=7)
    child = publish_child(shelf.store, made)
    assert child.window.shape == (1, 1, 7, 2, 4)
    read = read_own_rows(shelf.store, child)
    assert all(torch.equal(found, rows) for found, rows in zip(read.rows, made.own.rows, strict=True))


def test_the_same_continuation_is_the_same_child_and_lives_as_long_as_anybody_asked(shelf: Shelf) -> None:
    soon, late = NOW + timedelta(hours=1), NOW + timedelta(hours=9)
    first = publish_child(shelf.store, shelf.made(expires_at=late))
    again = publish_child(shelf.store, shelf.made(expires_at=soon, name="again"))
    assert again == replace(first, name="again")
    assert publish_child(shelf.store, shelf.made()).expires_at is None
    assert publish_child(shelf.store, shelf.made(expires_at=soon)).expires_at is None
    others = [shelf.made(seed=2), shelf.made(attention="csattention 5.00%")]
    assert len({first.id, *(made.id() for made in others)}) == 3
    assert len(shelf.store.children(shelf.root.id)) == 1


def test_labels_that_are_too_many_together_are_the_callers_mistake(shelf: Shelf) -> None:
    first = publish_child(shelf.store, replace(shelf.made(), labels={f"key{i}": "a" for i in range(64)}))
    with pytest.raises(InvalidArgumentError, match="would have 65, expected at most 64"):
        publish_child(shelf.store, replace(shelf.made(), labels={"more": "a"}))
    assert shelf.store.manifest(first.id) == first


def test_how_tokens_attended_is_noted_once_for_each_way() -> None:
    assert joined("", "exact") == "exact"
    assert joined("exact", "exact") == "exact"
    assert joined("exact", "quest 5.00%") == "exact, quest 5.00%"


def test_a_childs_digests_continue_its_parents(tmp_path: Path) -> None:
    parent = synthetic_context(tokens=300)
    start = first_digest(parent.draft.model, "bfloat16", "salt")
    digests = continued_digests(start, parent.tokens)
    shelf = Shelf(tmp_path / "store", replace(parent, draft=replace(parent.draft, prefix_digests=digests)))
    made = shelf.made(count=250)
    child = publish_child(shelf.store, made)
    assert child.prefix_digests == continued_digests(start, made.token_ids)
    assert len(child.prefix_digests) == 3 * 32
    assert child.prefix_digests.startswith(shelf.root.prefix_digests)
    assert attention_of(child) == "exact"


def test_a_parent_is_not_removed_without_its_children(shelf: Shelf) -> None:
    children = [shelf.child(seed=seed).id for seed in (1, 2)]
    with pytest.raises(ContextHasChildrenError, match="2 contexts continue it") as caught:
        shelf.store.delete(shelf.root.id)
    assert caught.value.metadata == {"context": shelf.root.id, "children": "2"}
    shelf.store.delete(children[0])
    assert shelf.store.manifest(shelf.root.id)
    assert set(shelf.store.delete(shelf.root.id, recursive=True)) == {children[1], shelf.root.id}
    assert not shelf.store.list()


def test_an_expired_child_holds_nobody(shelf: Shelf) -> None:
    child = shelf.child(expires_at=NOW + timedelta(hours=1))
    shelf.now = NOW + timedelta(hours=2)
    with pytest.raises(ContextExpiredError):
        read_own_rows(shelf.store, child)
    assert set(shelf.store.delete(shelf.root.id)) == {child.id, shelf.root.id}


def test_an_expired_parent_stays_as_long_as_a_child_lives(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "store", synthetic_context(tokens=40, created=NOW, ttl=timedelta(hours=1)))
    child = shelf.child(expires_at=NOW + timedelta(hours=3))
    shelf.now = NOW + timedelta(hours=2)
    for dry_run in (True, False):
        assert not [item for item in clean_up(shelf.store, dry_run) if item.kind == "expired"]
    assert len(read_own_rows(shelf.store, child).token_ids) == 5
    with pytest.raises(ContextExpiredError):
        shelf.store.open(shelf.root.id)
    with Arena(2**24).acquire(shelf.store, shelf.root.id, expired=True) as resident:
        assert torch.equal(resident.tokens(), shelf.parent.tokens)
    shelf.now = NOW + timedelta(hours=4)
    assert {item.kind for item in clean_up(shelf.store)} == {"expired"}
    assert not shelf.store.list()


def test_a_child_is_not_published_when_its_parent_was_removed_meanwhile(shelf: Shelf) -> None:
    made = shelf.made()
    shelf.store.delete(shelf.root.id)
    with pytest.raises(ContextNotFoundError):
        publish_child(shelf.store, made)
    assert not shelf.store.list()
    assert not find_leftovers(shelf.store)


def test_a_child_whose_parent_vanished_is_told_and_removed(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    child = shelf.child()
    shutil.rmtree(shelf.store.path / "contexts" / shelf.root.id)
    with pytest.raises(
        ParentMissingError, match=f"continues context {shelf.root.id}, which is not in the store"
    ):
        parent_of(shelf.store, child)
    found = CliRunner().invoke(app, ["verify", "--store", str(shelf.store.path)])
    assert found.exit_code == 1
    assert "PARENT_MISSING" in found.output
    shelf.store.delete(child.id)


def test_a_parent_that_was_exchanged_is_found(shelf: Shelf) -> None:
    child = shelf.child()
    other = replace(child, parent=Parent(child.parent.id, 301), token_count=306)
    with pytest.raises(ParentMissingError, match="not the one that it was made from"):
        parent_of(shelf.store, other)


def test_a_damaged_row_is_found(shelf: Shelf) -> None:
    child = shelf.child()
    flip(shelf.store.folders.context(child.id) / "kv/c/1/0/0/0/0")
    with pytest.raises(ChecksumError, match="kv"):
        read_own_rows(shelf.store, child)
    repaired = publish_child(shelf.store, shelf.made())
    assert read_own_rows(shelf.store, repaired)


def test_a_child_cannot_be_loaded_by_itself(shelf: Shelf) -> None:
    child = shelf.child()
    with pytest.raises(InvalidArgumentError, match=f"continues context {shelf.root.id}"):
        Arena(2**24).acquire(shelf.store, child.id).__enter__()
    with pytest.raises(InvalidArgumentError, match="is no child"):
        read_own_rows(shelf.store, shelf.root)


def test_a_child_has_no_indexes_and_something_of_its_own(shelf: Shelf) -> None:
    child = shelf.child()
    for changes in (
        {"indexes": shelf.root.indexes},
        {"queries": shelf.root.queries},
        {"parent": Parent(shelf.root.id, 305)},
    ):
        with pytest.raises(ManifestError, match="parent"):
            replace(child, **changes)  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match="prefix_digests"):
        replace(child, prefix_digests="abc")


def test_commands_tell_and_keep_the_rules(shelf: Shelf) -> None:
    child = shelf.child()
    place = ["--store", str(shelf.store.path)]
    shown = CliRunner().invoke(app, ["show", child.id, *place])
    assert f"continues        {shelf.root.id}, 300 tokens" in shown.output
    assert CliRunner().invoke(app, ["show", shelf.root.id, *place]).output.count("children") == 1
    refused = CliRunner().invoke(app, ["rm", shelf.root.id, *place])
    assert isinstance(refused.exception, ContextHasChildrenError)
    both = CliRunner().invoke(app, ["rm", shelf.root.id, child.id, *place])
    assert both.output == f"removed {child.id}\nremoved {shelf.root.id}\n"


@pytest.mark.nightly
def test_a_keeper_killed_at_any_step_leaves_a_whole_child_or_none(shelf: Shelf) -> None:
    made, steps = shelf.made(), 0
    for _ in killed_at_each_step(continue_it, shelf.store.path, shelf.root.id):
        steps += 1
        for child in shelf.store.children(shelf.root.id):  # killed after the rename
            assert (child.id, shelf.store.verify(child.id)) == (made.id(), [])
            shelf.store.delete(child.id)
        clean_up(shelf.store)
        assert [entry.id for entry in shelf.store.entries()] == [shelf.root.id]
    assert steps == 2 + 1 + 6 + 2  # arrays, chunks, two syncs
    assert shelf.store.verify(made.id()) == []
    with pytest.raises(ContextHasChildrenError):
        shelf.store.delete(shelf.root.id)


def test_who_makes_a_child_whole_and_is_killed_leaves_the_child_or_all_of_it(shelf: Shelf) -> None:
    child = shelf.child()
    chunks = 1 + 2 * child.model.layers * child.model.kv_heads  # of tokens, keys and values, and an index
    killed = 0

    def is_whole() -> bool:
        found = shelf.store.manifest(child.id)
        problems = shelf.store.verify(child.id)
        if found.parent is not None:
            assert found == child
            assert read_own_rows(shelf.store, child)
            # What lies there besides is told, and used by nobody.
            assert all(isinstance(problem, UnexpectedFileError) for problem in problems)
            return False
        assert (found.own_tokens, found.stored_indexes, problems) == (305, {"more"}, [])
        assert shelf.store.children(shelf.root.id) == []
        return True

    for step in killed_at_each_step(add_all, shelf.store.path, child.id, first=chunks - 1):
        killed += 1
        if is_whole():  # killed behind the last step: the child anew
            shelf.store.delete(child.id)
            child = shelf.child()
        elif step % 2:
            clean_up(shelf.store)
            assert shelf.store.verify(child.id) == []
    assert is_whole()
    assert killed - 1 >= 7  # syncs, renames, the manifest, and what is removed at the end
    assert read_own_rows(shelf.store, child)  # by who has begun to before
    with shelf.store.open(child.id) as whole:
        assert len(whole.tokens()) == 305
    assert {left.path.name for left in clean_up(shelf.store) if left.kind == "array"} == {"tokens", "kv"}
    assert shelf.store.verify(child.id) == []
    made = shelf.made()
    shelf.store.delete(shelf.root.id)
    again = publish_child(shelf.store, made)
    assert (again.id, again.parent) == (child.id, None)


def test_random_families_keep_their_rules(shelf: Shelf) -> None:
    """Whatever is kept, removed, expires or is collected: no living child is without its parent."""
    chooser = random.Random(5)
    roots = [shelf.root.id, *(synthetic_context(tokens=30, seed=seed).write(shelf.store) for seed in (7, 8))]
    for step in range(60):
        root = chooser.choice(roots)
        there = {entry.id for entry in shelf.store.list()}
        action = chooser.choice(["keep", "keep", "rm", "rm child", "gc", "wait"])
        if action == "keep" and root in there:
            ends = None if chooser.random() < 0.3 else shelf.now + timedelta(minutes=chooser.randint(1, 9))
            publish_child(shelf.store, continuation(shelf.store, root, 2, step % 7, ends))
        elif action == "rm" and root in there and chooser.random() < 0.4:
            living = [child for child in shelf.store.children(root) if not shelf.store.expired(child)]
            if living:
                with pytest.raises(ContextHasChildrenError):
                    shelf.store.delete(root)
            recursive = chooser.random() < 0.3
            if recursive or not living:
                shelf.store.delete(root, recursive=recursive)
                synthetic = {shelf.root.id: shelf.parent}.get(root)
                if synthetic is not None:
                    synthetic.write(shelf.store)
        elif action == "rm child":
            for child in shelf.store.children(root)[:1]:
                shelf.store.delete(child.id)
        elif action == "gc":
            clean_up(shelf.store)
        elif action == "wait":
            shelf.now += timedelta(minutes=2)
        for entry in shelf.store.list():
            if not shelf.store.expired(entry):
                parent_of(shelf.store, entry)
                assert entry.parent is None or len(read_own_rows(shelf.store, entry).token_ids) == 2


def clock() -> datetime:
    return NOW


@pytest.fixture
def outlived(tmp_path: Path) -> Store:
    """An expired context and a living one that continues it."""
    store = Store(tmp_path, create=True, clock=clock)
    id_ = synthetic_context().write(store)
    publish_child(store, continuation(store, id_))
    store.update(id_, lambda present: replace(present, expires_at=NOW - timedelta(hours=1)))
    return store


def family(store: Store) -> tuple[Manifest, Manifest]:
    """Parent and child."""
    (child,) = [entry for entry in store.list() if entry.parent is not None]
    return store.manifest(child.parent.id), child


def fail_to_read(monkeypatch: pytest.MonkeyPatch, id_: str) -> None:
    """As when the process has too many open files."""
    original = listing.read_file

    def read_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
        if path.parent.name == id_:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(path, most)

    monkeypatch.setattr(listing, "read_file", read_file)


def test_gc_keeps_what_an_unreadable_child_may_need(outlived: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = family(outlived)
    failures: list[StoreError] = []
    with monkeypatch.context() as patch:
        fail_to_read(patch, child.id)
        assert clean_up(Store(outlived.path, clock=clock), on_failure=failures.append) == []
    (failure,) = failures
    assert f"expired contexts are kept, since context {child.id}" in failure.message
    assert outlived.manifest(parent.id) == parent
    outlived.delete(child.id)
    assert [item.kind for item in clean_up(outlived)] == ["expired"]


def test_gc_looks_again_before_it_removes(outlived: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that came, and cannot be read, after the expired contexts were found."""
    parent, child = family(outlived)
    hidden = outlived.path / "hidden"
    folder = outlived.folders.context(child.id)
    folder.rename(hidden)
    store = Store(outlived.path, clock=clock)
    (item,) = clean_up(store, dry_run=True)
    hidden.rename(folder)
    with monkeypatch.context() as patch:
        fail_to_read(patch, child.id)
        with pytest.raises(StoreError, match="expired contexts are kept"):
            item.remove()
    assert not item.remove()
    assert outlived.manifest(parent.id) == parent


def test_gc_keeps_what_a_damaged_child_may_need(outlived: Store) -> None:
    parent, child = family(outlived)
    (outlived.folders.context(child.id) / "manifest.json").write_text("{")
    failures: list[StoreError] = []
    assert clean_up(Store(outlived.path, clock=clock), on_failure=failures.append) == []
    assert len(failures) == 1
    assert outlived.manifest(parent.id) == parent
    outlived.delete(child.id)
    assert [item.kind for item in clean_up(outlived, on_failure=failures.append)] == ["expired"]
    assert len(failures) == 1


def test_no_parent_is_deleted_while_a_child_may_be_unreadable(
    outlived: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child = family(outlived)
    with monkeypatch.context() as patch:
        fail_to_read(patch, child.id)
        for recursive in (False, True):
            with pytest.raises(StoreUnavailableError, match=f"whether context {child.id[:12]} continues it"):
                Store(outlived.path, clock=clock).delete(parent.id, recursive=recursive)
        assert outlived.manifest(parent.id) == parent
        assert Store(outlived.path, clock=clock).delete(child.id) == [child.id]  # whatever its own state
    assert outlived.delete(parent.id) == [parent.id]
    with pytest.raises(ContextNotFoundError):
        outlived.manifest(parent.id)
