"""What can be changed of a published context: name, expiry, labels and pin, all at once and by one at a time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from index_store.errors import ContextBusyError, ContextNotFoundError, InvalidArgumentError, ManifestError
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.json_fields import render_document
from index_store.store.description.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from index_store.store.files import durable
from tests.support.store import CREATED, synthetic_context


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
    with pytest.raises(InvalidArgumentError, match="only name, expires_at, labels, pinned can be changed"):
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
