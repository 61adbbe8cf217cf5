"""Writing: what is published survives a power cut, and nobody else may read it unless the owner lets them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from index_store.errors import StoreError
from index_store.store.catalog import Store
from index_store.store.files import durable
from index_store.store.files.durable import make_folder
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
