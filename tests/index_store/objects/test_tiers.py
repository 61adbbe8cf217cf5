"""A store in front of a bucket: uploaded behind, listed everywhere, fetched on demand, evicted, changed and deleted."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from index_store.errors import (
    ChecksumError,
    ContextCorruptError,
    ContextElsewhereError,
    ContextFetchingError,
    ContextNotFoundError,
    InvalidArgumentError,
    ObjectsUnavailableError,
    StoreBoundError,
    StoreFullError,
)
from index_store.family.children import publish_child, read_own_rows
from index_store.family.prefixes import stored_tokens
from index_store.objects.bucket import Bucket
from index_store.objects.context_file import export_context
from index_store.objects.courier import Courier
from index_store.objects.records import content_key, look
from index_store.objects.tier import MOST_FETCHES, Tier, open_store
from index_store.store.catalog import Store
from index_store.store.clean_up import StoreRoom, clean_up, find_leftovers
from index_store.store.zarr_io import chunk_path
from tests.index_store.cli.conftest import Command, command
from tests.index_store.objects.sites import Faults, FaultyBucket, Site, memory_bucket
from tests.support.store import (
    CREATED,
    SyntheticContext,
    add_index,
    continuation,
    make_whole,
    raising,
    synthetic_context,
)
from tests.support.waiting import wait_until

__all__ = ["command"]  # a fixture


def idle(store: Store, id_: str) -> None:
    """As if nobody had used the context for an hour."""
    os.utime(store.folders.context(id_), (time.time() - 3600,) * 2)


def test_what_is_made_here_is_listed_and_read_there(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    assert here.courier.state().pending == 0
    there.settle()
    manifest = there.store.manifest(there.store.resolve("handbook"))
    assert manifest == here.store.manifest(context.id)
    assert there.store.elsewhere(context.id)
    assert there.store.bytes_here(manifest) == 0
    assert there.store.verify(context.id) == []  # of what is here
    found = stored_tokens(there.store, manifest)  # without a fetch
    assert found.tolist() == context.tokens.tolist()
    assert there.store.elsewhere(context.id)
    with there.store.open(context.id) as opened:
        assert (opened.array("kv", 1, 1) == context.kv[1, 1]).all()
    assert not there.store.elsewhere(context.id)
    assert there.store.verify(context.id) == []
    assert find_leftovers(there.store) == clean_up(there.store) == []
    assert there.courier.look()
    assert len(look(there.tier.bucket)) == 1


def test_a_restart_finds_what_is_not_uploaded_and_what_is(
    tmp_path: Path, bucket: Bucket, context: SyntheticContext
) -> None:
    site = Site.at(tmp_path / "store", bucket)
    context.write(site.store)
    assert site.courier.state().pending == 1
    again = Site.at(tmp_path / "store", bucket)
    assert again.courier.state().pending == 1
    again.settle()
    calls = Faults()
    once_more = Site.at(tmp_path / "store", FaultyBucket(bucket, calls))
    assert once_more.courier.look()
    assert calls.calls == [("list", "contexts/")]


def test_the_same_context_made_twice_is_one(here: Site, unaware: Site, context: SyntheticContext) -> None:
    context.write(unaware.store)
    unaware.settle()
    here.settle()
    (held,) = look(here.tier.bucket).values()
    assert (held.number, len(held.contents)) == (1, 1)
    assert unaware.store.verify(context.id) == []


def test_another_edition_of_a_context_gives_way(here: Site, unaware: Site, context: SyntheticContext) -> None:
    draft = replace(context.draft, created_at=CREATED + timedelta(hours=1), seconds={})
    replace(context, draft=draft).write(unaware.store)
    assert not unaware.courier.look()  # it may be in use
    idle(unaware.store, context.id)
    unaware.settle()
    assert unaware.store.manifest(context.id).created_at == CREATED + timedelta(0)
    with unaware.store.open(context.id):
        assert unaware.store.verify(context.id) == []
    (held,) = look(here.tier.bucket).values()
    assert list(held.contents) == [content_key(context.manifest)]


def test_changes_of_both_sides_are_joined(here: Site, there: Site, context: SyntheticContext) -> None:
    here.store.update(context.id, partial(replace, labels={"a": "1"}))
    there.store.update(context.id, partial(replace, pinned=True))
    here.settle()
    there.settle()
    here.settle()
    for site in (here, there):
        manifest = site.store.manifest(context.id)
        assert (manifest.labels, manifest.pinned, manifest.name) == ({"a": "1"}, True, "handbook")
    here.store.update(context.id, partial(replace, name="first"))
    there.store.update(context.id, partial(replace, name="second"))
    here.settle()
    there.settle()
    here.settle()
    assert {site.store.manifest(context.id).name for site in (here, there)} == {"second"}
    (held,) = look(here.tier.bucket).values()
    assert (held.number, held.old) == (5, [])


def test_an_index_that_was_added_there_comes_here(here: Site, there: Site, context: SyntheticContext) -> None:
    there.store.bring(context.id)
    added, _ = add_index(there.store, there.store.manifest(context.id))
    there.settle()
    idle(here.store, context.id)
    here.settle()
    assert here.store.manifest(context.id) == added
    faults = here.fails()
    with here.store.open(context.id):
        assert here.store.verify(context.id) == []
    read = [verb for verb, _ in faults.calls].count("read")
    assert read <= 1 + added.model.layers  # what was here was not read again
    (held,) = look(here.tier.bucket).values()
    assert list(held.contents) == [content_key(added)]


def test_deletion_reaches_everybody(here: Site, there: Site, context: SyntheticContext) -> None:
    there.store.bring(context.id)
    here.store.delete(context.id)
    here.settle()
    there.settle()
    for site in (here, there):
        with pytest.raises(ContextNotFoundError):
            site.store.manifest(context.id)
        assert site.courier.look()
    (held,) = look(here.tier.bucket).values()
    assert (held.deleted, held.contents, held.old) == (True, {}, [])
    context.write(there.store)
    there.settle()
    here.settle()
    assert here.store.manifest(context.id).name == "handbook"
    here.store.bring(context.id)
    assert here.store.verify(context.id) == []


def test_what_is_missing_was_not_deleted(here: Site, context: SyntheticContext) -> None:
    here.store.folders.context(context.id).rename(here.store.path / "lost")
    here.settle()
    here.store.bring(context.id)
    assert here.store.verify(context.id) == []


def test_a_store_without_the_bucket_deletes_for_all(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    Store(here.store.path).delete(context.id)
    here.settle()
    there.settle()
    assert there.store.list() == []


def test_expiry_reaches_everybody_unless_it_was_renewed(tmp_path: Path, bucket: Bucket) -> None:
    here, there = Site.at(tmp_path / "here", bucket), Site.at(tmp_path / "there", bucket)
    short = synthetic_context(seed=1, name="short", ttl=timedelta(days=1))
    renewed = synthetic_context(seed=2, name="renewed", ttl=timedelta(days=1))
    here.add(short, renewed)
    there.settle()
    there.store.update(renewed.id, partial(replace, expires_at=None))
    there.settle()
    for each in (short, renewed):
        idle(here.store, each.id)
    assert set(StoreRoom(here.store).sweep()) == {short.id, renewed.id}
    here.settle()
    there.settle()
    for site in (here, there):
        assert [each.name for each in site.store.list()] == ["renewed"]


def test_children_come_with_their_parents(here: Site, there: Site, context: SyntheticContext) -> None:
    child = publish_child(here.store, continuation(here.store, context.id))
    here.settle()
    there.settle()
    assert [each.id for each in there.store.children(context.id)] == [child.id]
    assert (read_own_rows(there.store, child).rows[2] == read_own_rows(here.store, child).rows[2]).all()
    tokens = stored_tokens(there.store, child)
    assert tokens is not None
    assert len(tokens) == child.token_count
    make_whole(here.store, child)
    here.settle()
    idle(there.store, child.id)
    there.settle()
    whole = there.store.manifest(child.id)
    assert whole.parent is None
    there.store.bring(child.id)
    assert there.store.verify(child.id) == []
    there.store.delete(context.id)
    there.settle()
    here.settle()
    assert [each.id for each in here.store.list()] == [child.id]


def stored_bytes(context: SyntheticContext) -> int:
    return context.manifest.kv_bytes + context.manifest.index_bytes


def test_the_least_recently_used_goes_and_comes_back(tmp_path: Path, bucket: Bucket) -> None:
    contexts = [synthetic_context(seed=seed, name=f"book {seed}") for seed in range(4)]
    size = stored_bytes(contexts[0])
    site = Site.at(tmp_path / "store", bucket, store_bytes=2 * size)
    for each in contexts[:3]:
        each.write(site.store)
    room = StoreRoom(site.store, 2 * size)
    assert room.sweep() == []  # nothing that is not uploaded goes
    site.settle()
    assert room.sweep() == []  # nor what was used just now
    for age, each in enumerate(contexts[:3]):
        os.utime(site.store.folders.context(each.id), (time.time() - 1000 + age,) * 2)
    site.store.update(contexts[0].id, partial(replace, pinned=True))
    os.utime(site.store.folders.context(contexts[0].id), (time.time() - 2000,) * 2)
    site.settle()
    os.utime(site.store.folders.context(contexts[0].id), (time.time() - 2000,) * 2)
    assert room.sweep() == [contexts[1].id]
    assert site.store.elsewhere(contexts[1].id)
    assert len(site.store.list()) == 3
    contexts[3].write(site.store)
    with pytest.raises(StoreBoundError, match=r"used in the last 120 s stays: ask again later"):
        room.make(3 * size)
    again = Site.at(tmp_path / "store", bucket, store_bytes=3 * size)  # after a restart
    idle(again.store, contexts[2].id)
    again.settle()
    again.store.bring(contexts[1].id)
    assert again.store.verify(contexts[1].id) == []
    assert again.store.elsewhere(contexts[2].id)
    assert StoreRoom(again.store).used() == 3 * size
    assert again.courier.look()


def test_eviction_gives_way_to_whoever_begins_to_read(here: Site, context: SyntheticContext) -> None:
    asked: list[bool] = []

    def unwanted(_: object) -> bool:
        asked.append(here.store.elsewhere(context.id))
        return not asked[-1]

    assert not here.store.evict(context.id, unwanted)
    assert asked == [False, True]
    assert not here.store.elsewhere(context.id)
    assert here.store.verify(context.id) == []


def test_one_fetch_for_many_who_wait(here: Site, there: Site, context: SyntheticContext) -> None:
    go = threading.Event()
    faults = there.fails(before=lambda verb, key: verb != "size" or go.wait(60))
    threads = [threading.Thread(target=there.store.bring, args=(context.id,)) for _ in range(8)]
    for each in threads:
        each.start()
    wait_until(lambda: bool(faults.calls))
    assert len(there.tier.fetches()) == 1
    go.set()
    for each in threads:
        each.join()
    assert [verb for verb, _ in faults.calls].count("size") == 1
    assert there.store.verify(context.id) == []
    assert not there.tier.fetches()


def test_who_does_not_wait_is_told_how_far_it_is(here: Site, there: Site, context: SyntheticContext) -> None:
    go = threading.Event()
    there.fails(before=lambda verb, key: go.wait(60))
    with pytest.raises(ContextFetchingError, match=r"0 B of .* ask again, or send the text") as raised:
        there.store.bring(context.id, limit_s=0.0)
    assert raised.value.retry_after_s == 5.0

    with pytest.raises(InterruptedError):
        there.store.bring(context.id, raising(InterruptedError))
    go.set()
    there.store.bring(context.id)  # which went on
    assert not there.store.elsewhere(context.id)


def test_a_fetch_that_failed_goes_on_from_what_it_had(
    here: Site, there: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index_store.objects.context_file._RANGE_BYTES", 600)
    there.settle()
    pristine, reads = there.tier.bucket, [0]

    def fail_later(verb: str, key: str) -> None:
        reads[0] += verb == "read"
        if reads[0] > 12:
            raise ObjectsUnavailableError("gone")

    there.fails(before=fail_later)
    with pytest.raises(ObjectsUnavailableError, match="gone"):
        there.store.bring(context.id)
    assert there.store.elsewhere(context.id)
    first, faults = reads[0], Faults()
    there.tier._bucket = FaultyBucket(pristine, faults)
    there.store.bring(context.id)
    second = [verb for verb, _ in faults.calls].count("read")
    faults.calls.clear()
    whole = Site.at(there.store.path.with_name("whole"), FaultyBucket(pristine, faults))
    whole.settle()
    faults.calls.clear()
    whole.store.bring(context.id)
    assert second < [verb for verb, _ in faults.calls].count("read") <= first + second
    assert there.store.verify(context.id) == []


def test_what_is_spoiled_on_the_way_to_the_bucket_is_not_recorded(
    tmp_path: Path, bucket: Bucket, context: SyntheticContext
) -> None:
    faults = Faults(torn=1.0)
    site = Site.at(tmp_path / "store", FaultyBucket(bucket, faults))
    context.write(site.store)
    assert not site.courier.look()
    state = site.courier.state()
    assert (state.pending, state.pending_bytes > 0) == (1, True)
    assert "crc32c" in state.problem
    assert look(bucket) == {}
    idle(site.store, context.id)
    assert StoreRoom(site.store, 1).sweep() == []
    assert not site.courier.look()  # not before a pause
    faults.torn = 0.0
    site.settle()
    assert site.courier.state().pending == 0


def test_a_damaged_context_is_not_uploaded(tmp_path: Path, bucket: Bucket, context: SyntheticContext) -> None:
    site = Site.at(tmp_path / "store", bucket)
    context.write(site.store)
    path = chunk_path(site.store.folders.context(context.id), context.manifest.kv, (1, 1))
    path.write_bytes(bytes(path.stat().st_size))
    assert not site.courier.look()
    assert str(path) in site.courier.state().problem
    assert look(bucket) == {}


@pytest.mark.parametrize("seed", range(6))
def test_faults_of_all_kinds_end_in_the_same_contexts(
    tmp_path: Path, bucket: Bucket, context: SyntheticContext, seed: int
) -> None:
    faults = Faults(seed, failing=0.15, cut=0.05, flipped=0.05, unanswered=0.15, torn=0.15)
    here = Site.at(tmp_path / "here", FaultyBucket(bucket, faults))
    there = Site.at(tmp_path / "there", FaultyBucket(bucket, replace(faults, seed=seed + 100)))
    contexts = [context, *(synthetic_context(seed=10 + each, name=f"book {each}") for each in range(3))]
    for number, each in enumerate(contexts):
        each.write((here, there)[number % 2].store)
    for _ in range(60):
        for site in (here, there):
            site.courier._pauses.clear()
            site.courier.look()
    for site in (here, there):
        assert site.courier.look() or (site.courier._pauses.clear(), site.settle()) is not None
        assert {each.id for each in site.store.list()} == {each.id for each in contexts}
        for each in contexts:
            for _ in range(40):
                try:
                    site.store.bring(each.id)
                    break
                except (ObjectsUnavailableError, ContextCorruptError):
                    continue
            assert site.store.verify(each.id) == []


def test_a_slow_bucket_holds_up_nobody_else(here: Site, there: Site, context: SyntheticContext) -> None:
    other = synthetic_context(seed=7, name="other")
    other.write(there.store)
    there.settle()
    stuck = threading.Event()
    there.fails(before=lambda verb, key: stuck.wait(60))
    waiting = threading.Thread(target=there.store.bring, args=(context.id,))
    waiting.start()
    with there.store.open(other.id) as opened:
        assert (opened.array("kv", 0, 0) == other.kv[0, 0]).all()
    assert there.store.update(context.id, partial(replace, name="renamed"), wait_s=0.0).name == "renamed"
    assert waiting.is_alive()
    stuck.set()
    waiting.join()


def test_a_full_disk_fails_the_fetch_alone(
    here: Site, there: Site, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:

    with monkeypatch.context() as patch:
        patch.setattr(
            "index_store.store.writer.ArrayFiles.write_part", raising(OSError(28, "No space left on device"))
        )
        with pytest.raises(StoreFullError):
            there.store.bring(context.id)
    assert there.store.elsewhere(context.id)
    there.store.bring(context.id)
    assert there.store.verify(context.id) == []


def test_without_the_bucket_it_is_said_where_a_context_is(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    plain = Store(there.store.path)
    with pytest.raises(ContextElsewhereError, match=r"start this with --objects memory:///tests"):
        plain.open(context.id)
    assert plain.manifest(context.id).name == "handbook"


def test_the_bucket_that_lost_a_context_is_told(here: Site, there: Site, context: SyntheticContext) -> None:
    bucket = there.tier.bucket
    for held in look(bucket).values():
        bucket.delete([held.key, *held.contents])
    with pytest.raises(ObjectsUnavailableError, match="may have been deleted or replaced"):
        there.store.bring(context.id)
    assert not there.courier.look()
    assert "has it no more" in there.courier.state().problem
    here.settle()  # which has it
    there.settle()
    there.store.bring(context.id)
    assert there.store.verify(context.id) == []


def test_a_file_that_the_bucket_lost_is_uploaded_again(here: Site, context: SyntheticContext) -> None:
    here.tier.bucket.delete([content_key(context.manifest)])
    here.settle()
    (held,) = look(here.tier.bucket).values()
    assert list(held.contents) == [content_key(context.manifest)]


def test_a_richer_edition_keeps_what_others_said_of_it(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    there.store.bring(context.id)
    add_index(there.store, there.store.manifest(context.id))
    here.store.update(context.id, partial(replace, labels={"of": "others"}))
    here.settle()
    there.settle()
    assert there.courier.look()
    assert there.store.manifest(context.id).labels == {"of": "others"}
    assert len(there.store.manifest(context.id).indexes) == 2


def test_an_old_writer_does_not_take_a_number_again(here: Site, context: SyntheticContext) -> None:
    """Numbers before the last are removed, and a writer that was asleep may make one of these once more."""
    stale = look(here.tier.bucket)[context.id]
    for name in ("b", "c", "d"):
        here.store.update(context.id, partial(replace, name=name))
        here.settle()
    manifest = here.store.manifest(context.id)
    with pytest.raises(Exception, match=r"^$"):
        here.courier._record(here.tier.bucket, replace(manifest, name="stale"), stale)
    assert look(here.tier.bucket)[context.id].number == 4
    here.settle()
    assert here.store.manifest(context.id).name == "d"


def test_the_courier_runs_by_itself_and_ends(
    tmp_path: Path, bucket: Bucket, context: SyntheticContext
) -> None:
    site = Site.at(tmp_path / "store", bucket)
    site.courier._every_s = 0.01
    site.courier.start()
    context.write(site.store)
    wait_until(lambda: site.courier.state().pending == 0)
    site.courier.stop()
    assert not site.courier._thread.is_alive()


def test_checksums_are_those_of_the_manifest(here: Site, there: Site, context: SyntheticContext) -> None:
    """A context whose file is intact, but which is not the one that was asked for."""
    other = synthetic_context(seed=3, name="other")
    here.add(other)
    there.settle()
    bucket = there.tier.bucket
    wrong = bucket.get(content_key(other.manifest))
    bucket.put(content_key(context.manifest), iter([wrong]), len(wrong))
    with pytest.raises(ContextCorruptError, match="or another edition of it"):
        there.store.bring(context.id)
    assert issubclass(ChecksumError, ContextCorruptError)


def test_the_commands(command: Command, context: SyntheticContext, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    store = command.store
    assert command.ok("sync", "--objects", url) == f"{store.path} and {url} have the same 1 contexts\n"
    other = Command(Store(tmp_path / "other", create=True), command._capture)
    assert other.json("sync", "--objects", url) == {"done": True, "pending": 0, "problem": ""}
    (listed,) = other.json("ls")["contexts"]
    assert (listed["name"], listed["placement"]) == (f"contexts/{context.id}", "objects")
    assert [line.split()[3] for line in other.ok("ls").splitlines()] == ["MEMORY", "objects"]
    assert f"start this with --objects {url}" in other.fails("export", "handbook", str(tmp_path / "file"))
    assert other.ok("verify", "--objects", url) == f"{context.id}: ok\n"
    (file,) = (tmp_path / "bucket").rglob("*.context")
    data = file.read_bytes()
    file.write_bytes(data[:-9] + bytes([data[-9] ^ 2]) + data[-8:])
    code, out, _ = other.run("verify", "--objects", url)
    assert (code, "CHECKSUM_MISMATCH" in out, file.name in out) == (1, True, True)
    assert file.name in other.fails("fetch", "handbook", "--objects", url)
    file.write_bytes(data)
    assert other.ok("fetch", "handbook", "--objects", url) == f"fetched {context.id}\n"
    assert other.json("ls")["contexts"][0]["placement"] == ""
    other.ok("rm", "handbook")
    other.ok("sync", "--objects", url)
    command.ok("sync", "--objects", url)
    assert store.list() == []
    code, _, err = command.run("sync", "--objects", "nothing://there")
    assert (code, "expected s3://BUCKET/PREFIX" in err) == (2, True)


def test_what_the_bucket_lost_does_not_leave_the_disk(here: Site, context: SyntheticContext) -> None:
    """Until the bucket has it again: the copy here is the only one."""
    bucket = here.tier.bucket
    for held in look(bucket).values():
        bucket.delete([held.key, *held.contents])

    def refuse(verb: str, key: str) -> None:
        if verb == "put":
            raise ObjectsUnavailableError("no right to write")

    here.fails(before=refuse)
    assert not here.courier.look()
    idle(here.store, context.id)
    room = StoreRoom(here.store, 1)
    assert room.sweep() == []
    assert here.store.verify(context.id) == []
    assert not here.store.elsewhere(context.id)
    here.tier._bucket = bucket
    here.settle()
    idle(here.store, context.id)
    assert room.sweep() == [context.id]


def test_one_context_that_fails_holds_up_no_other(
    here: Site, unaware: Site, context: SyntheticContext, caplog: pytest.LogCaptureFixture
) -> None:
    other = synthetic_context(seed=7, name="other")
    here.add(other)
    first = min(context.id, other.id)

    def fail(verb: str, key: str) -> None:
        if first in key:
            raise RuntimeError("of a kind that nobody expects")

    unaware.fails(before=fail)
    assert not unaware.courier.look()
    assert [each.id for each in unaware.store.list()] == [max(context.id, other.id)]
    assert "the log has the details" in unaware.courier.state().problem
    assert "of a kind that nobody expects" in caplog.text


def test_a_context_that_a_job_makes_here_holds_up_no_other(
    here: Site, unaware: Site, context: SyntheticContext
) -> None:
    other = synthetic_context(seed=7, name="other")
    here.add(other)
    with unaware.store.lock(min(context.id, other.id)):  # until it is made, which may take hours
        assert not unaware.courier.look()
        assert [each.id for each in unaware.store.list()] == [max(context.id, other.id)]
    unaware.settle()
    assert len(unaware.store.list()) == 2


def test_another_bucket_is_not_said_to_have_lost_a_context(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    tier = Tier(there.store, "memory:///others", lambda _: Bucket(memory_bucket()._store, "memory:///others"))
    courier = Courier(there.store, tier)
    assert not courier.look()
    assert "is in memory:///tests alone; bring it here" in courier.state().problem


def test_an_export_keeps_its_context_on_the_disk(
    here: Site, context: SyntheticContext, tmp_path: Path
) -> None:
    ages: list[float] = []

    def linger(_: int) -> None:
        ages.append(time.time() - os.stat(here.store.folders.context(context.id)).st_mtime)
        idle(here.store, context.id)

    export_context(here.store, here.store.manifest(context.id), tmp_path / "file", linger)
    assert len(ages) > 2
    assert max(ages) < 600


def test_what_leaves_the_disk_while_it_is_verified_is_not_damaged(
    here: Site, context: SyntheticContext
) -> None:
    idle(here.store, context.id)
    left: list[str] = []
    assert here.store.verify(context.id, lambda _: left.extend(StoreRoom(here.store, 1).sweep())) == []
    assert left == [context.id]
    assert here.store.elsewhere(context.id)


def test_a_file_of_another_edition_that_is_mapped_stays_as_it_is(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    there.store.bring(context.id)
    folder = there.store.folders.context(context.id)
    path = chunk_path(folder, context.manifest.kv, (1, 0))
    other = bytes(path.stat().st_size)
    path.write_bytes(other)
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    there.store.notes.note_elsewhere(context.id, there.tier.url)
    there.store.bring(context.id)
    assert there.store.verify(context.id) == []
    assert mapped.tobytes() == other


@pytest.mark.parametrize("left", [b"", b'{"shape": [1', b"{}"])
def test_metadata_that_a_killed_fetch_left_is_replaced(
    here: Site, there: Site, context: SyntheticContext, left: bytes
) -> None:
    file = there.store.folders.context(context.id) / context.manifest.kv.path / "zarr.json"
    file.parent.mkdir()
    file.write_bytes(left)
    with there.store.open(context.id) as opened:
        assert (opened.array("kv", 1, 1) == context.kv[1, 1]).all()
    assert there.store.verify(context.id) == []


def test_fetches_that_wait_have_no_threads(here: Site, there: Site, context: SyntheticContext) -> None:
    others = [synthetic_context(seed=seed, name=f"book {seed}") for seed in range(2, 9)]
    here.add(*others)
    there.settle()
    stuck = threading.Event()
    there.fails(before=lambda verb, key: stuck.wait(60))
    for each in [context, *others]:
        with pytest.raises(ContextFetchingError):
            there.store.bring(each.id, limit_s=0.0)
    assert (there.tier._workers, len(there.tier.fetches())) == (MOST_FETCHES, 8)
    stuck.set()
    for each in [context, *others]:
        there.store.bring(each.id)
        assert there.store.verify(each.id) == []
    wait_until(lambda: there.tier._workers == 0)


def test_a_fetch_that_nobody_waits_for_never_begins(
    here: Site, there: Site, context: SyntheticContext
) -> None:
    """One that has begun goes on, and so does one that somebody else waits for, or was told to ask for again."""
    others = [synthetic_context(seed=seed, name=f"book {seed}") for seed in range(2, 9)]
    here.add(*others)
    there.settle()
    stuck = threading.Event()
    there.fails(before=lambda verb, key: stuck.wait(60))

    asked, unwanted, wanted = [context, *others[: MOST_FETCHES - 1]], others[-2], others[-1]
    for each in (*asked, wanted):
        with pytest.raises(ContextFetchingError):
            there.store.bring(each.id, limit_s=0.0)
    for each in (*asked, unwanted, wanted):
        with pytest.raises(TimeoutError):
            there.store.bring(each.id, check=raising(TimeoutError))
    assert {each.id for each in there.tier.fetches()} == {each.id for each in (*asked, wanted)}
    stuck.set()
    wait_until(lambda: there.tier._workers == 0)
    assert [there.store.elsewhere(each.id) for each in (*asked, wanted, unwanted)] == [
        *(False for _ in (*asked, wanted)),
        True,
    ]
    there.store.bring(unwanted.id)
    assert there.store.verify(unwanted.id) == []


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@bucket/p", "az://container/p?sig=SECRET", "gs://b#SECRET"])
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="credentials in the environment") as raised:
        open_store(tmp_path / "store", True, url)
    assert "SECRET" not in str(raised.value)
