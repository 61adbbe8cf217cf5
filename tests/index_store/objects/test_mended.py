"""A context that is damaged in one tier is made whole from the other one, and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from index_store.errors import ContextCorruptError
from index_store.memory.arena import Arena
from index_store.objects.bucket import Bucket
from index_store.objects.records import content_key, look
from index_store.store.catalog import Store
from index_store.store.zarr_io import chunk_path
from tests.index_store.objects.sites import Site, memory_bucket
from tests.support.store import SyntheticContext
from tests.support.waiting import wait_until


@pytest.fixture
def bucket() -> Bucket:
    return memory_bucket()


@pytest.fixture
def here(tmp_path: Path, bucket: Bucket, context: SyntheticContext) -> Site:
    """A site that has the context, and has uploaded it."""
    site = Site.at(tmp_path / "here", bucket)
    context.write(site.store)
    site.settle()
    return site


def flip(path: Path, at: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def files(store: Store, id_: str) -> dict[str, bytes]:
    folder = store.folders.context(id_)
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): b"" if path.name == "zarr.json" else path.read_bytes()
        for path in found
    }


def load(store: Store, id_: str) -> None:
    arena = Arena(1 << 20)
    try:
        store.bring(id_)
        with arena.acquire(store, id_):
            pass
    finally:
        arena.clear()


def test_every_file_of_arrays_that_is_damaged_here_comes_again(here: Site, context: SyntheticContext) -> None:
    """The reading that finds it says so; the next one finds the context whole."""
    folder, whole = here.store.folders.context(context.id), files(here.store, context.id)
    damaged = [name for name in whole if name != "manifest.json" and not name.startswith("queries")]
    for number, name in enumerate(damaged, 1):
        if number % 3 == 0:
            (folder / name).unlink()
        else:
            flip(folder / name)
        with pytest.raises(ContextCorruptError):
            load(here.store, context.id)
        load(here.store, context.id)
        assert files(here.store, context.id) == whole
        assert here.store.verify(context.id) == []
        wait_until(lambda: here.tier.mended == number)  # noqa: B023  called at once
    assert not here.store.elsewhere(context.id)
    assert here.courier.figures()["objects_mended"] == len(damaged)


def test_nothing_is_mended_from_what_is_not_held_or_another_edition(
    tmp_path: Path, bucket: Bucket, context: SyntheticContext
) -> None:
    site = Site.at(tmp_path / "store", bucket)
    context.write(site.store)  # and it is not uploaded
    path = chunk_path(site.store.folders.context(context.id), context.manifest.kv, (1, 1))
    flip(path)
    for _ in range(2):
        with pytest.raises(ContextCorruptError):
            load(site.store, context.id)
    assert not site.store.elsewhere(context.id)
    assert site.tier.mended == 0
    assert look(bucket) == {}


def test_what_is_damaged_in_the_bucket_is_uploaded_again_by_who_has_it(
    tmp_path: Path, here: Site, bucket: Bucket, context: SyntheticContext
) -> None:
    there = Site.at(tmp_path / "there", bucket)
    there.settle()
    key = content_key(context.manifest)
    data = bucket.get(key)
    for number, spoilt in enumerate((data[:-1], data[:-3000] + bytes(3000), data[:40]), 1):
        bucket.put(key, iter([spoilt]), len(spoilt))
        with pytest.raises(ContextCorruptError):
            there.store.bring(context.id)
        wait_until(lambda: look(bucket)[context.id].damaged)
        there.settle()  # who has none of it changes nothing
        assert bucket.get(key) == spoilt
        assert look(bucket)[context.id].damaged
        here.settle()
        assert bucket.get(key) == data
        held = look(bucket)[context.id]
        assert (held.damaged, held.old) == (False, [])
        assert here.courier.mended == number
        there.settle()
        there.store.bring(context.id)
        assert there.store.verify(context.id) == []
        there.store.evict(context.id, lambda _: True)


def test_a_record_that_is_damaged_in_the_bucket_is_written_again(
    tmp_path: Path, here: Site, bucket: Bucket
) -> None:
    there = Site.at(tmp_path / "there", bucket)
    (held,) = look(bucket).values()
    bucket.put(held.key, iter([bucket.get(held.key)[:-40]]), len(bucket.get(held.key)) - 40)
    assert not there.courier.look()
    assert there.store.list() == []
    here.settle()
    there.settle()
    assert [each.name for each in there.store.list()] == ["handbook"]


def test_what_is_damaged_on_both_sides_is_lost_no_further(
    tmp_path: Path, here: Site, bucket: Bucket, context: SyntheticContext
) -> None:
    """Neither side is served, and neither takes from the other what it has of it."""
    there = Site.at(tmp_path / "there", bucket)
    there.settle()
    key = content_key(context.manifest)
    spoilt = bucket.get(key)[:-3000] + bytes(3000)
    bucket.put(key, iter([spoilt]), len(spoilt))
    flip(chunk_path(here.store.folders.context(context.id), context.manifest.kv, (1, 1)))
    with pytest.raises(ContextCorruptError):
        there.store.bring(context.id)
    assert not here.courier.look()
    assert bucket.get(key) == spoilt
    for site in (here, there):
        with pytest.raises(ContextCorruptError):
            load(site.store, context.id)


def test_a_manifest_that_is_damaged_for_good_is_that_of_the_bucket(
    here: Site, context: SyntheticContext, caplog: pytest.LogCaptureFixture
) -> None:
    here.store.update(context.id, lambda each: replace(each, labels={"team": "law"}))
    here.settle()
    whole = files(here.store, context.id)
    flip(here.store.folders.context(context.id) / "manifest.json", 200)
    for _ in range(3):
        with pytest.raises(ContextCorruptError):
            Store(here.store.path).manifest(context.id)
        here.courier._pauses.update(
            {id_: (count, 0.0) for id_, (count, _) in here.courier._pauses.items()}
        )  # all but the pauses
        assert not here.courier.look()
    here.courier._pauses.update({id_: (count, 0.0) for id_, (count, _) in here.courier._pauses.items()})
    assert here.courier.look()
    assert files(here.store, context.id) == whole
    assert here.courier.mended == 1
    assert "has the manifest again" in caplog.text
