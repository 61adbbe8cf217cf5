"""A store of contexts: round trips, listing, finding, opening."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from index_store.errors import (
    ContextAmbiguousError,
    ContextCorruptError,
    ContextNotFoundError,
    InvalidArgumentError,
    ManifestError,
    NameTakenError,
    StoreError,
    StoreUnavailableError,
)
from index_store.store import listing
from index_store.store.catalog import Store, free_name, require_free, take_name, told_apart
from index_store.store.clean_up import renew
from index_store.store.description.dtypes import STORED_DTYPES, dtype_name
from index_store.store.description.manifest import MANIFESTS, Manifest
from index_store.store.listing import BrokenContext
from tests.support.store import (
    CREATED,
    SyntheticContext,
    bits,
    open_files,
    synthetic_context,
    write_manifests,
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip_is_bit_exact(store: Store, dtype: str) -> None:
    context = synthetic_context(dtype=dtype, index_dtypes=tuple(STORED_DTYPES))
    context.kv.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    context.write(store)
    with store.open(context.id) as opened:
        assert opened.manifest == context.manifest
        assert torch.equal(opened.tokens(), context.tokens)
        assert opened.tokens().dtype == torch.int64
        for layer in range(3):
            for head in range(2):
                found = opened.array("kv", layer, head)
                assert found.dtype == STORED_DTYPES[dtype].torch_dtype
                assert found.shape == (37, 2, 8)
                assert bits(found) == bits(context.kv[layer, head])
        for entry, data in context.entries():
            for row, layer in enumerate((1, 2)):
                for head in range(2):
                    found = opened.array(entry.path, layer, head)
                    assert dtype_name(found.dtype) == entry.dtype
                    assert bits(found) == bits(data[row, head])
        for layer in range(3):
            sample = opened.queries(layer)
            assert bits(sample.queries_HPGD) == bits(context.queries[layer])
            assert sample.positions_P.tolist() == list(context.draft.query_positions) == [36, 37, 38]
            assert bits(opened.array("queries", layer, 1)) == bits(context.queries[layer, 1])
    assert store.verify(context.id) == []


def test_a_context_without_a_sample_of_queries(store: Store) -> None:
    context = synthetic_context(query_rows=0)
    context.write(store)
    assert store.verify(context.id) == []
    with (
        store.open(context.id) as opened,
        pytest.raises(InvalidArgumentError, match="has no sample of queries"),
    ):
        opened.queries(0)


def test_all_zero_chunks_are_stored(store: Store) -> None:
    context = synthetic_context()
    context.kv.zero_()
    context.tokens.zero_()
    for data in context.arrays.values():
        data.zero_()
    context.write(store)
    assert store.verify(context.id) == []
    assert not store.open(context.id).array("kv", 2, 1).any()


def test_zarr_reads_what_was_written(stored: Store, context: SyntheticContext) -> None:
    group = zarr.open_group(stored.folders.context(context.id), mode="r")
    assert np.array_equal(group["tokens"][:], context.tokens.numpy())
    assert np.array_equal(group["kv"][:], context.kv.view(torch.uint16).numpy())
    assert group["kv"].attrs["dtype"] == "bfloat16"
    for entry, data in context.entries():
        assert np.array_equal(group[entry.path][:], data.numpy())


def test_mapped_array_is_private(stored: Store, context: SyntheticContext) -> None:
    opened = stored.open(context.id)
    opened.array("kv", 0, 0).zero_()
    assert bits(opened.array("kv", 0, 0)) == bits(context.kv[0, 0])
    assert stored.verify(context.id) == []


def test_mapping_holds_no_files_open(stored: Store, context: SyntheticContext) -> None:
    before = open_files(stored.path)
    opened = stored.open(context.id)
    for layer in range(3):
        opened.array("kv", layer, 0)
    assert open_files(stored.path) == before


@pytest.mark.parametrize(
    ("path", "layer", "head"),
    [
        ("kv", 3, 0),
        ("kv", -1, 0),
        ("kv", 0, 2),
        ("kv", 0, -1),
        ("index/tables/array_int8", 0, 0),
        ("queries", 3, 0),
        ("nothing", 0, 0),
    ],
)
def test_outside_of_arrays(
    stored: Store, context: SyntheticContext, path: str, layer: int, head: int
) -> None:
    with pytest.raises(InvalidArgumentError, match=path):
        stored.open(context.id).array(path, layer, head)


def test_closed_context(stored: Store, context: SyntheticContext) -> None:
    with stored.open(context.id) as opened:
        kept = opened.array("kv", 0, 0)
    with pytest.raises(InvalidArgumentError, match="closed"):
        opened.array("kv", 0, 0)
    assert bits(kept) == bits(context.kv[0, 0])


def test_manifest_in_the_wrong_folder(stored: Store, context: SyntheticContext) -> None:
    other = "0" * 64
    stored.folders.context(context.id).rename(stored.folders.context(other))
    with pytest.raises(ManifestError, match=f"'id' is '{context.id}', expected '{other}'"):
        stored.open(other)


def test_resolve(store: Store) -> None:
    first, second = synthetic_context(name="handbook"), synthetic_context(seed=1, name="code base, v2")
    for context in (first, second):
        context.write(store)
    for ref in (
        first.id,
        first.id.upper(),
        f"contexts/{first.id}",
        f"contexts/{first.id.upper()}",
        first.id[:6],
        first.id[:9].upper(),
        f"contexts/{first.id[:20]}",
        "handbook",
    ):
        assert store.resolve(ref) == first.id
    assert store.resolve("code base, v2") == second.id
    for ref in (first.id[:5], "0" * 64, "contexts/" + "0" * 64, "handboo", "", "contexts/", "000000"):
        with pytest.raises(ContextNotFoundError, match="no context"):
            store.resolve(ref)


def test_expired_contexts_do_not_make_a_name_ambiguous(store: Store) -> None:
    now = CREATED
    ticking = Store(store.path, clock=lambda: now)
    old, older = (synthetic_context(seed=seed, name="same", ttl=timedelta(hours=1)) for seed in (1, 2))
    for context in (old, older):
        context.write(ticking)
    live = synthetic_context(seed=3, name="same")
    live.write(ticking)
    with pytest.raises(ContextAmbiguousError, match="fits 3 contexts"):
        ticking.resolve("same")
    now += timedelta(hours=2)
    assert ticking.resolve("same") == live.id
    ticking.delete(live.id)
    with pytest.raises(ContextAmbiguousError, match="fits 2 contexts"):
        ticking.resolve("same")
    ticking.delete(older.id)
    assert ticking.resolve("same") == old.id  # which says that it has expired, rather than that there is none


def test_a_name_that_looks_like_an_id_is_found(store: Store) -> None:
    first, second = synthetic_context(name="F" * 64), synthetic_context(seed=1)
    first.write(store)
    second.write(store)
    assert store.resolve("F" * 64) == first.id
    third = synthetic_context(seed=2, name=second.id)
    third.write(store)
    assert store.resolve(second.id) == second.id  # an id means its context, whatever others are called
    store.delete(second.id)
    assert store.resolve(second.id) == third.id


@pytest.mark.parametrize(
    "ref",
    [
        "../outside",
        "..",
        ".",
        "/etc",
        "contexts/../../x",
        "a" * 63 + "/",
        "A" * 64,
        "g" * 64,
        "a" * 65,
        "a\0b",
    ],
)
def test_ids_never_leave_the_store(store: Store, tmp_path: Path, ref: str) -> None:
    (tmp_path / "outside").mkdir()
    with pytest.raises(ContextNotFoundError):
        store.resolve(ref)
    for use in (store.manifest, store.open, store.delete, store.verify, store.writer):
        with pytest.raises(InvalidArgumentError, match="64 lower-case hex digits"):
            use(ref)
    with pytest.raises(InvalidArgumentError), store.lock(ref):
        pytest.fail("locked a bad id")
    assert (tmp_path / "outside").exists()


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no store here .*prefill-worker run --store"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="no store here"):
        Store(tmp_path / "missing")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="creating the store failed"):
        Store(file, create=True)
    Store(tmp_path / "a" / "b", create=True)
    assert Store(tmp_path / "a" / "b").list() == []


def test_reading_needs_no_lock_folder(stored: Store, context: SyntheticContext) -> None:
    (stored.path / "locks").rmdir()
    assert Store(stored.path).open(context.id).manifest == context.manifest
    with stored.lock(context.id):
        assert (stored.path / "locks" / context.id).exists()
    assert os.listdir(stored.path / "locks") == []


def model_of(context: SyntheticContext) -> str:
    return context.manifest.model.fingerprint


def test_a_name_belongs_to_one_context(store: Store) -> None:
    first = synthetic_context(name="handbook")
    first.write(store)
    model = model_of(first)
    require_free(store, "handbook", model, first.id)  # its own
    require_free(store, "another", model, "0" * 64)
    require_free(store, "handbook", "another model", "0" * 64)
    with pytest.raises(NameTakenError, match=f"belongs to context {first.id[:12]}.*--move-name"):
        require_free(store, "handbook", model, "0" * 64)
    assert free_name(store, "handbook", model, "1" * 64) == "handbook 111111"
    assert free_name(store, "handbook", model, first.id) == "handbook"
    assert len(told_apart("n" * 500, "1" * 64)) == 500


def test_one_that_has_expired_holds_no_name(store: Store) -> None:
    now = CREATED
    ticking = Store(store.path, clock=lambda: now)
    old = synthetic_context(name="handbook", ttl=timedelta(hours=1))
    old.write(ticking)
    now += timedelta(hours=2)
    require_free(ticking, "handbook", model_of(old), "0" * 64)


def test_a_name_moves_and_nothing_is_lost(store: Store) -> None:
    old, new = synthetic_context(name="handbook"), synthetic_context(seed=1, name="draft")
    for context in (old, new):
        context.write(store)
    assert take_name(store, new.id, "handbook").name == "handbook"
    assert store.resolve("handbook") == new.id
    assert store.resolve(f"handbook {old.id[:6]}") == old.id
    assert store.resolve(old.id) == old.id


def test_stores_with_several_of_one_name_open_and_are_mended(store: Store) -> None:
    contexts = [synthetic_context(seed=seed, name="same") for seed in range(3)]
    for context in contexts:
        context.write(store)
    assert len(store.list()) == 3
    with pytest.raises(ContextAmbiguousError, match="index-store update ID --name NAME --move-name"):
        store.resolve("same")
    take_name(store, contexts[1].id, "same")
    assert store.resolve("same") == contexts[1].id
    assert len({manifest.name for manifest in store.list()}) == 3


def test_a_name_means_the_context_of_the_model_that_asks(store: Store) -> None:
    one = synthetic_context(name="handbook")
    other = synthetic_context(name="handbook", model=replace(one.draft.model, fingerprint="f" * 64))
    for context in (one, other):
        context.write(store)
    assert store.resolve("handbook", model_of(one)) == one.id
    assert store.resolve("handbook", model_of(other)) == other.id
    with pytest.raises(ContextAmbiguousError):
        store.resolve("handbook")


def test_a_name_that_moves_is_one_edition_s_at_any_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process that moved it was killed between its two writes, forth or back."""
    first = synthetic_context(name="handbook")
    second = synthetic_context(seed=1, name="edition 2", created=CREATED + timedelta(days=1))
    for context in (first, second):
        context.write(store)
    update, left = Store.update, [1]

    def killed(self: Store, *given: Any) -> Manifest:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return update(self, *given)

    monkeypatch.setattr(Store, "update", killed)
    for to, means in ((second, second), (first, second)):
        left[0] = 1
        with pytest.raises(KeyboardInterrupt):
            take_name(store, to.id, "handbook")
        assert store.resolve("handbook", model_of(first)) == means.id
        with pytest.raises(ContextAmbiguousError, match="index-store update ID --name NAME --move-name"):
            store.resolve("handbook")  # at a machine itself, where it may be to remove one
        left[0] = 2
        take_name(store, to.id, "handbook")
        assert store.resolve("handbook") == to.id


def test_uses_renew_a_time_to_live_and_seldom_write(store: Store) -> None:
    now = CREATED
    ticking = Store(store.path, clock=lambda: now)
    context = synthetic_context(name="cache", ttl=timedelta(hours=1))
    context.write(ticking)
    ticking.update(context.id, lambda manifest: replace(manifest, renew=3600))
    path = ticking.folders.context(context.id) / "manifest.json"
    written = set()
    for _ in range(3 * 60):
        now += timedelta(minutes=1)
        renew(ticking, ticking.manifest(context.id))
        ends = Store(store.path).manifest(context.id).expires_at
        assert ends is not None
        assert timedelta(hours=1) <= ends - now <= timedelta(hours=1, minutes=4)
        written.add(path.stat().st_ino)
    assert len(written) <= 3 * 16
    now += timedelta(hours=1, minutes=5)
    assert ticking.expired(ticking.manifest(context.id))
    ticking.update(context.id, lambda manifest: replace(manifest, expires_at=None))
    renew(ticking, ticking.manifest(context.id))
    assert ticking.manifest(context.id).expires_at is None
    with pytest.raises(ManifestError, match="'renew' is 0, expected null or seconds from 1"):
        ticking.update(context.id, lambda manifest: replace(manifest, renew=0))


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
