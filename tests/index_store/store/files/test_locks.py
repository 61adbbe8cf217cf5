"""Locks: held by files that were opened for writing, and seen without changing anything."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up, find_leftovers
from index_store.store.files import locks
from index_store.store.files.locks import clear_free_lock, is_locked, locked_file
from tests.support.store import synthetic_context


def test_a_lock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with locked_file(path) as held:
        assert held
        assert is_locked(path)
        assert not clear_free_lock(path)
        with locked_file(path, wait=False) as again:
            assert not again
    assert not path.exists()
    path.touch()
    assert not is_locked(path)
    assert clear_free_lock(path)
    assert not path.exists()


def test_what_cannot_be_opened_counts_as_locked(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert is_locked(tmp_path / "loop")


def test_network_file_systems_get_locks_that_they_take(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks byte ranges: exclusively only files open for writing, shared ones only files open for reading."""
    asked: set[tuple[str, int]] = set()
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        kind = operation & (fcntl.LOCK_EX | fcntl.LOCK_SH)
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        assert os.path.isfile(f"/proc/self/fd/{descriptor}")
        assert (access == os.O_RDWR) if kind == fcntl.LOCK_EX else (access in (os.O_RDONLY, os.O_RDWR))
        asked.add((os.readlink(f"/proc/self/fd/{descriptor}"), kind))
        original(descriptor, operation)

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    (store.path / "contexts" / f".tmp-{'0' * 64}-01").mkdir()
    (store.path / "locks" / ("1" * 64)).touch()
    context = synthetic_context()
    with store.lock(context.id):
        context.write(store)
        find_leftovers(store)
    # The temporary folder went when the next job came.
    assert [item.kind for item in clean_up(store)] == ["lock"]
    assert any(f".tmp-{context.id}" in path for path, _ in asked)
    assert os.listdir(store.path / "locks") == []
