"""Writing is all or nothing: full disks, wrong use, and writers that are killed or meet leave nothing half visible."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import zarr

from index_store.errors import (
    FormatVersionError,
    InvalidArgumentError,
    ManifestError,
    MissingChunkError,
    SparseKVError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from index_store.store import array_files, writer, zarr_io
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.json_fields import render_document
from index_store.store.description.manifest import MANIFEST_NAME, Manifest
from index_store.store.files import durable, reading
from index_store.store.zarr_io import chunk_path
from tests.index_store.store.writing.writer_processes import write, write_unless_there
from tests.support.forking import FORKING, kill_after, killed_at_each_step, run, start
from tests.support.store import SyntheticContext, add_index, raising, synthetic_context


def names(store: Store) -> list[str]:
    return sorted(os.listdir(store.path / "contexts"))


@contextmanager
def full_disk_at(
    monkeypatch: pytest.MonkeyPatch, write: int, code: int = errno.ENOSPC
) -> Iterator[list[int]]:
    """The n-th file of an array, and every later one, fails half-way, as on a full disk."""
    original, written = writer.new_file, [0]

    def new_file(path: Path, permissions: int) -> BinaryIO:
        if path.name != "manifest.json":
            written[0] += 1
            if written[0] > write:
                path.write_text("part")
                raise OSError(code, os.strerror(code), str(path))
        return original(path, permissions)

    with monkeypatch.context() as patch:
        for module in (writer, array_files):
            patch.setattr(module, "new_file", new_file)
        yield written


def test_full_disk_at_any_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    context = synthetic_context()
    kept = synthetic_context(seed=1)
    kept.write(store)
    with full_disk_at(monkeypatch, 10**9) as written:
        context.write(store)
    store.delete(context.id)
    assert written[0] == 10 + 1 + 6 + 6 + 4 * 4  # metadata of every node, then the chunks
    for turn in range(written[0]):
        code = errno.EDQUOT if turn % 2 else errno.ENOSPC
        with full_disk_at(monkeypatch, turn, code), pytest.raises(StoreFullError, match="no space is left"):
            context.write(store)
        assert names(store) == [kept.id]
    context.write(store)
    assert store.verify(context.id) == []


@pytest.mark.parametrize(
    ("name", "code", "error", "said"),
    [
        ("index_store.store.files.durable.os.fsync", errno.ENOSPC, StoreFullError, "no space is left"),
        ("index_store.store.files.durable.os.fsync", errno.EDQUOT, StoreFullError, "no space is left"),
        (
            "index_store.store.writer.new_file",
            errno.ENOSPC,
            StoreFullError,
            "index-store gc",
        ),  # the manifest's
        ("index_store.store.array_files.sync_path", errno.EIO, StoreError, "Input/output error"),
        ("index_store.store.writer.new_file", errno.EIO, StoreError, "Input/output error"),
    ],
)
def test_nothing_is_published_where_the_disk_refuses(
    store: Store,
    context: SyntheticContext,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    error: type[StoreError],
    said: str,
) -> None:
    """Whoever asks for bytes to reach the disk, and however early."""

    monkeypatch.setattr(array_files, "_SYNC_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(name, raising(OSError(code, os.strerror(code))))
        with pytest.raises(StoreError, match=said) as caught:
            context.write(store)
    assert type(caught.value) is error
    assert names(store) == []


def test_the_kernel_refuses_to_write_more(store: Store) -> None:
    context = synthetic_context(tokens=1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a KV chunk has 32,004 bytes
    try:
        with pytest.raises(StoreFullError, match=r"larger than .* allows.*ulimit -f") as caught:
            context.write(store)
        assert "no space" not in caught.value.message
        assert names(store) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_leaving_without_publishing_removes_everything(store: Store, context: SyntheticContext) -> None:
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        assert len(names(store)) == 1
    assert names(store) == []
    with suppress(KeyboardInterrupt), store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        raise KeyboardInterrupt
    assert names(store) == []


def test_same_content_is_kept_not_replaced(stored: Store, context: SyntheticContext) -> None:
    again = replace(context, draft=replace(context.draft, name="another name"))
    again.write(stored)
    assert stored.manifest(context.id).name == "handbook"
    assert names(stored) == [context.id]


def test_an_expired_context_is_replaced(store: Store) -> None:
    old = synthetic_context(ttl=timedelta(hours=1))
    old.write(store)
    synthetic_context().write(store)
    assert store.manifest(old.id).expires_at is None
    assert names(store) == [old.id]


def exchange(one: Path, other: Path) -> None:
    one.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [lambda one, other: one.unlink(), exchange], ids=["gone", "exchanged"])
def test_a_broken_context_is_replaced(
    stored: Store, context: SyntheticContext, damage: Callable[[Path, Path], None]
) -> None:
    folder = stored.path / "contexts" / context.id
    damage(*(chunk_path(folder, context.manifest.kv, (0, head)) for head in (0, 1)))
    context.write(stored)
    assert stored.verify(context.id) == []
    assert names(stored) == [context.id]


def test_who_goes_on_in_a_folder_makes_half_written_metadata_anew(store: Store, tmp_path: Path) -> None:
    """Of arrays and of the groups above them, as a killed writer leaves it."""
    context, folder = synthetic_context(), tmp_path / "writing"
    with store.writer(context.id, folder) as writer:
        context.write_arrays(writer)
    halves = sorted(folder.rglob("zarr.json"))
    assert {folder, folder / "index", folder / "index" / "tables"} <= {path.parent for path in halves}
    for path in halves:
        path.write_text("{")
    with store.writer(context.id, folder) as writer:
        context.write_arrays(writer)
        writer.publish(context.draft)
    assert store.verify(context.id) == []


def unreadable(folder: Path, patch: pytest.MonkeyPatch) -> None:
    original = reading.open_regular

    def open_regular(found: Path) -> AbstractContextManager[tuple[int, os.stat_result]]:
        if folder / "kv" / "c" in found.parents:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(found)

    patch.setattr(zarr_io, "open_regular", open_regular)


def newer(folder: Path, patch: pytest.MonkeyPatch) -> None:
    document = json.loads((folder / MANIFEST_NAME).read_bytes())
    document.pop("checksum")
    (folder / MANIFEST_NAME).write_bytes(render_document({**document, "format_version": 99}))


@pytest.mark.parametrize(
    ("change", "error"), [(unreadable, StoreUnavailableError), (newer, FormatVersionError)]
)
def test_a_context_that_may_be_well_is_not_replaced(
    stored: Store,
    context: SyntheticContext,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    error: type[SparseKVError],
) -> None:
    """One that cannot be read now, or was written by a later version."""
    added, _ = add_index(stored, context.manifest)
    folder = stored.folders.context(context.id)
    with monkeypatch.context() as patch, stored.writer(context.id) as writer:
        context.write_arrays(writer)
        change(folder, patch)
        with pytest.raises(error):
            writer.publish(context.draft)
    assert names(stored) == [context.id]
    assert (folder / "index" / "more").is_dir()
    if change is unreadable:
        assert stored.manifest(context.id) == added


def test_what_is_replaced_is_removed_once_the_new_one_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic_context(ttl=timedelta(seconds=1)).write(store)
    fresh = synthetic_context()
    seen: list[Sequence[Manifest]] = []
    remove = durable.shutil.rmtree

    def look_and_remove(path: Path) -> None:
        seen.append(Store(store.path).list())
        remove(path)

    monkeypatch.setattr(durable.shutil, "rmtree", look_and_remove)
    fresh.write(store)
    assert seen[0] == [fresh.manifest]
    assert names(store) == [fresh.id]


def test_what_cannot_be_removed_of_a_replaced_context_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic_context(ttl=timedelta(seconds=1)).write(store)
    fresh = synthetic_context()

    with monkeypatch.context() as patch:
        patch.setattr(durable.shutil, "rmtree", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        fresh.write(store)
    assert store.list() == [fresh.manifest]
    assert [item.kind for item in clean_up(store)] == ["trash"]


def test_an_incomplete_context_is_not_published(store: Store, context: SyntheticContext) -> None:
    manifest = context.draft
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        with pytest.raises(InvalidArgumentError, match="lists arrays"):
            writer.publish(manifest)
        for entry, _ in context.by_layer():
            assert writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype) == entry
        writer.write_chunk("kv", (0, 0), context.kv[0, 0])
        with pytest.raises(MissingChunkError, match=r"kv/c/0/1/.* was never written"):
            writer.publish(manifest)
        with pytest.raises(InvalidArgumentError, match="that create_array returned"):
            writer.publish(context.manifest)
        with pytest.raises(InvalidArgumentError, match="expected"):
            writer.publish(replace(manifest, id="0" * 64))
    assert names(store) == []


def test_wrong_chunks_are_refused(store: Store, context: SyntheticContext) -> None:
    kv = context.manifest.kv
    good = context.kv[0, 0]
    with store.writer(context.id) as writer:
        writer.create_array(kv.path, kv.shape, kv.chunks, kv.dtype)
        for data, said in (
            (good[:-1], "a chunk is"),
            (good.transpose(0, 2), "a chunk is"),
            (good.view(torch.int16), "a chunk is bfloat16, got int16"),
            (good.float(), "a chunk is"),
            (good.to(torch.complex64), "cannot be stored"),
        ):
            with pytest.raises(InvalidArgumentError, match=said):
                writer.write_chunk("kv", (0, 0), data)
        for indices in ((3, 0), (0, 2), (-1, 0), (0, 0, 1), (0,) * 6):
            with pytest.raises(InvalidArgumentError, match="outside the grid"):
                writer.write_chunk("kv", indices, good)
        with pytest.raises(InvalidArgumentError, match="was not created"):
            writer.write_chunk("keys", (0, 0), good)
        with pytest.raises(InvalidArgumentError, match="created before"):
            writer.create_array(kv.path, kv.shape, kv.chunks, kv.dtype)
        with pytest.raises(ManifestError, match="path"):
            writer.create_array("../kv", kv.shape, kv.chunks, kv.dtype)
        writer.write_chunk("kv", (0, 0), good[None, None])
        strided = torch.stack([good, good], dim=-1)[..., 0]
        writer.write_chunk("kv", (0, 1), strided)
        written = [chunk_path(next((store.path / "contexts").iterdir()), kv, (0, head)) for head in (0, 1)]
        assert written[0].read_bytes() == written[1].read_bytes()


def test_chunks_from_several_threads(store: Store) -> None:
    context = synthetic_context(tokens=200)
    manifest = context.draft
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        jobs = []
        for entry, data in context.by_layer():
            writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
            jobs += [
                (entry.path, (row, head), data[row, head])
                for row in range(data.shape[0])
                for head in range(data.shape[1])
            ]
        threads = [threading.Thread(target=writer.write_chunk, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.publish(manifest) == context.manifest
    assert store.manifest(context.id) == context.manifest
    assert store.verify(context.id) == []
    assert torch.equal(
        store.open(context.id).array("kv", 2, 1).view(torch.int16), context.kv[2, 1].view(torch.int16)
    )


@pytest.mark.parametrize("rows", [1, 7, 36, 37])
def test_rows_that_come_bit_by_bit_are_what_zarr_reads(
    store: Store, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as whole chunks, checksums included, also where the disk is asked for them in between."""
    monkeypatch.setattr(array_files, "_SYNC_BYTES", 300)
    monkeypatch.setattr(array_files, "_PIECE_BYTES", 100)
    context = synthetic_context(tokens=37)
    synced: list[int] = []
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        for entry, data in context.by_layer():
            writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
            for place in itertools.product(*map(range, data.shape[:2])):
                if entry.path != "kv":
                    writer.write_chunk(entry.path, place, data[place])
                    continue
                writer.write_rows("kv", place, 0, data[place][:1] * 0)  # begun anew
                for start in range(0, 37, rows):
                    writer.write_rows("kv", place, start, data[place][start : start + rows])
        with pytest.raises(ValueError, match="from 32 on were written, expected those from 1184 on"):
            writer.write_rows("kv", (0, 0), 1, context.kv[0, 0, 1:])
        with pytest.raises(InvalidArgumentError, match="from row 36 on"):
            writer.write_rows("kv", (0, 0), 36, context.kv[0, 0, :2])
        writer.sync(synced.append)
        assert writer.publish(context.draft) == context.manifest
    assert sum(synced) >= sum(entry.nbytes for entry in context.manifest.arrays)
    assert store.verify(context.id) == []
    array: Any = zarr.open_array(store.path / "contexts" / context.id / "kv", mode="r")
    assert torch.equal(
        torch.from_numpy(array[:]).view(torch.bfloat16).view(torch.int16), context.kv.view(torch.int16)
    )


def test_unfinished_rows_are_not_published(store: Store, context: SyntheticContext) -> None:
    with store.writer(context.id) as writer:
        context.write_arrays(writer)
        writer.write_rows("kv", (1, 1), 0, context.kv[1, 1, :-1])
        with pytest.raises(MissingChunkError, match=r"kv/c/1/1/.* was never written"):
            writer.publish(context.draft)
    assert names(store) == []


def test_writer_killed_at_any_step(store: Store) -> None:
    context = synthetic_context(tokens=50, seed=1)
    kept = synthetic_context(seed=2)
    kept.write(store)
    steps = 0
    for _ in killed_at_each_step(write, store.path, 1, 50):
        steps += 1
        visible = {manifest.id for manifest in store.list()}
        if context.id in visible:
            # Killed after the rename, before it was made durable: complete, or not there at all.
            assert store.verify(context.id) == []
            store.delete(context.id)
        else:
            assert visible == {kept.id}
            (left,) = (name for name in names(store) if name.startswith("."))
            assert left.startswith(f".tmp-{context.id}-")
            assert [item.kind for item in clean_up(store)] == ["temporary"]
        assert names(store) == [kept.id]
    # 7 arrays, 1 + 6 + 6 + 4 * 4 chunks, the sync, and the rename's sync
    assert steps == 7 + 29 + 2
    assert store.verify(context.id) == []


@pytest.mark.nightly
def test_writer_killed_at_random_moments(store: Store) -> None:
    chooser = random.Random(0)
    expected = set()
    for seed in (100, 101):  # the first one waits for what it is forked from
        began = time.monotonic()
        assert run(write, store.path, seed) == 0
        duration = time.monotonic() - began
        expected.add(synthetic_context(tokens=400, seed=seed).id)
    killed = 0
    for seed in range(1, 91):
        if kill_after(chooser.uniform(0, duration), write, store.path, seed):
            killed += 1
        else:  # it was done before the blow: the machine has less to do than when the duration was taken
            duration *= 0.8
        visible = {manifest.id for manifest in store.list()}
        assert expected <= visible <= expected | {synthetic_context(tokens=400, seed=seed).id}
        expected = visible
        if killed == 8:
            break
    assert killed == 8
    for id_ in expected:
        assert store.verify(id_) == []
    clean_up(store)
    assert set(names(store)) == expected


def test_two_jobs_on_the_same_content(store: Store) -> None:
    said, go_on = FORKING.SimpleQueue(), FORKING.Event()
    jobs = [start(write_unless_there, store.path, 3, said, go_on)]
    assert said.get() == "holds"
    jobs.append(start(write_unless_there, store.path, 3, said, go_on))
    assert said.get() == "waits"
    go_on.set()
    assert [said.get(), said.get()] == ["wrote", "found"]
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    assert names(store) == [synthetic_context(tokens=400, seed=3).id]
    assert os.listdir(store.path / "locks") == []


def test_a_killed_holder_gives_up_its_lock(store: Store) -> None:
    said, never = FORKING.SimpleQueue(), FORKING.Event()
    holder = start(write_unless_there, store.path, 3, said, never)
    assert said.get() == "holds"
    with store.lock(synthetic_context(tokens=400, seed=3).id, holder.kill):
        holder.join()
    assert holder.exitcode == -9


def test_unlocked_writers_of_the_same_content(store: Store) -> None:
    writers = [start(write, store.path, 4) for _ in range(4)]
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0] * 4
    context = synthetic_context(tokens=400, seed=4)
    assert names(store) == [context.id]
    assert store.verify(context.id) == []


def test_clean_up_never_takes_a_living_writer(store: Store) -> None:
    contexts = [synthetic_context(tokens=20, seed=seed, index_dtypes=("int8",)) for seed in range(12)]
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            # It may take a folder that is empty and not locked yet: the writer then makes another.
            assert sum(item.nbytes for item in clean_up(store)) == 0

    with ThreadPoolExecutor(5) as pool:
        cleaners = [pool.submit(clean) for _ in range(2)]
        try:
            for written in [pool.submit(context.write, store) for context in contexts]:
                written.result()
        finally:
            done.set()
        for cleaner in cleaners:
            cleaner.result()
    assert names(store) == sorted(context.id for context in contexts)
