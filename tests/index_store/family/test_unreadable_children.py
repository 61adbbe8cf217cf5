"""What nobody can read now may be a living child: what it may need stays."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from index_store.errors import ContextNotFoundError, StoreError, StoreUnavailableError
from index_store.family.children import publish_child
from index_store.store import listing
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.manifest import Manifest
from tests.support.store import CREATED, continuation, synthetic_context

NOW = CREATED + timedelta(days=1)


def clock() -> datetime:
    return NOW


@pytest.fixture
def shelf(tmp_path: Path) -> Store:
    """An expired context and a living one that continues it."""
    store = Store(tmp_path, create=True, clock=clock)
    id_ = synthetic_context().write(store)
    publish_child(store, continuation(store, id_))
    store.update(id_, lambda present: replace(present, expires_at=NOW - timedelta(hours=1)))
    return store


def family(store: Store) -> tuple[Manifest, Manifest]:
    """Parent and child."""
    (child,) = [entry for entry in store.list() if entry.parent is not None]
    assert child.parent is not None
    return store.manifest(child.parent.id), child


def fail_to_read(monkeypatch: pytest.MonkeyPatch, id_: str) -> None:
    """As when the process has too many open files."""
    original = listing.read_file

    def read_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
        if path.parent.name == id_:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(path, most)

    monkeypatch.setattr(listing, "read_file", read_file)


def test_gc_keeps_what_an_unreadable_child_may_need(shelf: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = family(shelf)
    failures: list[StoreError] = []
    with monkeypatch.context() as patch:
        fail_to_read(patch, child.id)
        assert clean_up(Store(shelf.path, clock=clock), on_failure=failures.append) == []
    (failure,) = failures
    assert f"expired contexts are kept, since context {child.id}" in failure.message
    assert shelf.manifest(parent.id) == parent
    shelf.delete(child.id)
    assert [item.kind for item in clean_up(shelf)] == ["expired"]


def test_gc_looks_again_before_it_removes(shelf: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that came, and cannot be read, after the expired contexts were found."""
    parent, child = family(shelf)
    hidden = shelf.path / "hidden"
    folder = shelf.folders.context(child.id)
    folder.rename(hidden)
    store = Store(shelf.path, clock=clock)
    (item,) = clean_up(store, dry_run=True)
    hidden.rename(folder)
    with monkeypatch.context() as patch:
        fail_to_read(patch, child.id)
        with pytest.raises(StoreError, match="expired contexts are kept"):
            item.remove()
    assert not item.remove()
    assert shelf.manifest(parent.id) == parent


def test_gc_keeps_what_a_damaged_child_may_need(shelf: Store) -> None:
    parent, child = family(shelf)
    (shelf.folders.context(child.id) / "manifest.json").write_text("{")
    failures: list[StoreError] = []
    assert clean_up(Store(shelf.path, clock=clock), on_failure=failures.append) == []
    assert len(failures) == 1
    assert shelf.manifest(parent.id) == parent
    shelf.delete(child.id)
    assert [item.kind for item in clean_up(shelf, on_failure=failures.append)] == ["expired"]
    assert len(failures) == 1


def test_no_parent_is_deleted_while_a_child_may_be_unreadable(
    shelf: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child = family(shelf)
    with monkeypatch.context() as patch:
        fail_to_read(patch, child.id)
        for recursive in (False, True):
            with pytest.raises(StoreUnavailableError, match=f"whether context {child.id[:12]} continues it"):
                Store(shelf.path, clock=clock).delete(parent.id, recursive=recursive)
        assert shelf.manifest(parent.id) == parent
        assert Store(shelf.path, clock=clock).delete(child.id) == [child.id]  # whatever its own state
    assert shelf.delete(parent.id) == [parent.id]
    with pytest.raises(ContextNotFoundError):
        shelf.manifest(parent.id)
