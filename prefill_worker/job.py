"""One prefill job, from text to a published and verified context."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from index_store.catalog import Store, utc_now
from index_store.context_id import context_id
from index_store.dtypes import dtype_name, stored_dtype
from index_store.errors import (
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    StoreFullError,
)
from index_store.indexes.base import Scalar
from index_store.manifest import ArrayEntry, Manifest, ModelIdentity, kv_entry
from index_store.models.loading import (
    ModelFolder,
    check_positions,
    checkpoint_dtype,
    identify,
    load_model,
    load_tokenizer,
    resolve_model,
)
from index_store.writer import ContextWriter
from prefill_worker import dense_layers as rule
from prefill_worker.build import WrittenLayers, check_build, measure_layers, write_layers
from prefill_worker.capture import Capture, SamplePlan, plan_sample, register_attention
from prefill_worker.config import PrefillConfig, parse_dense_layers, parse_ttl
from prefill_worker.index_choice import IndexPlan, check_centroids, plan_indexes
from prefill_worker.inputs import document_name, fingerprint_prompts, read_document, read_prompts
from prefill_worker.prefill import run_context, run_prompts
from prefill_worker.progress import Reporter, Update


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What a job ends with. `created` is False when the store had the context already; `seconds` then says little.

    not_applied: settings given ("name", "ttl") that the context found in the store has otherwise; they were ignored.
    """

    manifest: Manifest
    created: bool
    seconds: Mapping[str, float]
    not_applied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that is known before the model is loaded."""

    config: PrefillConfig
    folder: ModelFolder
    identity: ModelIdentity
    dtype: str
    token_ids: Sequence[int]
    prompts: Sequence[Sequence[int]]
    plan: IndexPlan

    def parameters(self) -> dict[str, object]:
        """What, besides model, dtype, salt and tokens, decides which bytes are stored."""
        dense = parse_dense_layers(self.config.dense_layers)
        automatic = {"keep": rule.KEEP, "threshold": rule.ERROR_THRESHOLD}
        return {
            "indexes": [
                {
                    "name": spec.name,
                    "kind": spec.kind,
                    "parameters": dict(spec.parameters),
                    "flat_layers": self.plan.covers_flat_layers(spec),
                }
                for spec in sorted(self.plan.specs, key=lambda spec: spec.name)
            ],
            "dense_layers": automatic if dense is None else list(dense),
            "query_sample": self.config.query_sample,
            "seed": self.config.seed,
            "calibration": fingerprint_prompts(self.prompts),
        }

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.identity.query_heads // self.identity.kv_heads

    def sample_plan(self) -> SamplePlan:
        """The positions whose queries are sampled."""
        rows = max(1, self.config.query_sample // self.group)
        lengths = [len(prompt) for prompt in self.prompts]
        return plan_sample(len(self.token_ids), lengths, rows, self.config.seed)

    def sampled_queries(self) -> int:
        """Queries that the index of one KV head is built from."""
        plan = self.sample_plan()
        return (len(plan.context_P) + sum(map(len, plan.prompts))) * self.group

    def id(self) -> str:
        return context_id(self.identity, self.dtype, self.parameters(), self.config.salt, self.token_ids)


class _Clock:
    """Seconds per phase; a phase that runs several times adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def run_job(
    config: PrefillConfig, reporter: Reporter, standard_input: BinaryIO | None = None
) -> PrefillReport:
    """Prefills a document unless the store has it already.

    A second job on the same content waits for the first and then finds the context there. Whatever interrupts a job
    leaves nothing visible; leftovers of killed jobs are removed by the next one. Raises SparseKVError with a sentence
    for every input, model, store or disk that cannot be used.
    """
    clock = _Clock()
    with clock("tokenize"):
        job = _prepare(config, standard_input or sys.stdin.buffer)
    store = Store(config.store, create=True)
    store.gc()
    id_ = job.id()
    with store.lock(id_, lambda: reporter.note(f"another job is writing context {id_[:12]}; waiting for it")):
        present = _find(store, id_, reporter)
        if present is not None:
            return PrefillReport(present, False, clock.seconds, _not_applied(config, present, reporter))
        _check_space(job)
        reporter.note(f"context {id_[:12]}: {len(job.token_ids)} tokens, model {job.identity.name}")
        manifest = _write(job, store, id_, clock, reporter)
    return PrefillReport(manifest, True, clock.seconds)


def _prepare(config: PrefillConfig, standard_input: BinaryIO) -> _Job:
    """Checks everything that can be checked without running the model."""
    plan = plan_indexes(config)
    folder = resolve_model(config.model)
    identity = identify(folder)
    dense = parse_dense_layers(config.dense_layers)
    if dense and dense[-1] >= identity.layers:
        raise InvalidArgumentError(
            f"--dense-layers names layer {dense[-1]}, model {identity.name!r} has layers 0 to {identity.layers - 1}"
        )
    tokenizer = load_tokenizer(folder)
    text = read_document(config.input, standard_input)
    token_ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
    prompts = [] if config.calibration is None else read_prompts(config.calibration, tokenizer)
    check_positions(identity, len(token_ids) + max((len(prompt) for prompt in prompts), default=0))
    dtype = checkpoint_dtype(folder) if config.dtype == "auto" else config.dtype
    job = _Job(config, folder, identity, dtype, token_ids, prompts, plan)
    check_centroids(config, plan, job.sampled_queries())
    # Whether the model's rotary embedding suits is known when the model is loaded.
    frequencies = torch.ones(identity.head_dim // 2)
    for spec in plan.specs:
        check_build(spec, identity, frequencies)
    return job


def _not_applied(config: PrefillConfig, present: Manifest, reporter: Reporter) -> tuple[str, ...]:
    """Which of --name and --ttl were given and differ from those of the context in the store; says so."""
    lifetime = None if present.expires_at is None else present.expires_at - present.created_at
    ignored = []
    if config.name is not None and config.name != present.name:
        ignored.append("name")
    if config.ttl is not None and parse_ttl(config.ttl) != lifetime:
        ignored.append("ttl")
    if ignored:
        flags = " and ".join(f"--{flag}" for flag in ignored)
        expires = "never" if present.expires_at is None else f"at {present.expires_at:%F %T} UTC"
        reporter.note(
            f"{flags} not applied: the store has context {present.id[:12]} already, under the name "
            f"{present.name!r}, expiring {expires}. To apply, run `index-store rm {present.id}` first, then this again"
        )
    return tuple(ignored)


def _find(store: Store, id_: str, reporter: Reporter) -> Manifest | None:
    """The published context, or None when there is none or when it has to be made again."""
    try:
        with store.open(id_) as context:
            return context.manifest
    except ContextNotFoundError:
        return None
    except ContextExpiredError:
        reporter.note(f"context {id_[:12]} has expired; prefilling it again")
    except ContextCorruptError as error:
        reporter.note(f"context {id_[:12]} is damaged ({error.message}); prefilling it again")
    return None


def _check_space(job: _Job) -> None:
    """Raises StoreFullError before any work when not even keys and values can fit."""
    needed = kv_entry(job.identity, len(job.token_ids), job.dtype).nbytes
    free = shutil.disk_usage(job.config.store).free
    if needed > free:
        raise StoreFullError(
            f"{job.config.store}: keys and values take {needed} bytes, {free} are free; nothing was written. "
            "Free space (`index-store gc`, `index-store rm`) and run again",
            needed=needed,
            free=free,
        )


def _write(job: _Job, store: Store, id_: str, clock: _Clock, reporter: Reporter) -> Manifest:
    with store.writer(id_) as writer:
        capture, frequencies, compute_dtype = _read(job, clock, reporter)
        with clock("dense_layers"):
            dense, errors = _dense_layers(job, capture)
        reporter.note(f"dense layers: {', '.join(map(str, dense)) or 'none'}")
        with reporter.phase("index", "layers") as update:
            indexes = [(spec, job.plan.layers(spec, job.identity.layers, dense)) for spec in job.plan.specs]
            written = write_layers(writer, capture, indexes, frequencies, job.config.seed, clock, update)
        tokens = writer.write_tokens(job.token_ids)
        kv = kv_entry(job.identity, len(job.token_ids), job.dtype)
        with clock("verify"), reporter.phase("verify", "bytes") as update:
            indexes_bytes = sum(index.nbytes for index in written.indexes)
            _verify(writer, tokens.nbytes + kv.nbytes + written.queries.nbytes + indexes_bytes, update)
        manifest = _manifest(job, id_, clock, compute_dtype, dense, errors, tokens, kv, written)
        with clock("publish"):
            return writer.publish(manifest)


def _read(job: _Job, clock: _Clock, reporter: Reporter) -> tuple[Capture, Tensor | None, str]:
    """What the model computed, its rotary frequencies, the name of the dtype it computed in; the weights are freed."""
    config, identity = job.config, job.identity
    with clock("load"):
        loaded = load_model(job.folder, register_attention(), device=config.torch_device)
        for spec in job.plan.specs:
            check_build(spec, identity, loaded.inverse_frequencies)
    capture = Capture(
        identity,
        len(job.token_ids),
        stored_dtype(job.dtype).torch_dtype,
        job.sample_plan(),
        config.torch_device,
    )
    with clock("prefill"), reporter.phase("prefill", "tokens") as update:
        run_context(loaded.model, capture, job.token_ids, config.chunk, update)
    if job.prompts:
        with clock("calibration"), reporter.phase("calibration", "prompts") as update:
            run_prompts(loaded.model, capture, job.prompts, config.chunk, update)
    return capture, loaded.inverse_frequencies, dtype_name(next(loaded.model.parameters()).dtype)


def _dense_layers(job: _Job, capture: Capture) -> tuple[tuple[int, ...], Sequence[float]]:
    """The dense layers, and where they were decided from the queries the measured error of every layer."""
    given = parse_dense_layers(job.config.dense_layers)
    if given is not None:
        return given, ()
    measured = measure_layers(capture)
    return rule.choose_dense_layers(measured), [layer.output_error for layer in measured]


def _manifest(
    job: _Job,
    id_: str,
    clock: _Clock,
    compute_dtype: str,
    dense: tuple[int, ...],
    errors: Sequence[float],
    tokens: ArrayEntry,
    kv: ArrayEntry,
    written: WrittenLayers,
) -> Manifest:
    config = job.config
    now = utc_now()
    ttl = parse_ttl(config.ttl)
    prefill: dict[str, Scalar] = {
        "chunk": config.chunk,
        "query_sample": config.query_sample,
        "seed": config.seed,
        "calibration_prompts": len(job.prompts),
        "dense_layers": config.dense_layers,
        "compute_dtype": compute_dtype,
        "device": config.torch_device.type,
    }
    return Manifest(
        id=id_,
        name=config.name or document_name(config.input),
        created_at=now,
        expires_at=None if ttl is None else now + ttl,
        model=job.identity,
        dtype=job.dtype,
        token_count=len(job.token_ids),
        salt=config.salt,
        methods=job.plan.method_names,
        dense_layers=dense,
        selection_errors=tuple(round(error, 6) for error in errors),
        tokens=tokens,
        kv=kv,
        indexes=written.indexes,
        prefill=prefill,
        seconds={phase: round(seconds, 6) for phase, seconds in clock.seconds.items()},
        queries=written.queries,
        query_positions=written.query_positions,
    )


def _verify(writer: ContextWriter, total: int, update: Update) -> None:
    """Reads back what was written, before anybody can see it; raises when a byte differs."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        update(min(done, total), total)

    writer.verify(count)
