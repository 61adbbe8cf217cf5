"""Workers of a queue: what they make, what a killed one leaves to the next, what they share and what they refuse."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from index_store.cli.progress import SilentReporter
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobOrder, JobRecord, JobState
from index_store.models.loading import identify, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.build.layer_writing import IndexWriting
from prefill_worker.config import PrefillConfig, WorkerConfig
from prefill_worker.jobs import prepared_job
from prefill_worker.jobs.job import run_job
from prefill_worker.reading import prefill
from prefill_worker.worker.queue_worker import MOST_ATTEMPTS, QueueWorker
from tests.prefill_worker.conftest import DOCUMENT
from tests.support.forking import kill_after, start
from tests.support.models import LAYER_KINDS, write_model_folder
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


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int, step: str = "keep") -> None:
    """Ends a worker behind so many passes (or layers, with keep_layer), as a signal does."""
    keep, seen = getattr(Checkpoint, step), []

    def keep_and_end(checkpoint: Checkpoint, *arguments: Any) -> None:
        keep(checkpoint, *arguments)
        seen.append(arguments)
        if len(seen) == count:
            raise SystemExit(143)

    monkeypatch.setattr(Checkpoint, step, keep_and_end)


def arrays(manifest: Manifest) -> dict[str, str | None]:
    return {array.path: array.checksums for array in manifest.arrays}


def same_context(found: Manifest, expected: Manifest) -> bool:
    """Whether all that is stored is the same, bit for bit."""
    thresholds = [[index.thresholds for index in manifest.indexes] for manifest in (found, expected)]
    return arrays(found) == arrays(expected) and thresholds[0] == thresholds[1]


@pytest.mark.parametrize("kind", ["plain", "windows", "sinks"])
def test_a_worker_goes_on_behind_the_last_pass_of_another(
    kind: str, tmp_path: Path, tiny_model: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model
    if kind != "plain":
        family, settings = LAYER_KINDS[kind]
        model = write_model_folder(tmp_path / "model", family, layers=3, **settings)  # type: ignore[arg-type]
    shop = Shop(tmp_path, model)
    expected = reference(tmp_path, model)
    job = shop.order()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        worker = shop.worker()
        with pytest.raises(SystemExit):
            worker.work_once()
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
    damage: str, shop: Shop, expected: Manifest, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = shop.order()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        worker = shop.worker()
        with pytest.raises(SystemExit):
            worker.work_once()
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


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers whose indexes are built."""
    made: list[int] = []
    build = IndexWriting.build

    def count(writing: IndexWriting, layer: int, *arguments: Any) -> Any:
        made.append(layer)
        return build(writing, layer, *arguments)

    monkeypatch.setattr(IndexWriting, "build", count)
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop(tmp_path, deep_model)
    job = shop.order()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3, "keep_layer")
        worker = shop.worker()
        with pytest.raises(SystemExit):
            worker.work_once()
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


def test_tokens_that_are_not_the_ordered_ones_end_the_job(shop: Shop) -> None:
    job = shop.order(context="0" * 64)
    assert shop.worker().work_once()
    failure = shop.queue.get(job.id).failure
    assert failure is not None
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
    assert failure is not None
    assert failure.reason == "WORKERS_LOST"


def test_a_fault_ends_the_job_and_not_the_worker(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shop.order()
    worker = shop.worker()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_prepare", lambda claim: 1 / 0)
        assert worker.work_once()
    failure = shop.queue.get(job.id).failure
    assert failure is not None
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


def test_an_attached_worker_whose_clean_ups_hang_ends_with_its_input() -> None:
    hanging = (
        "import signal, threading\n"
        "from prefill_worker.worker.queue_worker import _end_with_input\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "threading.Thread(target=_end_with_input, args=(0.1,), daemon=True).start()\n"
        "threading.Event().wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", hanging], input=b"", timeout=300, check=False)
    assert ended.returncode == 1
