"""How far a job is, and a store that is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import numpy as np
import pytest

from index_store.errors import SparseKVError, StoreFullError, StoreUnavailableError
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobFolder, JobOrder, JobProgress, JobRecord
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.files import durable
from index_store.store.writer import ContextWriter
from prefill_worker.build import checkpoint
from prefill_worker.reading import prefill
from prefill_worker.worker import queue_worker
from prefill_worker.worker.queue_worker import MOST_ATTEMPTS, JobProgressWriter
from tests.prefill_worker.worker.test_queue_worker import CHUNK, TOKENS, Shop, reference, same_context

COUNT = 10
ORDER = JobOrder("a" * 64, "model", "model", "", "title", ("full",), "bfloat16", None, COUNT)


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    Store(tmp_path, create=True)
    queue = JobQueue(tmp_path)
    queue.add(JobRecord("1" * 32, ORDER, datetime.now(UTC)), np.arange(COUNT, dtype=np.uint32))
    return queue


def killed_at(queue: JobQueue, tokens: int, layers: int = 0) -> JobRecord:
    """What a worker leaves that takes the job, comes so far, and is killed."""
    with queue.claim() as claim:
        assert claim is not None
        claim.write(replace(claim.record, attempts=claim.record.attempts + 1, progress=JobProgress()))
        reporter = JobProgressWriter(claim, claim.folder / "context", clock_s=lambda: 1e9)
        with reporter.phase("prefill", "tokens") as update:
            update(tokens, tokens)
        if layers:
            with reporter.phase("index", "layers") as update:
                update(layers, layers)
    return queue.get("1" * 32)


def test_only_who_comes_further_than_all_before_is_no_attempt(queue: JobQueue) -> None:
    assert killed_at(queue, 5).attempts == 0
    assert [killed_at(queue, tokens).attempts for tokens in (5, 4, 5)] == [1, 2, 3]
    assert killed_at(queue, 10).attempts == 0
    assert killed_at(queue, 10).attempts == 1
    assert killed_at(queue, 10, 2).attempts == 0
    last = killed_at(queue, 10, 2)
    assert (last.attempts, last.furthest, last.progress.layers_done) == (1, (10, 2), 2)


@pytest.fixture
def shop(tmp_path: Path, tiny_model: Path) -> Shop:
    return Shop(tmp_path, tiny_model)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Manifest:
    """The document's context, as a job makes it that nothing interrupts."""
    return reference(tmp_path_factory.mktemp("expected"), tiny_model)


def fail_with(error: SparseKVError) -> Callable[..., Any]:
    """Stands in for what cannot be done."""

    def fail(*arguments: object) -> None:
        raise error

    return fail


def test_a_full_disk_ends_neither_the_worker_nor_the_job(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.order()
    worker, stopping, tries = shop.worker(), Event(), []
    write = JobFolder.write

    def refuse_once(folder: JobFolder, record: JobRecord) -> None:
        tries.append(record)
        if len(tries) == 1:
            raise StoreFullError("no space is left")
        write(folder, record)

    def work() -> bool:
        if not shop.queue.get(job.id).open:
            stopping.set()
        return work_once()

    work_once = worker.work_once
    monkeypatch.setattr(queue_worker, "_PAUSE_S", 0.0)
    monkeypatch.setattr(JobFolder, "write", refuse_once)
    monkeypatch.setattr(worker, "work_once", work)
    worker.run(stopping)
    shop.made(job)


def test_a_store_that_does_not_answer_is_asked_again_and_keeps_the_checkpoint(
    shop: Shop, expected: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = shop.order()
    with monkeypatch.context() as patch:
        patch.setattr(ContextWriter, "publish", fail_with(StoreUnavailableError("cannot be read now")))
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                shop.worker().work_once()
    assert shop.queue.get(job.id).open
    passes: list[int] = []
    forward = prefill._forward

    def count(model: Any, capture: Any, ids: Any, first: int) -> None:
        passes.append(first)
        forward(model, capture, ids, first)

    monkeypatch.setattr(prefill, "_forward", count)
    assert shop.worker().work_once()
    assert passes == [(TOKENS - 1) // CHUNK * CHUNK]
    assert same_context(shop.made(job), expected)


def test_a_store_that_stays_full_ends_the_job(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.order()
    worker = shop.worker()
    monkeypatch.setattr(worker, "_carry_out", fail_with(StoreFullError("no space is left")))
    for _ in range(MOST_ATTEMPTS - 1):
        with pytest.raises(StoreFullError):
            worker.work_once()
    assert worker.work_once()
    failure = shop.queue.get(job.id).failure
    assert failure is not None
    assert failure.reason == "STORE_FULL"


@pytest.mark.parametrize("step", ["tokens", "layer"])
def test_a_checkpoint_without_room_does_not_end_the_job(
    step: str, shop: Shop, expected: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = shop.order()
    opened: list[str] = []

    def new_file(path: Path, permissions: int) -> BinaryIO:
        opened.append(path.name)
        if f"{step}-" in path.name:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return durable.new_file(path, permissions)

    monkeypatch.setattr(checkpoint, "new_file", new_file)
    seen: list[bool] = []
    publish = ContextWriter.publish

    def look_and_publish(writer: ContextWriter, manifest: Manifest) -> Manifest:
        seen.append((shop.queue.folder(job.id) / "reading").exists())
        return publish(writer, manifest)

    monkeypatch.setattr(ContextWriter, "publish", look_and_publish)
    assert shop.worker().work_once()
    assert same_context(shop.made(job), expected)
    assert seen == [False]
    assert len([name for name in opened if f"{step}-" in name]) == 1
    told = " ".join(shop.queue.get(job.id).notes)
    assert "went on without a checkpoint, for which there is no room" in told
