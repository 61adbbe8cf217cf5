"""A worker: takes jobs from a store's queue, one after the other, and makes contexts of them with one model.

A job's progress goes into its record, where servers see it; it is stopped where progress is told. Children that have
outgrown what they continue are ordered to be made whole.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from index_store.cli.console import Update
from index_store.cli.documents import STANDARD_INPUT
from index_store.cli.quotas import QuotaFile
from index_store.cli.traces import Span, Traces, Value, open_traces, trace_id
from index_store.errors import (
    JobCorruptError,
    JobLostError,
    QueueFullError,
    SparseKVError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from index_store.family.parents import outgrown
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import (
    MOST_PRIORITY,
    Claim,
    JobFailure,
    JobOrder,
    JobPhase,
    JobProgress,
    JobRecord,
    JobState,
)
from index_store.jobs.uploads import Uploads
from index_store.memory.devices import pick_device
from index_store.models.conversation.turns import StoredConversation
from index_store.models.loading import identify, resolve_model
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store, require_free, take_name
from index_store.store.clean_up import StoreRoom
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig, WorkerConfig
from prefill_worker.jobs.children import ChildJob, carry_out_child, make_whole
from prefill_worker.jobs.document_layers import KeptModel, Means
from prefill_worker.jobs.job import carry_out
from prefill_worker.jobs.prepared_job import PrefillReport, PreparedJob, job_over_tokens

SETTLED = timedelta(minutes=1)
"""A child is left alone for so long: a conversation that is kept turn after turn is replaced by its next turn."""

logger = logging.getLogger(__name__)


def order_grown(store: Store, queue: JobQueue, model: str, share: float) -> None:
    """Queues a job, behind all others, for every child of the model that adds such a share to what it continues.

    One whose job has failed or was cancelled is left alone as long as the queue remembers that. model: its fingerprint.
    Raises what store and queue raise.
    """
    latest = queue.now() - SETTLED
    grown = [
        child
        for child in store.list()
        if child.model.fingerprint == model
        and outgrown(child, share)
        and child.created_at <= latest
        and not store.expired(child)
    ]
    if not grown:
        return
    tried = {
        job.order.context
        for job in queue.entries()
        if isinstance(job, JobRecord) and job.order.whole and job.state is not JobState.DONE
    }
    for child in grown:
        if child.id in tried or child.parent is None:
            continue
        order = JobOrder(
            context=child.id,
            model=model,
            model_name=child.model.name,
            name="",
            title=child.name,
            methods=child.methods,
            dtype=child.dtype,
            ttl=None,
            tokens=child.token_count,
            parent=child.parent.id,
            owner=child.owner,
            tenant=child.tenant,
            whole=True,
        )
        record = JobRecord(secrets.token_hex(16), order, queue.now(), priority=-MOST_PRIORITY)
        try:
            queue.add(record)
        except QueueFullError:
            return  # there is more to do than this
        logger.info("context %s has outgrown what it continues, and is to be made whole", child.id[:12])


_WRITTEN_EVERY_S = 0.5

_PHASES = {"prefill": JobPhase.READING, "index": JobPhase.INDEXING, "sync": JobPhase.VERIFYING}
"""By the titles of a job's phases."""


class JobCancelled(Exception):  # noqa: N818  no error: somebody wanted it
    """The job is not wanted any more."""


class JobProgressWriter:
    """The reporter of a queued job. Called between passes and between layers, it ends a job that was cancelled."""

    def __init__(
        self,
        claim: Claim,
        writing: Path,
        span: Span | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """writing: the folder that the context is written to. span: whose parts the phases are."""
        self._span = span
        self._claim = claim
        self._writing = writing
        self._clock_s = clock_s
        self._written_s = 0.0

    def note(self, text: str) -> None:
        """Into the record and the log."""
        logger.info("job %s: %s", self._claim.record.id, text)
        self._claim.write(self._claim.record.noted(text))

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        """A phase of the job; its updates raise JobCancelled once the job is to be cancelled."""
        phase = _PHASES[title]
        began = self._clock_s()
        first: int | None = None
        self._write(replace(self._progress, phase=phase, remaining=None))

        def update(done: int, total: int) -> None:
            nonlocal first, began
            now = self._clock_s()
            self._stop_if_unwanted()
            remaining = None
            if first is None:  # what another worker had done took no time
                first, began = done, now
            elif done > first:
                remaining = (now - began) / (done - first) * (total - done)
            progress = replace(self._progress, phase=phase, remaining=remaining)
            if phase is JobPhase.READING:
                progress = replace(progress, tokens_done=done)
            elif phase is JobPhase.INDEXING:
                progress = replace(progress, layers_done=done, layers_total=total)
            if now - self._written_s >= _WRITTEN_EVERY_S or done == total:
                self._write(progress)

        begun_ns = time.monotonic_ns()
        yield update
        if self._span is not None:
            self._span.child(phase.value, begun_ns, time.monotonic_ns())
        self._stop_if_unwanted()

    @property
    def _progress(self) -> JobProgress:
        return self._claim.record.progress

    def _write(self, progress: JobProgress) -> None:
        """Whoever comes further than any worker before has not been ended by the job itself."""
        self._written_s = self._clock_s()
        record, reached = self._claim.record, (progress.tokens_done, progress.layers_done)
        if reached > record.furthest:
            record = replace(record, furthest=reached, attempts=0)
        progress = replace(progress, bytes_written=_bytes_in(self._writing))
        self._claim.write(replace(record, progress=progress))

    def _stop_if_unwanted(self) -> None:
        if self._claim.unwanted:
            raise JobCancelled


def _bytes_in(folder: Path) -> int:
    """Of all files below the folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # published or given up meanwhile
                continue
    return total


@contextmanager
def job_span(traces: Traces, record: JobRecord, now: datetime) -> Iterator[Span]:
    """The span of the work that the block does, behind one of the wait for it; both belong to the order's.

    now: by the queue's clock, as all times of the record.
    """
    order, taken_ns = record.order, time.monotonic_ns()
    told: dict[str, Value] = {
        "gen_ai.request.model": order.model_name,
        "gen_ai.usage.input_tokens": order.tokens,
        "sparsekv.context": order.context,
        "sparsekv.job": record.id,
        "sparsekv.methods": order.methods,
    }
    waited_ns = int((now - record.created_at).total_seconds() * 1e9)
    waiting = traces.begin("queue", record.traceparent, taken_ns - waited_ns)
    parent = record.traceparent or waiting.traceparent
    waiting.end({"sparsekv.job": record.id}, ended_ns=taken_ns)
    span = traces.begin(f"prefill {order.model_name}", parent, taken_ns, "consumer", told)
    error = "INTERNAL"
    try:
        yield span
        error = ""
    except JobCancelled:
        error = "CANCELLED"
        raise
    except SparseKVError as failed:
        error = failed.reason
        raise
    finally:
        span.end(error=error)


MOST_ATTEMPTS = 10
"""Workers in a row that a job may end, or that may find the store full or unreadable, none of which brought it any
further."""

_LOOK_S = 0.25
_PAUSE_S = 5.0  # while the store is full or does not answer
_PASSING = (StoreFullError, StoreUnavailableError)
_TIDY_EVERY = 1200  # looks
_GROWN_EVERY = 20  # looks
_SPANS_S = 1.0
_GRACE_S = 10.0  # for clean-ups, once whoever started an attached worker is gone


class QueueWorker:
    """Works on the jobs of a store that are meant for one model. Several may share a queue, in any processes.

    Raises StoreError and ModelUnsupportedError when store or model cannot be used.
    """

    def __init__(self, config: WorkerConfig, traces: Traces | None = None) -> None:
        """traces: where spans of jobs go."""
        self._config, self._traces = config, traces
        # Not made: a mistyped path would be waited at for ever.
        self._store = open_store(config.store, False, config.objects, config.store_bytes, None)
        self._courier = None if config.objects is None else Courier(self._store, Tier.of(self._store))
        self._store.folders.check_writable()
        self._queue = JobQueue(config.store)
        self._uploads = Uploads(config.store)
        self._room = StoreRoom(
            self._store,
            config.store_bytes,
            quota=partial(QuotaFile(config.quotas).limit, name="stored_bytes"),
        )
        self._folder = resolve_model(config.model)
        self._identity = identify(self._folder)
        self._model = KeptModel()

    def run(self, stopping: threading.Event) -> None:
        """Takes jobs until told to stop, which is noticed between two of them. Raises StoreError."""
        if self._courier is not None:
            self._courier.start()
        with self._queue.attending(self._identity.fingerprint):
            looks = 0
            while not stopping.is_set():
                try:
                    if looks % _TIDY_EVERY == 0:
                        self._queue.tidy()
                        self._uploads.tidy()
                        self._room.sweep()
                    if looks % _GROWN_EVERY == 0:
                        self.order_grown()
                    looks += 1
                    if self.work_once():
                        continue
                except StoreError as error:  # the job, if there was one, stays for whoever comes next
                    logger.warning("the queue cannot be worked on now: %s", error.message)
                    stopping.wait(_PAUSE_S)
                stopping.wait(_LOOK_S)

    def order_grown(self) -> None:
        """Queues what is to be made whole, as the configuration has it."""
        order_grown(self._store, self._queue, self._identity.fingerprint, self._config.grown_share)

    def work_once(self) -> bool:
        """Works on the next job, if there is one; False without one.

        Whatever becomes of the job is written into its record. An interrupt leaves it to the next worker, and so do
        StoreFullError and StoreUnavailableError, which are raised, as long as it has attempts left.
        """
        with self._queue.claim(lambda record: record.order.model == self._identity.fingerprint) as claim:
            if claim is None:
                return False
            if claim.unwanted:
                claim.end(self._queue.cancelled(claim.record))
                return True
            record = claim.record
            attempts = record.attempts + 1
            if attempts > MOST_ATTEMPTS:
                lost = JobLostError(
                    f"{record.attempts} workers in a row ended while they worked on this, most likely for want of "
                    "memory; see their logs, and create the context again once that is mended"
                )
                self._end_failed(claim, lost)
                return True
            claim.write(replace(record, attempts=attempts, progress=JobProgress()))
            self._work(claim)
            return True

    def _work(self, claim: Claim) -> None:
        order = claim.record.order
        logger.info(
            "job %s: context %s, %d tokens, methods %s",
            claim.record.id,
            order.context[:12],
            order.tokens,
            ", ".join(order.methods),
            extra={"trace_id": trace_id(claim.record.traceparent)},
        )
        try:
            report = self._traced(claim)
        except JobCancelled:
            logger.info("job %s was cancelled", claim.record.id)
            claim.end(self._queue.cancelled(claim.record))
        except SparseKVError as error:
            if isinstance(error, _PASSING) and claim.record.attempts < MOST_ATTEMPTS:
                raise  # the store may be well again for whoever comes next, who goes on from the checkpoint
            logger.warning("job %s failed: %s", claim.record.id, error.message)
            self._end_failed(claim, error)
        except Exception:
            logger.exception("job %s failed", claim.record.id)
            message = f"the worker failed; its log has the details under job {claim.record.id}"
            self._end_failed(claim, SparseKVError(message))
        else:
            if claim.record.order.moves:
                take_name(self._store, order.context, order.name)
            did = "made" if report.created else "there"
            logger.info("job %s: context %s is %s", claim.record.id, order.context[:12], did)
            self._end_done(claim, report)

    def _traced(self, claim: Claim) -> PrefillReport:
        if self._traces is None:
            return self._carry_out(claim, None)
        with job_span(self._traces, claim.record, self._queue.now()) as span:
            return self._carry_out(claim, span)

    def _carry_out(self, claim: Claim, span: Span | None) -> PrefillReport:
        order, clock = claim.record.order, Clock()
        if order.whole:
            present, device = self._store.manifest(order.context), pick_device(self._config.device)
            reporter = JobProgressWriter(claim, claim.path / "context", span)
            reporter.note("the context has outgrown what it continues, and is made to stand alone")
            return make_whole(self._store, present, device, clock, reporter)
        kind = (self._identity, order.dtype, order.tokens, () if order.parent else order.methods)
        self._room.make(self._room.needed(order.context, *kind), order.tenant)
        if order.name and not order.moves:
            require_free(self._store, order.name, order.model, order.context, order.tenant)
        with clock("tokenize"):
            job = replace(self._prepare(claim), traceparent="" if span is None else span.traceparent)
        child = self._child(claim, job) if order.parent else None
        found = job.id() if child is None else child.id()
        if found != order.context:
            raise JobCorruptError(
                f"the tokens of job {claim.record.id} are those of context {found[:12]}, expected "
                f"{order.context[:12]}: they are damaged, or server and worker are of different versions; create the "
                "context again",
                operation=claim.record.id,
            )
        writing = claim.path / "context"
        if child is not None:
            means = Means(self._model.load, stays=True, store=self._store)
            return carry_out_child(child, JobProgressWriter(claim, writing, span), clock, means)
        reporter = JobProgressWriter(claim, writing, span)
        checkpoint = Checkpoint(claim.path / "reading", order.context, reporter.note)
        means = Means(self._model.load, stays=True, checkpoint=checkpoint, writing=writing, store=self._store)
        return carry_out(job, reporter, clock, means)

    def _prepare(self, claim: Claim) -> PreparedJob:
        worker, order = self._config, claim.record.order
        standing = order.parent == ""
        config = PrefillConfig(
            model=worker.model,
            input=(STANDARD_INPUT,),
            store=worker.store,
            name=None if order.moves else order.name or None,
            method=order.methods if standing else ("full",),
            dtype=order.dtype,
            rows=order.rows,
            chunk=worker.chunk,
            ttl=None if order.ttl is None else f"{order.ttl:.6f}s",
            renew=None if order.renew is None else f"{order.renew:.6f}s",
            device=worker.device,
            device_memory=worker.device_memory,
            tenant=order.tenant,
            objects=worker.objects,
        )
        kept = claim.conversation()
        conversation = None if kept is None else StoredConversation.from_bytes(kept, str(claim.path))
        tokens = [*self._parent_tokens(order), *claim.tokens().tolist()]
        job = job_over_tokens(config, self._folder, tokens, order.title, conversation)
        return replace(job, labels=order.labels, owner=order.owner)

    def _parent_tokens(self, order: JobOrder) -> list[int]:
        if not order.parent:
            return []
        with self._store.open(order.parent, expired=True) as context:
            ids: list[int] = context.tokens().tolist()
        return ids

    def _child(self, claim: Claim, job: PreparedJob) -> ChildJob:
        return ChildJob(job, self._store.manifest(claim.record.order.parent))

    def _end_done(self, claim: Claim, report: PrefillReport) -> None:
        manifest, before = report.manifest, claim.record.progress
        layers = manifest.model.layers
        progress = replace(
            before,
            tokens_done=manifest.own_tokens,
            layers_done=layers,
            layers_total=layers,
            bytes_written=manifest.kv_bytes + manifest.index_bytes,
            remaining=None,
        )
        record = replace(claim.record, progress=progress)
        claim.end(replace(record, state=JobState.DONE, ended_at=self._queue.now()))

    def _end_failed(self, claim: Claim, error: SparseKVError) -> None:
        ended = self._queue.now()
        claim.end(replace(claim.record, state=JobState.FAILED, failure=JobFailure.of(error), ended_at=ended))


def serve_queue(config: WorkerConfig) -> None:
    """Runs a worker until the process is interrupted or terminated, or, attached, until standard input ends."""
    traces = open_traces()
    worker = QueueWorker(config, traces)
    if config.attached:
        threading.Thread(target=_end_with_input, args=(_GRACE_S,), name="attached", daemon=True).start()
    logger.info("taking jobs from %s with model %s", config.store, config.model)
    try:
        worker.run(threading.Event())
    finally:
        if traces is not None:
            traces.close(_SPANS_S)


def _end_with_input(grace_s: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(
        1
    )  # nobody is left who would end a process whose clean-ups hang; its jobs survive this as a kill
