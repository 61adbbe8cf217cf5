"""Expiry, deletion and clean-up: what nobody can use goes, what somebody uses stays."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from index_store.errors import ContextExpiredError, ContextNotFoundError, MissingChunkError, StoreError
from index_store.family.children import publish_child
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up, find_leftovers, remove_if
from index_store.store.files.durable import locked_file
from index_store.store.zarr_io import chunk_path
from tests.support.store import CREATED, SyntheticContext, bits, continuation, raising, synthetic_context


def test_expired_context(store: Store) -> None:
    context = synthetic_context(ttl=timedelta(hours=1))
    context.write(store)
    now = CREATED + timedelta(minutes=30)
    early = Store(store.path, clock=lambda: now)
    assert early.open(context.id).manifest.id == context.id
    assert clean_up(early) == []
    with pytest.raises(ContextExpiredError, match=f"{context.id} expired at 2026-01-02 04:04:05") as caught:
        store.open(context.id)
    assert caught.value.metadata["context"] == context.id
    assert store.list() == [context.manifest]
    assert store.expired(context.manifest)
    (would,) = clean_up(store, dry_run=True)
    assert (would.kind, would.path) == ("expired", store.folders.context(context.id))
    assert would.nbytes > context.manifest.kv_bytes
    assert store.list() == [context.manifest]
    assert clean_up(store) == [would]
    assert store.list() == []
    assert os.listdir(store.path / "contexts") == []


def test_a_clean_up_and_a_job_remove_the_same_expired_context(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (synthetic_context(seed=seed, ttl=timedelta(hours=1)) for seed in range(2))
    for context in (first, second):
        context.write(store)
    other = Store(store.path)

    def removed_meanwhile(path: Path, wait: bool = True) -> AbstractContextManager[bool]:
        if not wait and store.folders.context(first.id).exists():
            other.delete(first.id)
        return locked_file(path, wait=wait)

    monkeypatch.setattr("index_store.store.clean_up.locked_file", removed_meanwhile)
    assert {item.path for item in clean_up(store)} == {store.folders.context(second.id)}
    assert os.listdir(store.path / "contexts") == []
    assert os.listdir(store.path / "locks") == []


def test_what_cannot_be_removed_does_not_keep_the_rest(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = [synthetic_context(seed=seed, ttl=timedelta(hours=1)) for seed in range(3)]
    for context in contexts:
        context.write(store)
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).name == contexts[1].id:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))
        original(source, target)

    failures: list[StoreError] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert len(clean_up(store, on_failure=failures.append)) == 2
        assert clean_up(store) == []  # which logs it
    (failure,) = failures
    assert contexts[1].id in failure.message
    assert contexts[1].id in caplog.text
    assert [item.path for item in clean_up(store)] == [store.folders.context(contexts[1].id)]


def test_of_a_linked_context_only_the_link_is_removed(
    stored: Store, context: SyntheticContext, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    stored.folders.context(context.id).rename(elsewhere)
    stored.folders.context(context.id).symlink_to(elsewhere, target_is_directory=True)
    assert stored.entries() == [context.manifest]
    stored.delete(context.id)
    assert stored.entries() == []
    assert (elsewhere / "manifest.json").exists()
    left = stored.path / "contexts" / f".trash-{context.id}-01"
    left.symlink_to(elsewhere, target_is_directory=True)
    dangling = stored.path / "contexts" / f".trash-{context.id}-02"
    dangling.symlink_to(tmp_path / "nowhere")
    assert [item.path for item in clean_up(stored)] == [left, dangling]
    assert os.listdir(stored.path / "contexts") == []
    assert (elsewhere / "manifest.json").exists()


def test_leftovers_have_size_and_age(store: Store) -> None:
    trash = store.path / "contexts" / f".trash-{'1' * 64}-0123"
    trash.mkdir()
    with store.writer("2" * 64) as writer:  # what is being written is none
        writer.write_tokens([1, 2])
        assert [item.kind for item in find_leftovers(store)] == ["trash"]
    dead = store.path / "contexts" / f".tmp-{'0' * 64}-0123"
    (dead / "kv").mkdir(parents=True)
    (dead / "kv" / "0").write_bytes(b"x" * 1000)
    for path in (dead / "kv" / "0", dead / "kv", dead):
        os.utime(path, (1_000_000, 1_000_000 + (path == dead)))
    first, second = find_leftovers(store)
    assert (first.kind, first.path, first.nbytes) == ("temporary", dead, 1000)
    assert first.changed_at == datetime.fromtimestamp(1_000_001, UTC)
    assert (second.kind, second.path, second.nbytes) == ("trash", trash, 0)
    assert dead.exists()


def test_a_store_that_cannot_be_written_to_is_read(
    stored: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened for writing, made or removed."""
    dead = stored.path / "contexts" / f".tmp-{'0' * 64}-0123"
    dead.mkdir()
    original = os.open

    def open_file(path: Path, flags: int, *args: int, **kwargs: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)
    for name in ("mkdir", "unlink", "rename", "rmdir"):
        monkeypatch.setattr(os, name, raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    for create in (False, True):
        store = Store(stored.path, create=create)
        assert store.entries() == [context.manifest]
        assert store.verify(context.id) == []
        assert [item.path for item in find_leftovers(store)] == [dead]
        assert [item.path for item in clean_up(store, dry_run=True)] == [dead]
        assert clean_up(store) == []
        with pytest.raises(StoreError, match="Read-only file system"):
            store.delete(context.id)


def test_delete_while_mapped(stored: Store, context: SyntheticContext) -> None:
    other_process = Store(stored.path)
    opened = stored.open(context.id)
    mapped = [opened.array("kv", layer, head) for layer in range(3) for head in range(2)]
    other_process.delete(context.id)
    assert os.listdir(stored.path / "contexts") == []
    assert b"".join(map(bits, mapped)) == bits(context.kv)
    with pytest.raises(ContextNotFoundError, match="was deleted"):
        opened.array("kv", 0, 0)
    with pytest.raises(ContextNotFoundError, match="was deleted"):
        opened.tokens()
    with pytest.raises(ContextNotFoundError):
        stored.open(context.id)
    with pytest.raises(ContextNotFoundError):
        stored.delete(context.id)


def test_a_missing_chunk_is_no_deletion(stored: Store, context: SyntheticContext) -> None:
    opened = stored.open(context.id)
    chunk_path(stored.folders.context(context.id), context.manifest.kv, (0, 0)).unlink()
    with pytest.raises(MissingChunkError):
        opened.array("kv", 0, 0)


def test_gc_spares_what_is_being_written(store: Store) -> None:
    context = synthetic_context()
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        assert clean_up(store) == []
        with store.writer(context.id):
            assert len(list((store.path / "contexts").iterdir())) == 2
        assert store.list() == []
    assert list((store.path / "contexts").iterdir()) == []


def test_gc_waits_for_nobody(store: Store) -> None:
    held = store.path / "contexts" / f".tmp-{'0' * 64}-0123"
    held.mkdir()
    with locked_file(store.path / "locks" / held.name):
        assert clean_up(store) == find_leftovers(store) == []
        assert clean_up(store, dry_run=True) == []
    assert len(clean_up(store)) == 1
    assert not held.exists()


def test_expired_context_that_a_job_is_replacing_is_left_alone(store: Store) -> None:
    context = synthetic_context(ttl=timedelta(hours=1))
    context.write(store)
    with store.lock(context.id):
        assert clean_up(store) == []
    assert len(clean_up(store)) == 1


def test_gc_removes_locks_that_nobody_holds(store: Store) -> None:
    """A killed job leaves its lock file, without the lock."""
    locks = store.path / "locks"
    left = locks / ("0" * 64)
    left.touch()
    (locks / "notes.txt").touch()
    with store.lock("1" * 64):
        assert [(item.kind, item.path) for item in clean_up(store, dry_run=True)] == [("lock", left)]
        assert left.exists()
        assert [(item.kind, item.path) for item in clean_up(store)] == [("lock", left)]
        assert sorted(os.listdir(locks)) == ["1" * 64, "notes.txt"]
    assert clean_up(store) == []


def test_an_expired_parent_stays_whose_child_was_given_a_longer_life_meanwhile(store: Store) -> None:
    """By another process, while this one knows the child as expired: its list of others may be old."""
    parent, past = synthetic_context(), CREATED + timedelta(hours=1)
    parent.write(store)
    child = publish_child(store, continuation(store, parent.id, expires_at=past)).id
    store.update(parent.id, lambda present: replace(present, expires_at=past))
    assert all(map(store.expired, store.list()))
    Store(store.path).update(child, lambda present: replace(present, expires_at=None))
    assert not remove_if(store, parent.id, store.expired)
    assert parent.id in {each.id for each in store.list()}
