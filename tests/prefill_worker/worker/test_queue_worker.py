"""Workers of a queue: what they make, share, refuse and leave to the next, how far jobs are, and grown children."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from index_store.cli.console import SilentReporter
from index_store.errors import StoreFullError, StoreUnavailableError
from index_store.family.children import publish_child, read_own_rows
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import MOST_PRIORITY, JobFolder, JobOrder, JobProgress, JobRecord, JobState
from index_store.models.loading import identify, resolve_model
from index_store.store import clean_up, listing
from index_store.store.catalog import Store, utc_now
from index_store.store.clean_up import find_leftovers
from index_store.store.description.manifest import Manifest
from index_store.store.files import durable
from index_store.store.writer import ContextWriter
from prefill_worker.build import checkpoint
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.build.layer_writing import IndexWriting
from prefill_worker.config import PrefillConfig, WorkerConfig
from prefill_worker.jobs import prepared_job
from prefill_worker.jobs.job import run_job
from prefill_worker.reading import prefill
from prefill_worker.worker import queue_worker
from prefill_worker.worker.queue_worker import MOST_ATTEMPTS, JobProgressWriter, QueueWorker
from tests.prefill_worker.conftest import DOCUMENT
from tests.support.forking import kill_after, run, start
from tests.support.models import LAYER_KINDS, write_model_folder
from tests.support.store import continuation, raising
from tests.support.waiting import wait_until

CHUNK = 50
TOKENS = len(DOCUMENT)  # one per byte


class Shop:
    """A store with a queue, and a model whose contexts are made."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store = folder / "store"
        self.model = model
        self.contexts = Store(self.store, create=True)
        self.queue = JobQueue(self.store)
        self._identity = identify(resolve_model(str(model)))

    def config(self, chunk: int = CHUNK) -> WorkerConfig:
        return WorkerConfig(store=self.store, model=str(self.model), chunk=chunk, device="cpu")

    def worker(self) -> QueueWorker:
        return QueueWorker(self.config())

    def order(self, text: str = DOCUMENT, number: int = 0, **changes: Any) -> JobRecord:
        """Queues a job for a text, as a server does."""
        folder = resolve_model(str(self.model))
        config = PrefillConfig(
            model=str(self.model), store=self.store, input=(Path("-"),), method=("csattention",)
        )
        tokens = prepared_job.load_tokenizer(folder).encode(text)
        job = prepared_job.job_over_tokens(config, folder, tokens, "title")
        order = JobOrder(
            context=job.id(),
            model=self._identity.fingerprint,
            model_name="tiny",
            name="",
            title="title",
            methods=("csattention",),
            dtype=job.dtype,
            ttl=None,
            tokens=len(tokens),
        )
        record = JobRecord(f"{number:032x}", replace(order, **changes), self.queue.now())
        return self.queue.add(record, np.asarray(tokens, dtype=np.uint32))

    def made(self, record: JobRecord) -> Manifest:
        """The context of a job that is done, whole."""
        found = self.queue.get(record.id)
        assert found.state is JobState.DONE, found.failure
        assert self.contexts.verify(record.order.context) == []
        return self.contexts.manifest(record.order.context)


def reference(folder: Path, model: Path) -> Manifest:
    """The context of the document as a job makes it that nothing interrupts."""
    (folder / "document.txt").write_text(DOCUMENT)
    config = PrefillConfig(
        model=str(model),
        store=folder / "reference",
        input=(folder / "document.txt",),
        method=("csattention",),
        chunk=CHUNK,
    )
    return run_job(config, SilentReporter()).manifest


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Manifest:
    """That of the tiny model."""
    return reference(tmp_path_factory.mktemp("expected"), tiny_model)


@pytest.fixture
def shop(tmp_path: Path, tiny_model: Path) -> Shop:
    return Shop(tmp_path, tiny_model)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First tokens of the passes that are made."""
    made: list[int] = []
    forward = prefill._forward

    def count(model: Any, capture: Any, ids: Any, first: int) -> None:
        made.append(first)
        forward(model, capture, ids, first)

    monkeypatch.setattr(prefill, "_forward", count)
    return made


def interrupt_after(shop: Shop, count: int, step: str = "keep") -> None:
    """Ends a worker behind so many passes (or layers, with keep_layer), as a signal does."""
    keep, seen = getattr(Checkpoint, step), []

    def keep_and_end(checkpoint: Checkpoint, *arguments: Any) -> None:
        keep(checkpoint, *arguments)
        seen.append(arguments)
        if len(seen) == count:
            raise SystemExit(143)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, step, keep_and_end)
        worker = shop.worker()
        with pytest.raises(SystemExit):
            worker.work_once()


def same_context(found: Manifest, expected: Manifest) -> bool:
    """Whether all that is stored is the same, bit for bit."""
    one, other = (
        ({each.path: each.checksums for each in made.arrays}, [index.thresholds for index in made.indexes])
        for made in (found, expected)
    )
    return one == other


@pytest.mark.parametrize("kind", ["plain", "windows", "sinks", "states"])
def test_a_worker_goes_on_behind_the_last_pass_of_another(
    kind: str, tmp_path: Path, tiny_model: Path, passes: list[int]
) -> None:
    model = tiny_model
    if kind != "plain":
        family, settings = LAYER_KINDS[kind]
        model = write_model_folder(tmp_path / "model", family, layers=3, **settings)  # type: ignore[arg-type]
    shop = Shop(tmp_path, model)
    expected = reference(tmp_path, model)
    job = shop.order()
    interrupt_after(shop, 3)
    between = shop.queue.get(job.id)
    assert (between.open, shop.queue.held(job.id)) == (True, False)
    assert shop.contexts.list() == []
    passes.clear()
    assert shop.worker().work_once()
    assert passes == list(range(3 * CHUNK, TOKENS, CHUNK))
    assert same_context(shop.made(job), expected)
    assert f"went on with a reading that had come to token {3 * CHUNK}" in shop.queue.get(job.id).notes


@pytest.mark.parametrize("damage", ["part", "lost", "list", "list gone"])
def test_a_damaged_checkpoint_is_read_again_and_told(
    damage: str, shop: Shop, expected: Manifest, passes: list[int]
) -> None:
    job = shop.order()
    interrupt_after(shop, 3)
    reading = shop.queue.folder(job.id) / "reading"
    part = reading / f"tokens-{CHUNK}"
    if damage == "part":
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    elif damage == "lost":
        part.unlink()
    elif damage == "list":
        (reading / "checkpoint.json").write_text('{"format_version": 1}')
    else:
        (reading / "checkpoint.json").unlink()
    passes.clear()
    assert shop.worker().work_once()
    again = CHUNK if damage in ("part", "lost") else 0
    assert passes == list(range(again, TOKENS, CHUNK))
    assert same_context(shop.made(job), expected)
    told = " ".join(shop.queue.get(job.id).notes)
    assert ("the checkpoint is damaged" in told) == (damage != "list gone")


def before_layer(patch: pytest.MonkeyPatch, layer: int, act: Callable[[], object]) -> None:
    """Something happens before the indexes of a layer are built."""
    build = IndexWriting.build

    def act_and_build(writing: IndexWriting, number: int, *arguments: Any) -> Any:
        if number == layer:
            act()
        return build(writing, number, *arguments)

    patch.setattr(IndexWriting, "build", act_and_build)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers whose indexes are built."""
    made: list[int] = []
    for layer in range(5):
        before_layer(monkeypatch, layer, partial(made.append, layer))
    return made


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, some with a sliding window."""
    family, settings = LAYER_KINDS["windows"]
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    settings = {**settings, "layer_types": kinds}
    return write_model_folder(tmp_path_factory.mktemp("deep") / "model", family, layers=5, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def deep_expected(tmp_path_factory: pytest.TempPathFactory, deep_model: Path) -> Manifest:
    """The document's context of that model."""
    return reference(tmp_path_factory.mktemp("expected"), deep_model)


@pytest.mark.parametrize("damage", ["", "record", "chunk", "metadata"])
def test_a_worker_goes_on_behind_the_last_layer_of_another(
    damage: str,
    tmp_path: Path,
    deep_model: Path,
    deep_expected: Manifest,
    built: list[int],
    passes: list[int],
) -> None:
    shop = Shop(tmp_path, deep_model)
    job = shop.order()
    interrupt_after(shop, 3, "keep_layer")
    assert shop.contexts.list() == []
    folder = shop.queue.folder(job.id)
    if damage == "record":
        record = folder / "reading" / "layer-2"
        record.write_bytes(record.read_bytes()[:-1] + b"?")
    elif damage == "chunk":
        chunk = folder / "context" / "kv" / "c" / "1" / "0"  # of layer 2, the second that sees all keys
        (chunk,) = [path for path in chunk.rglob("*") if path.is_file()]
        chunk.write_bytes(b"?" + chunk.read_bytes()[1:])
    elif damage == "metadata":
        (folder / "context" / "kv" / "zarr.json").write_text("{")
        (folder / "context" / "zarr.json").unlink()
    built.clear()
    passes.clear()
    assert shop.worker().work_once()
    assert passes == [(TOKENS - 1) // CHUNK * CHUNK]
    again = [2, 3] if damage in ("record", "chunk") else [3]
    assert sorted(set(built)) == again
    assert same_context(shop.made(job), deep_expected)
    kept = 5 - len(again) - 1
    assert f"went on with {kept} layers that were written before" in shop.queue.get(job.id).notes


def test_jobs_of_another_model_are_left_alone(shop: Shop) -> None:
    job = shop.order(model="another")
    assert not shop.worker().work_once()
    assert shop.queue.get(job.id).attempts == 0


def test_a_worker_does_not_look_through_the_store_for_every_job(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor read again what it knows of its contexts: a store may have ten thousand."""
    looks: list[Store] = []
    read: list[str] = []
    parse = listing._parse

    def noted(id_: str, path: Path, data: bytes) -> listing.Entry:
        read.append(id_)
        return parse(id_, path, data)

    monkeypatch.setattr(clean_up, "clean_up", looks.append)
    monkeypatch.setattr(listing, "_SETTLED_S", 0.0)
    monkeypatch.setattr(listing, "_parse", noted)
    worker = shop.worker()
    made = [shop.order(f"{number} {DOCUMENT}", number) for number in range(4)]
    for _ in made:
        assert worker.work_once()
    assert len(shop.contexts.list()) == 4
    read.clear()
    shop.order(f"4 {DOCUMENT}", 4)
    assert worker.work_once()
    assert len(looks) == 1
    assert len(set(read)) == 1


def test_tokens_that_are_not_the_ordered_ones_end_the_job(shop: Shop) -> None:
    job = shop.order(context="0" * 64)
    assert shop.worker().work_once()
    failure = shop.queue.get(job.id).failure
    assert failure.reason == "OPERATION_CORRUPT"
    assert shop.contexts.list() == []


def test_a_job_that_only_ends_workers_ends(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.order()
    worker = shop.worker()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_carry_out", lambda *claimed: (_ for _ in ()).throw(SystemExit))
        for _ in range(MOST_ATTEMPTS):
            with pytest.raises(SystemExit):
                worker.work_once()
    assert shop.queue.get(job.id).open
    assert worker.work_once()
    failure = shop.queue.get(job.id).failure
    assert failure.reason == "WORKERS_LOST"


def test_a_fault_ends_the_job_and_not_the_worker(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.order()
    worker = shop.worker()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_prepare", lambda claim: 1 / 0)
        assert worker.work_once()
    failure = shop.queue.get(job.id).failure
    assert failure.reason == "INTERNAL"
    assert "ZeroDivisionError" not in failure.message


def work_in_process(config: WorkerConfig) -> None:
    QueueWorker(config).run(Event())


@pytest.mark.nightly
def test_killed_workers_lose_nothing_and_show_nothing_half(shop: Shop, expected: Manifest) -> None:
    job = shop.order()
    others = [shop.order(f"{number} {DOCUMENT}", number) for number in range(1, 4)]
    moments, kills = random.Random(0), 0
    while kills < 6 and shop.queue.get(others[-1].id).open:
        assert kill_after(moments.uniform(0.1, 0.8), work_in_process, shop.config())
        kills += 1
        assert all(shop.contexts.verify(manifest.id) == [] for manifest in shop.contexts.list())
        assert not [entry for entry in shop.queue.entries() if not isinstance(entry, JobRecord)]
    worker = shop.worker()
    while worker.work_once():
        pass
    assert same_context(shop.made(job), expected)
    for other in others:
        shop.made(other)
    assert len(shop.contexts.list()) == 4


@pytest.mark.slow
def test_two_workers_share_a_queue(shop: Shop) -> None:
    jobs = [shop.order(f"{number} {DOCUMENT}", number) for number in range(5)]
    workers = [start(work_in_process, shop.config()) for _ in range(2)]
    wait_until(lambda: not any(shop.queue.get(job.id).open for job in jobs))
    for worker in workers:
        worker.kill()
        worker.join()
    for job in jobs:
        shop.made(job)
        assert shop.queue.get(job.id).attempts <= 1


def hang_until_input_ends() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    Thread(target=queue_worker._end_with_input, args=(0.1,), daemon=True).start()  # whose input is empty
    Event().wait()


def test_an_attached_worker_whose_clean_ups_hang_ends_with_its_input() -> None:
    assert run(hang_until_input_ends) == 1


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
        claim.write(replace(claim.record, attempts=claim.record.attempts + 1, progress=JobProgress()))
        reporter = JobProgressWriter(claim, claim.path / "context", clock_s=lambda: 1e9)
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
    shop: Shop, expected: Manifest, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = shop.order()
    with monkeypatch.context() as patch:
        patch.setattr(ContextWriter, "publish", raising(StoreUnavailableError("cannot be read now")))
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                shop.worker().work_once()
    assert shop.queue.get(job.id).open
    passes.clear()
    assert shop.worker().work_once()
    assert passes == [(TOKENS - 1) // CHUNK * CHUNK]
    assert same_context(shop.made(job), expected)


def test_a_store_that_stays_full_ends_the_job(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.order()
    worker = shop.worker()
    monkeypatch.setattr(worker, "_carry_out", raising(StoreFullError("no space is left")))
    for _ in range(MOST_ATTEMPTS - 1):
        with pytest.raises(StoreFullError):
            worker.work_once()
    assert worker.work_once()
    failure = shop.queue.get(job.id).failure
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


GROWN = TOKENS // 4 + 1


@pytest.fixture
def family_shop(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """With one context, and without the least number of tokens and the time that a child has to be there."""
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", 10)
    monkeypatch.setattr("prefill_worker.worker.queue_worker.SETTLED", timedelta(0))
    family_shop = Shop(tmp_path, tiny_model)
    family_shop.order()
    assert family_shop.worker().work_once()
    return family_shop


def child_of(family_shop: Shop, count: int = GROWN, **changes: Any) -> Manifest:
    (root,) = [entry for entry in family_shop.contexts.list() if entry.parent is None]
    return publish_child(family_shop.contexts, continuation(family_shop.contexts, root, count, **changes))


def ordered(family_shop: Shop) -> list[JobRecord]:
    return [job for job in family_shop.queue.entries() if isinstance(job, JobRecord) and job.order.whole]


def test_a_grown_child_is_made_whole_behind_all_else(family_shop: Shop) -> None:
    child = child_of(family_shop)
    (root,) = [entry for entry in family_shop.contexts.list() if entry.parent is None]
    rows = read_own_rows(family_shop.contexts, child)
    worker = family_shop.worker()
    worker.order_grown()
    worker.order_grown()
    (job,) = ordered(family_shop)
    assert (job.order.context, job.order.parent, job.priority) == (child.id, root.id, -MOST_PRIORITY)
    other = family_shop.order("Another document. " * 20, 7)
    assert worker.work_once()
    assert not family_shop.queue.get(other.id).open
    assert family_shop.queue.get(job.id).open
    family_shop.contexts.update(child.id, lambda manifest: replace(manifest, name="renamed", pinned=True))
    assert worker.work_once()
    whole = family_shop.made(job)
    assert (whole.id, whole.parent, whole.token_count) == (child.id, None, child.token_count)
    assert (whole.name, whole.pinned, whole.created_at) == ("renamed", True, child.created_at)
    assert [index.name for index in whole.indexes] == [index.name for index in root.indexes]
    with family_shop.contexts.open(whole.id) as found, family_shop.contexts.open(root.id) as before:
        assert torch.equal(found.tokens(), torch.cat([before.tokens(), rows.token_ids]))
        for layer in range(whole.model.layers):
            joined = torch.cat([before.array("kv", layer, 1), rows.rows[layer][1]])
            assert torch.equal(found.array(whole.kv.path, layer, 1), joined)
    worker.order_grown()
    assert not worker.work_once()
    assert family_shop.queue.get(job.id).progress.tokens_done == child.token_count


def test_others_are_left_alone(family_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    child_of(family_shop, GROWN - 2)
    child_of(family_shop, expires_at=utc_now() - timedelta(1), seed=2)
    family_shop.worker().order_grown()
    grown = child_of(family_shop, seed=3)
    QueueWorker(replace(family_shop.config(), grown_share=0)).order_grown()
    QueueWorker(replace(family_shop.config(), grown_share=1)).order_grown()
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", GROWN + 1)
    family_shop.worker().order_grown()
    with monkeypatch.context() as patch:
        patch.setattr("index_store.family.parents.GROWN_TOKENS", GROWN)
        patch.setattr("prefill_worker.worker.queue_worker.SETTLED", timedelta(seconds=60))
        family_shop.worker().order_grown()
    assert ordered(family_shop) == []
    monkeypatch.setattr("index_store.family.parents.GROWN_TOKENS", GROWN)
    worker = family_shop.worker()
    worker.order_grown()
    (job,) = ordered(family_shop)
    family_shop.queue.cancel(job.id)
    worker.order_grown()
    assert [job.state for job in ordered(family_shop)] == [JobState.CANCELLED]  # and is not ordered again
    assert family_shop.contexts.manifest(grown.id) == grown


def test_a_worker_that_ends_in_between_leaves_the_child_to_the_next(
    family_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_of(family_shop)
    worker = family_shop.worker()
    worker.order_grown()

    with monkeypatch.context() as patch:
        before_layer(patch, 1, lambda: sys.exit(143))
        with pytest.raises(SystemExit):
            worker.work_once()
    (job,) = ordered(family_shop)
    assert (job.open, family_shop.queue.held(job.id)) == (True, False)
    assert (family_shop.contexts.manifest(child.id), family_shop.contexts.verify(child.id)) == (child, [])
    assert family_shop.worker().work_once()
    assert family_shop.made(job).parent is None


def test_a_child_that_is_deleted_meanwhile_stays_so(
    family_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_of(family_shop)
    worker = family_shop.worker()
    worker.order_grown()

    before_layer(monkeypatch, 0, lambda: family_shop.contexts.delete(child.id))
    assert worker.work_once()
    (job,) = ordered(family_shop)
    assert job.failure.reason == "CONTEXT_NOT_FOUND"
    assert [entry.id for entry in family_shop.contexts.entries()] != [child.id]
    assert find_leftovers(family_shop.contexts) == []


@pytest.mark.nightly
def test_killed_workers_lose_no_child_and_show_nothing_half(family_shop: Shop) -> None:
    """Killed at moments spread over the whole of it, of children each of which is made whole in the end."""
    children = [child_of(family_shop, seed=seed) for seed in range(2, 8)]
    family_shop.worker().order_grown()
    for number in range(8):
        assert kill_after(0.05 + 0.07 * number, work_in_process, family_shop.config())
        for child in children:
            found = family_shop.contexts.manifest(child.id)
            assert found == child or found.parent is None
            if found.parent is None:
                assert family_shop.contexts.verify(child.id) == []
            else:
                assert read_own_rows(family_shop.contexts, child)
    process = start(work_in_process, family_shop.config())
    wait_until(lambda: not any(job.open for job in ordered(family_shop)))
    process.kill()
    process.join()
    for job in ordered(family_shop):
        assert family_shop.made(job).parent is None
