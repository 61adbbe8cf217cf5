"""Files that are durable, their checksums, and locks that die with their process."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import google_crc32c
import numpy as np
import pytest

from index_store.errors import StoreError
from index_store.store import zarr_io
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up, find_leftovers
from index_store.store.files import durable
from index_store.store.files.durable import clear_free_lock, is_locked, locked_file, make_folder
from tests.index_store.store.test_tuned_defaults import record
from tests.support.store import synthetic_context


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the order in which they were synced."""
    paths: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    return paths


def test_the_first_publication_is_durable(tmp_path: Path, synced: list[str]) -> None:
    """Every folder that was made, in the folder that names it, before the context is named in its own."""
    path = tmp_path / "a" / "b" / "store"
    store = Store(path, create=True)
    assert synced[:4] == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b"), str(path)]
    id_ = synthetic_context().write(store)
    assert synced[-1] == str(path / "contexts")
    files = {name.split("/kv/", 1)[-1] for name in synced if f".tmp-{id_}" in name and "/kv/c/" in name}
    assert {"c/2/1/0/0/0", "c/2/1/0/0", "c/2/1/0", "c/2/1", "c/2"} <= files
    synced.clear()
    store.set_default_method(id_, record(id_))
    assert synced[0] == str(path)
    assert synced[-1] == str(path / "defaults")
    synced.clear()
    Store(path, create=True)
    assert synced == []


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(path: Path) -> dict[bool, set[int]]:
    """Permissions of everything at and below a path: of files (False) and of folders (True)."""
    found: dict[bool, set[int]] = {False: set(), True: set()}
    for item in (path, *path.rglob("*")):
        found[item.is_dir()].add(stat.S_IMODE(item.stat().st_mode))
    return found


@pytest.mark.usefixtures("umask")
def test_a_new_store_is_its_owners(tmp_path: Path) -> None:
    store = Store(tmp_path / "above" / "store", create=True)
    id_ = synthetic_context().write(store)
    store.set_default_method(id_, record(id_))
    with store.lock(id_):
        assert modes(store.path) == {False: {0o600}, True: {0o700}}
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o755


@pytest.mark.usefixtures("umask")
def test_what_the_owner_opened_stays_open(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=True)
    for name in ("contexts", "locks"):
        (store.path / name).chmod(0o750)
    id_ = synthetic_context().write(store)
    store.set_default_method(id_, record(id_))
    assert modes(store.path / "contexts") == {False: {0o640}, True: {0o750}}
    assert modes(store.path / "defaults") == {False: {0o640}, True: {0o750}}
    os.umask(0o077)
    other = synthetic_context(seed=1).write(store)
    assert modes(store.path / "contexts" / other) == {False: {0o600}, True: {0o700}}


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "inside")
    with pytest.raises(StoreError, match="creating the store failed"):
        Store(tmp_path / "file", create=True)


@pytest.mark.parametrize("size", [0, 1, 7, 63, 500, 4096, 100_001])
def test_checksums_equal_those_of_the_package(size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)
    for start in (0, 3):
        part = raw[start : start + size]
        for before in (0, 12345, 2**32 - 1):
            assert zarr_io.extend_crc32c(before, part) == google_crc32c.extend(before, part.tobytes())


def test_the_library_is_called_directly_here() -> None:
    """Otherwise threads that write or load take turns: see which function google_crc32c's library has now."""
    assert zarr_io._extend is not google_crc32c.extend


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


def test_who_waited_holds_the_file_that_is_there_then(tmp_path: Path) -> None:
    """And not the one that its holder has removed, which nobody else would find."""
    waits = Event()

    def hold_second() -> bool:
        with locked_file(tmp_path / "lock", waits.set), locked_file(tmp_path / "lock", wait=False) as third:
            return third

    with ThreadPoolExecutor(1) as pool:
        with locked_file(tmp_path / "lock"):
            second = pool.submit(hold_second)
            assert waits.wait(60)
        assert second.result(60) is False


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

    monkeypatch.setattr(durable.fcntl, "flock", flock)
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
