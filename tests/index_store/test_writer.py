"""Writing is all or nothing: killed writers, full disks, races, and wrong use leave nothing visible."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from index_store import folders
from index_store.catalog import Store
from index_store.errors import (
    InvalidArgumentError,
    ManifestError,
    MissingChunkError,
    StoreError,
    StoreFullError,
)
from index_store.zarr_io import chunk_path
from tests.support_store import SyntheticContext, synthetic_context

ROOT = Path(__file__).resolve().parents[2]


class Processes:
    """Children of tests.index_store.writer_processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.index_store.writer_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            bufsize=1,
        )

    def start(self, store: Store, **request: object) -> int:
        """Starts one child; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"store": str(store.path), **request}) + "\n")
        started = self.line()
        assert started.startswith("started "), started
        return int(started.split()[1])

    def line(self) -> str:
        """The next line that the children or their parent say."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def wait(self, pid: int) -> int:
        """Waits for the end of the only child; returns its status (negative: the signal that killed it)."""
        ended = self.line().split()
        assert ended[:2] == ["ended", str(pid)], ended
        return os.waitstatus_to_exitcode(int(ended[2]))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def names(store: Store) -> list[str]:
    return sorted(os.listdir(store.path / "contexts"))


def test_writer_killed_at_any_step(store: Store, processes: Processes) -> None:
    context = synthetic_context(tokens=50, seed=1)
    kept = synthetic_context(seed=2)
    kept.write(store)
    steps = 0
    while True:
        status = processes.wait(processes.start(store, seed=1, tokens=50, die_at=steps))
        if status == 0:
            break
        assert status == -9
        visible = {manifest.id for manifest in store.list()}
        if context.id in visible:
            # Killed after the rename, before it was made durable: complete, or not there at all.
            assert store.verify(context.id) == []
            store.delete(context.id)
        else:
            assert visible == {kept.id}
            (left,) = (name for name in names(store) if name.startswith("."))
            assert left.startswith(f".tmp-{context.id}-")
            assert [item.kind for item in store.gc()] == ["temporary"]
        assert names(store) == [kept.id]
        steps += 1
    # 6 arrays, 1 + 6 + 4 * 4 chunks, the sync, and the rename's sync
    assert steps == 6 + 23 + 2
    assert store.verify(context.id) == []


def test_writer_killed_at_random_moments(store: Store, processes: Processes) -> None:
    chooser = random.Random(0)
    expected = set()
    for seed in (100, 101):  # the first one waits for the interpreter's start
        began = time.monotonic()
        assert processes.wait(processes.start(store, seed=seed)) == 0
        duration = time.monotonic() - began
        expected.add(synthetic_context(tokens=400, seed=seed).id)
    killed = 0
    for seed in range(1, 21):
        pid = processes.start(store, seed=seed)
        time.sleep(chooser.uniform(0, duration))
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
        killed += processes.wait(pid) == -9
        visible = {manifest.id for manifest in store.list()}
        assert expected <= visible <= expected | {synthetic_context(tokens=400, seed=seed).id}
        expected = visible
    assert killed >= 5
    for id_ in expected:
        assert store.verify(id_) == []
    store.gc()
    assert set(names(store)) == expected


def test_a_new_writer_clears_what_a_killed_one_left(store: Store, processes: Processes) -> None:
    assert processes.wait(processes.start(store, seed=1, die_at=9)) == -9
    assert len(names(store)) == 1
    context = synthetic_context()
    context.write(store)
    assert names(store) == [context.id]


def test_two_jobs_on_the_same_content(store: Store, processes: Processes) -> None:
    processes.start(store, seed=3, lock=True, work=0.5)
    time.sleep(0.2)
    processes.start(store, seed=3, lock=True)
    said = [processes.line() for _ in range(5)]
    assert [line for line in said if not line.startswith("ended")] == ["waits", "wrote", "found"]
    assert [line.split()[2] for line in said if line.startswith("ended")] == ["0", "0"]
    assert names(store) == [synthetic_context(tokens=400, seed=3).id]
    assert os.listdir(store.path / "locks") == []


def test_a_killed_holder_gives_up_its_lock(store: Store, processes: Processes) -> None:
    pid = processes.start(store, seed=3, lock=True, work=60)
    context = synthetic_context(tokens=400, seed=3)
    while not (store.path / "locks" / context.id).exists():
        time.sleep(0.01)
    waits = threading.Event()
    threading.Thread(target=lambda: (waits.wait(10), os.kill(pid, 9))).start()
    with store.lock(context.id, waits.set):
        assert waits.is_set()
    assert processes.wait(pid) == -9


def test_unlocked_writers_of_the_same_content(store: Store, processes: Processes) -> None:
    for _ in range(4):
        processes.start(store, seed=4)
    assert [processes.line().split()[2] for _ in range(4)] == ["0"] * 4
    context = synthetic_context(tokens=400, seed=4)
    assert names(store) == [context.id]
    assert store.verify(context.id) == []


def test_lock_between_threads(store: Store) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with store.lock("0" * 64):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 120


def test_clean_up_never_takes_a_living_writer(store: Store) -> None:
    contexts = [synthetic_context(tokens=20, seed=seed, index_dtypes=("int8",)) for seed in range(12)]
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            # It may take a folder that is empty and not locked yet: the writer then makes another.
            assert sum(item.nbytes for item in store.gc()) == 0

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


@contextmanager
def full_disk_at(
    monkeypatch: pytest.MonkeyPatch, write: int, code: int = errno.ENOSPC
) -> Iterator[list[int]]:
    """The n-th file of an array, and every later one, fails half-way, as on a full disk."""
    original, written = Path.open, [0]

    def open_file(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        if mode == "wb" and path.name != "manifest.json":
            written[0] += 1
            if written[0] > write:
                path.write_text("part")
                raise OSError(code, os.strerror(code), str(path))
        return original(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_file)
        yield written


def test_full_disk_at_any_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    context = synthetic_context()
    kept = synthetic_context(seed=1)
    kept.write(store)
    with full_disk_at(monkeypatch, 10**9) as written:
        context.write(store)
    store.delete(context.id)
    assert written[0] == 9 + 1 + 6 + 4 * 4  # metadata of every node, then the chunks
    for write in range(written[0]):
        code = errno.EDQUOT if write % 2 else errno.ENOSPC
        with full_disk_at(monkeypatch, write, code), pytest.raises(StoreFullError, match="no space is left"):
            context.write(store)
        assert names(store) == [kept.id]
    context.write(store)
    assert store.verify(context.id) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_while_syncing(
    store: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fsync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", fsync)
        with pytest.raises(StoreFullError):
            context.write(store)
    assert names(store) == []


def test_full_disk_while_writing_the_manifest(
    store: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_bytes(path: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_bytes)
        with pytest.raises(StoreFullError, match="index-store gc"):
            context.write(store)
    assert names(store) == []


def test_the_kernel_refuses_to_write_more(store: Store) -> None:
    context = synthetic_context(tokens=1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a KV chunk has 32,004 bytes
    try:
        with pytest.raises(StoreFullError):
            context.write(store)
        assert names(store) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_other_write_errors(store: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        full_disk_at(monkeypatch, 5, errno.EIO),
        pytest.raises(StoreError, match="Input/output error") as caught,
    ):
        context.write(store)
    assert not isinstance(caught.value, StoreFullError)
    assert names(store) == []


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
    again = replace(context, manifest=replace(context.manifest, name="another name"))
    again.write(stored)
    assert stored.manifest(context.id).name == "handbook"
    assert names(stored) == [context.id]


def test_an_expired_context_is_replaced(store: Store) -> None:
    old = synthetic_context(ttl=timedelta(hours=1))
    old.write(store)
    synthetic_context().write(store)
    assert store.manifest(old.id).expires_at is None
    assert names(store) == [old.id]


def test_a_broken_context_is_replaced(stored: Store, context: SyntheticContext) -> None:
    chunk_path(stored.path / "contexts" / context.id, context.manifest.kv, (0, 0)).unlink()
    context.write(stored)
    assert stored.verify(context.id) == []
    assert names(stored) == [context.id]


def test_an_incomplete_context_is_not_published(store: Store, context: SyntheticContext) -> None:
    manifest, kv = context.manifest, context.manifest.kv
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        with pytest.raises(InvalidArgumentError, match="lists arrays"):
            writer.publish(manifest)
        for entry in (kv, *(array for array, _ in context.entries())):
            writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        writer.write_chunk("kv", (0, 0), context.kv[0, 0])
        with pytest.raises(MissingChunkError, match="kv"):
            writer.publish(manifest)
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
            (good.to(torch.complex64), "chunk"),
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
    manifest = context.manifest
    with store.writer(context.id) as writer:
        writer.write_tokens(context.tokens)
        jobs = []
        for entry, data in [(manifest.kv, context.kv), *context.entries()]:
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
        writer.publish(manifest)
    assert store.verify(context.id) == []
    assert torch.equal(
        store.open(context.id).array("kv", 2, 1).view(torch.int16), context.kv[2, 1].view(torch.int16)
    )
