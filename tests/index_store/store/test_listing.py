"""The list of contexts: read once, kept true by the folder and by every look at one of them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from index_store.errors import ContextCorruptError, ContextNotFoundError, StoreUnavailableError
from index_store.store import listing
from index_store.store.catalog import Store
from index_store.store.description.manifest import MANIFESTS, Manifest
from index_store.store.listing import BrokenContext
from tests.support.store import write_manifests

COUNT = 40


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the contexts whose manifest was read, in that order."""
    ids: list[str] = []
    original = listing.read_file

    def read_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
        ids.append(path.parent.name)
        return original(path, most)

    monkeypatch.setattr(listing, "read_file", read_file)
    return ids


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all that is there had been there for a while."""
    monkeypatch.setattr(listing, "_SETTLED_S", -1.0)


def names(store: Store) -> list[str]:
    return [entry.name if isinstance(entry, Manifest) else "?" for entry in store.entries()]


def pause(store: Store) -> None:
    """Until a change shows in the times of files, whose clock ticks slowly."""
    with tempfile.NamedTemporaryFile(dir=store.path.parent) as file:
        before = os.stat(file.name).st_mtime_ns
        while os.stat(file.name).st_mtime_ns == before:
            time.sleep(0.005)
            os.utime(file.name)


@pytest.mark.usefixtures("settled")
def test_every_manifest_is_read_once(store: Store, read: list[str]) -> None:
    ids = write_manifests(store.path, COUNT)
    expected = [f"book {number}" for number in reversed(range(COUNT))]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(names, [store] * 8)) == [expected] * 8
    assert sorted(read) == sorted(ids)
    for id_ in ids:
        assert store.manifest(id_).id == id_
    assert store.resolve("book 7") == ids[7]
    assert len(read) == COUNT
    pause(store)
    (new,) = write_manifests(store.path, 1, first=COUNT)
    assert names(store) == [f"book {COUNT}", *expected]
    assert read[COUNT:] == [new]
    pause(store)
    Store(store.path).delete(ids[3])
    assert names(store) == [f"book {COUNT}", *(name for name in expected if name != "book 3")]
    assert len(read) == 2 * (COUNT + 1)  # the other store looked for children, once
    with pytest.raises(ContextNotFoundError):
        store.manifest(ids[3])


@pytest.mark.usefixtures("settled")
def test_an_unchanged_folder_is_not_gone_through(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifests(store.path, 3)
    assert len(names(store)) == 3

    def refuse(path: object) -> None:
        pytest.fail(f"listed {path}")

    monkeypatch.setattr(os, "scandir", refuse)
    assert len(names(store)) == 3


def test_what_changed_a_moment_ago_is_looked_at_again(store: Store, read: list[str]) -> None:
    """A change within one tick of the clock does not show in a file's times."""
    ids = write_manifests(store.path, 2)
    for _ in range(2):
        assert len(names(store)) == 2
        assert store.manifest(ids[0]).id == ids[0]
    assert len(read) == 6


def rewritten(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"book 1", b"book X"))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"{")
    other.replace(path)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", [rewritten, replaced, Path.unlink])
def test_damage_shows_when_a_context_is_looked_at(
    store: Store, damage: Callable[[Path], None], read: list[str]
) -> None:
    ids = write_manifests(store.path, 3)
    assert names(store) == ["book 2", "book 1", "book 0"]
    pause(store)
    path = store.path / "contexts" / ids[1] / "manifest.json"
    good = path.read_bytes()
    damage(path)
    entry = store.entry(ids[1])
    assert isinstance(entry, BrokenContext)
    assert isinstance(entry.error, ContextCorruptError)
    assert names(store) == ["book 2", "book 0", "?"]
    pause(store)
    path.write_bytes(good)
    assert store.manifest(ids[1]).name == "book 1"
    assert names(store) == ["book 2", "book 1", "book 0"]


@pytest.mark.usefixtures("settled")
def test_a_context_that_was_made_anew(store: Store) -> None:
    ids = write_manifests(store.path, 2)
    manifest = store.list()[0]
    pause(store)
    folder = store.path / "contexts" / ids[1]
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "manifest.json").write_bytes(MANIFESTS.render(replace(manifest, name="anew")))
    assert names(store) == ["anew", "book 0"]


def test_threads_see_a_consistent_list(store: Store) -> None:
    ids = write_manifests(store.path, 20)
    other = Store(store.path)

    def look(_: int) -> None:
        for _ in range(20):
            found = store.entries()
            assert found == sorted(found, key=listing.place_of)
            assert len({entry.id for entry in found}) == len(found)

    with ThreadPoolExecutor(4) as pool:
        looking = [pool.submit(look, number) for number in range(3)]
        for id_ in ids[:10]:
            other.delete(id_)
        write_manifests(store.path, 10, first=20)
        for done in looking:
            done.result()
    assert len(store.entries()) == 20


@pytest.mark.usefixtures("settled")
def test_a_reading_that_was_given_up_leaves_nothing_unread(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifests(store.path, 3)
    original, begun = listing.read_file, []

    def read_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
        begun.append(path)
        if len(begun) == 2:
            raise StoreUnavailableError(f"{path}: reading was given up")
        return original(path, most)

    monkeypatch.setattr(listing, "read_file", read_file)
    with pytest.raises(StoreUnavailableError):
        store.entries()
    assert names(store) == ["book 2", "book 1", "book 0"]
