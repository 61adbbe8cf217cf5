"""What is damaged, forgotten or lost in one tier is made whole from the other one, and undoes nobody's change."""

from __future__ import annotations

import errno
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from index_store.errors import (
    ContextCorruptError,
    ContextNotFoundError,
    ObjectsUnavailableError,
    StoreUnavailableError,
)
from index_store.memory.arena import Arena
from index_store.objects import records
from index_store.objects.bucket import Bucket
from index_store.objects.courier import Courier
from index_store.objects.records import content_key, look
from index_store.objects.tier import Tier, open_store
from index_store.store import catalog, elsewhere
from index_store.store.catalog import Store
from index_store.store.files import durable, reading
from index_store.store.zarr_io import chunk_path
from tests.index_store.objects.sites import Site, book, look_at_once, site_of, work
from tests.support.forking import ran, start
from tests.support.store import SyntheticContext, flip, raising
from tests.support.waiting import wait_until


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
    here: Site, there: Site, bucket: Bucket, context: SyntheticContext
) -> None:
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
    here: Site, unaware: Site, bucket: Bucket
) -> None:
    (held,) = look(bucket).values()
    data = bucket.get(held.key)
    for spoilt in (data[:-40], data.replace(b"handbook", b"handbooj")):
        bucket.put(held.key, iter([spoilt]), len(spoilt))
        assert not unaware.courier.look()
        assert held.key in unaware.courier.state().problem
        assert unaware.store.list() == []
    here.settle()
    unaware.settle()
    assert unaware.courier.state().problem == ""
    assert [each.name for each in unaware.store.list()] == ["handbook"]


def test_what_is_damaged_on_both_sides_is_lost_no_further(
    here: Site, there: Site, bucket: Bucket, context: SyntheticContext
) -> None:
    """Neither side is served, and neither takes from the other what it has of it."""
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


def test_a_store_that_forgot_what_it_saw_undoes_nobodys_change(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    """Killed before it noted what it has, say. Of what both have, that counts which was changed later."""

    def forget(site: Site) -> None:
        site.tier.marks.remove(context.id)

    for number, (changer, other) in enumerate([(here, there), (there, here)]):
        labels = {"n": str(number)}
        changer.store.update(context.id, lambda present: replace(present, labels=labels))  # noqa: B023
        changer.settle()
        forget(other)
        other.settle()
        changer.settle()
        assert [site.store.manifest(context.id).labels for site in (here, there)] == [labels] * 2
    here.store.update(context.id, lambda present: replace(present, labels={"n": "2"}))
    forget(here)
    here.settle()
    there.settle()
    assert there.store.manifest(context.id).labels == {"n": "2"}


def test_what_a_store_saw_and_cannot_read_now_is_not_forgotten(
    here: Site, there: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_handles(path: object, *how: object, **named: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    again = Site.at(there.store.path, there.tier.bucket)
    with monkeypatch.context() as patch:
        patch.setattr(reading.os, "open", no_handles)
        with pytest.raises(StoreUnavailableError, match="Too many open files"):
            again.tier.held()
    again.settle()
    with monkeypatch.context() as patch:
        patch.setattr(records, "read_file", no_handles)
        assert not Site.at(there.store.path, there.tier.bucket).courier.look()


def test_a_fault_of_a_courier_does_not_end_it(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    courier = Courier(here.store, here.tier, 0.01)
    wait, faults = courier._stopping.wait, [MemoryError()]

    def wait_once(seconds: float) -> bool:
        if faults:
            raise faults.pop()
        return wait(seconds)

    monkeypatch.setattr(courier._stopping, "wait", wait_once)
    monkeypatch.setattr(courier, "look", lambda check: looked.release())
    courier.start()
    assert looked.acquire(timeout=60)
    assert looked.acquire(timeout=60)
    courier.stop()


def test_a_deletion_that_was_killed_half_way_is_not_undone(
    here: Site, there: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is gone here, so a second call finds none, which is as good as a deletion."""

    with monkeypatch.context() as patch:
        patch.setattr(durable, "remove_tree", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            here.store.delete(context.id)
    with pytest.raises(ContextNotFoundError):
        here.store.delete(context.id)
    for site in (here, there, here):
        site.settle()
        with pytest.raises(ContextNotFoundError):
            site.store.manifest(context.id)


def test_a_look_while_a_context_is_deleted_does_not_bring_it_back(
    here: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, looks = catalog.discard, []

    def discard(folder: Path) -> bool:
        looks.append(threading.Thread(target=here.courier.look))
        looks[0].start()
        wait_until(asked.is_set)
        return right(folder)

    noted, asked = here.store.notes.deleted, threading.Event()
    monkeypatch.setattr(here.store.notes, "deleted", lambda id_: (noted(id_), asked.set())[0])
    monkeypatch.setattr(catalog, "discard", discard)
    here.store.update(context.id, lambda present: replace(present, labels={"n": "1"}))
    here.store.delete(context.id)
    looks[0].join(60)
    here.courier._pauses.clear()
    here.settle()
    with pytest.raises(ContextNotFoundError):
        here.store.manifest(context.id)


def test_notes_that_cannot_be_read_now_are_no_fault_of_the_program(
    here: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", raising(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(StoreUnavailableError, match="Too many open files"):
        here.store.elsewhere(context.id)
    monkeypatch.setattr(elsewhere.os, "listdir", raising(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(StoreUnavailableError, match="Too many open files"):
        here.store.notes.forlorn()


def test_a_folder_that_vanished_is_not_made_anew(tmp_path: Path, context: SyntheticContext) -> None:
    """It may be a disk that is not mounted: neither what runs nor the next start takes an empty one for it."""
    folder = tmp_path / "objects"
    url = f"file://{folder}"
    store = open_store(tmp_path / "here", create=True, objects=url)
    context.write(store)
    courier = Courier(store, Tier.of(store))
    assert courier.look()
    folder.rename(tmp_path / "away")
    again = open_store(tmp_path / "here", objects=url)
    for each in (courier, Courier(again, Tier.of(again))):
        assert not each.look()
        assert "was in use, and there is no such folder now" in each.state().problem
    assert not folder.exists()
    with pytest.raises(ObjectsUnavailableError, match="mount it"):
        _ = Tier.of(again).bucket
    (tmp_path / "away").rename(folder)
    back = open_store(tmp_path / "here", objects=url)
    assert Courier(back, Tier.of(back)).look()


def test_a_door_which_has_no_torch_can_fetch(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    (tmp_path / "bucket").mkdir()
    here, courier = site_of(tmp_path / "here", url)
    context = book(1)
    context.write(here)
    look_at_once(courier)
    _, there = site_of(tmp_path / "there", url)
    look_at_once(there)
    program = (
        "import sys; sys.modules['torch'] = None; from index_store.objects.tier import open_store; "
        f"open_store({str(tmp_path / 'there')!r}, objects={url!r}).bring({context.id!r})"
    )
    done = ran([sys.executable, "-c", program], timeout=120)
    assert done.returncode == 0, done.stderr
    assert not Store(tmp_path / "there").verify(context.id)


SITES = {"first writer": range(4), "second writer": range(2, 6), "first reader": (), "second reader": ()}


def killed_at_random(tmp_path: Path, kills: int, seed: int) -> None:
    url = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    draws = random.Random(seed)

    def begin(name: str) -> ForkServerProcess:
        return start(work, tmp_path / name, url, SITES[name])

    def written() -> set[str]:
        return {id_ for path in tmp_path.glob("*/written") for id_ in path.read_text().split()}

    running = {name: begin(name) for name in SITES}
    try:
        for _ in range(kills):
            time.sleep(draws.uniform(0.05, 0.6))
            name = draws.choice([*SITES])
            running[name].kill()
            running[name].join()
            assert running[name].exitcode == -signal.SIGKILL
            running[name] = begin(name)
        wait_until(lambda: len(written()) == 6)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    assert_alike(tmp_path, url)


def assert_alike(tmp_path: Path, url: str) -> None:
    """All stores come to hold all contexts, whole."""
    sites = [site_of(tmp_path / name, url) for name in SITES]
    wanted = {book(seed).id for seed in range(6)}
    for _ in range(20):
        looked = [look_at_once(courier) for _, courier in sites]
        # Whoever looks last may upload what the others looked for before.
        if all(looked) and all({each.id for each in store.list()} == wanted for store, _ in sites):
            break
    for name, (store, courier) in zip(SITES, sites, strict=True):
        assert not (tmp_path / name / "problems").exists()
        assert courier.state() == type(courier.state())()
        assert {each.id for each in store.list()} == wanted
        for id_ in wanted:
            store.bring(id_)
            assert store.verify(id_) == []
    held = look(Tier.of(sites[0][0]).bucket)
    assert held.keys() == wanted
    assert {key for each in held.values() for key in each.contents} == {
        content_key(sites[0][0].manifest(id_)) for id_ in wanted
    }
    assert not any(each.deleted or each.old for each in held.values())


def test_a_few_kills(tmp_path: Path) -> None:
    killed_at_random(tmp_path, kills=6, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 3))
def test_fifty_kills(tmp_path: Path, seed: int) -> None:
    killed_at_random(tmp_path, kills=50, seed=seed)
