"""One prefill job, from text to a published and verified context."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from index_store.cli.progress import Reporter, Update
from index_store.errors import (
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    StoreFullError,
)
from index_store.indexes.interface.layer_index import Scalar
from index_store.indexes.registry import INDEX_KINDS
from index_store.models.loading import (
    ModelFolder,
    check_positions,
    checkpoint_dtype,
    identify,
    load_model,
    load_tokenizer,
    resolve_model,
)
from index_store.store.catalog import Store, utc_now
from index_store.store.context_id import context_id
from index_store.store.dtypes import dtype_name, stored_dtype
from index_store.store.manifest import ArrayEntry, Manifest, ModelIdentity, kv_entry
from index_store.store.writer import ContextWriter
from prefill_worker.build import dense_layers as rule
from prefill_worker.build.dense_layers import Selectivity, measure_layers
from prefill_worker.build.index_choice import IndexPlan, check_build, check_centroids, plan_indexes
from prefill_worker.build.layer_writing import LayerWriting, WrittenLayers
from prefill_worker.build.memory_plan import (
    DeviceMeter,
    JobSizes,
    UsedMemory,
    device_limit,
    plan_memory,
    weight_bytes,
)
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig, parse_dense_layers, parse_ttl
from prefill_worker.jobs.inputs import document_name, fingerprint_prompts, read_document, read_prompts
from prefill_worker.muse.ranges import RangeAttention, planned_bytes
from prefill_worker.reading.capture import Capture, SamplePlan, plan_sample, register_attention
from prefill_worker.reading.prefill import run_context, run_prompts


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What a job ends with. `created` is False when the store had the context already; `seconds` then says little.

    not_applied: settings given ("name", "ttl") that the context found in the store has otherwise; they were ignored.
    memory: what the job used; None when it did nothing.
    """

    manifest: Manifest
    created: bool
    seconds: Mapping[str, float]
    not_applied: tuple[str, ...] = ()
    memory: UsedMemory | None = None


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
        dense = self.given_dense_layers
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
            **({} if self.config.muse is None else {"attention": self.config.muse.describe()}),
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
        return self.sample_plan().rows * self.group

    def sizes(self, model: Any) -> JobSizes:
        """What decides how much memory the job needs with this model."""
        index_row = sum(
            INDEX_KINDS[spec.kind].bytes_per_token(spec.parameters, self.identity.head_dim)
            for spec in self.plan.specs
        )
        tokens, muse, compute = len(self.token_ids), self.config.muse, next(model.parameters()).dtype
        return JobSizes(
            self.identity,
            tokens=tokens,
            chunk=self.config.pass_tokens,
            sampled=self.sample_plan().rows,
            feed_forward=int(getattr(model.config, "intermediate_size", 4 * model.config.hidden_size)),
            index_bytes=int(tokens * self.identity.kv_heads * index_row),
            kv_dtype=stored_dtype(self.dtype).torch_dtype,
            compute_dtype=compute,
            approximation_bytes=0 if muse is None else planned_bytes(muse, self.identity, tokens, compute),
            pass_flag="--chunk" if muse is None else "--muse-block",
        )

    @property
    def given_dense_layers(self) -> tuple[int, ...] | None:
        """The dense layers that the job was told; None when they are to be measured."""
        return parse_dense_layers(self.config.dense_layers)

    @property
    def layers_are_known(self) -> bool:
        """Whether the layers of every index are known before any is measured."""
        known = self.given_dense_layers is not None
        return known or all(self.plan.covers_flat_layers(spec) for spec in self.plan.specs)

    def dense_layers(self, measured: Sequence[Selectivity]) -> tuple[int, ...]:
        """Those given, otherwise those whose attention was measured to be flat."""
        given = self.given_dense_layers
        return rule.choose_dense_layers(measured) if given is None else given

    def id(self) -> str:
        return context_id(self.identity, self.dtype, self.parameters(), self.config.salt, self.token_ids)


def run_job(
    config: PrefillConfig, reporter: Reporter, standard_input: BinaryIO | None = None
) -> PrefillReport:
    """Prefills a document unless the store has it already.

    A second job on the same content waits for the first and then finds the context there. Whatever interrupts a job
    leaves nothing visible; leftovers of killed jobs are removed by the next one. Raises SparseKVError with a sentence
    for every input, model, store or disk that cannot be used.
    """
    clock = Clock()
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
        manifest, memory = _write(job, store, id_, clock, reporter)
    return PrefillReport(manifest, True, clock.seconds, memory=memory)


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


def _write(
    job: _Job, store: Store, id_: str, clock: Clock, reporter: Reporter
) -> tuple[Manifest, UsedMemory]:
    with store.writer(id_) as writer:
        written, compute_dtype, memory = _read_and_build(job, writer, clock, reporter)
        dense = job.dense_layers(written.selectivity)
        reporter.note(f"dense layers: {', '.join(map(str, dense)) or 'none'}")
        tokens = writer.write_tokens(job.token_ids)
        kv = kv_entry(job.identity, len(job.token_ids), job.dtype)
        with clock("verify"), reporter.phase("verify", "bytes") as update:
            indexes_bytes = sum(index.nbytes for index in written.indexes)
            _verify(writer, tokens.nbytes + kv.nbytes + written.queries.nbytes + indexes_bytes, update)
        manifest = _manifest(job, id_, clock, compute_dtype, tokens, kv, written)
        with clock("publish"):
            return writer.publish(manifest), memory


def _read_and_build(
    job: _Job, writer: ContextWriter, clock: Clock, reporter: Reporter
) -> tuple[WrittenLayers, str, UsedMemory]:
    """Runs the model, builds and writes all layers: what was written, the dtype it computed in, the memory it took.

    On a device layers are built as soon as the last chunk has passed them, unless something must be known before that
    only the whole pass tells: the calibration prompts' queries, or which layers are flat and get no index.
    """
    config, identity = job.config, job.identity
    kv_dtype = stored_dtype(job.dtype).torch_dtype
    with clock("load"):
        loaded = load_model(job.folder, register_attention(), device=config.torch_device)
        frequencies = loaded.inverse_frequencies
        for spec in job.plan.specs:
            check_build(spec, identity, frequencies, kv_dtype, config.torch_device)
    compute = next(loaded.model.parameters()).dtype
    plan = plan_memory(job.sizes(loaded.model), device_limit(config.torch_device, config.device_memory))
    if plan.block_tokens is not None:
        reporter.note(plan.describe())
    meter = DeviceMeter(config.torch_device)
    capture = Capture(
        identity,
        len(job.token_ids),
        kv_dtype,
        job.sample_plan(),
        config.torch_device,
        block_tokens=plan.block_tokens,
        approximation=None if config.muse is None else RangeAttention(config.muse, identity.layers),
    )
    with closing(capture), LayerWriting(writer, capture, frequencies, config.seed, clock) as writing:
        early = capture.device.type == "cuda" and not job.prompts and job.layers_are_known
        if early:
            _begin(job, writing, None)
            capture.when_passed(writing.add)
        with clock("prefill"), reporter.phase("prefill", "tokens") as update:
            run_context(loaded.model, capture, job.token_ids, config.pass_tokens, update)
        if job.prompts:
            with clock("calibration"), reporter.phase("calibration", "prompts") as update:
                run_prompts(loaded.model, capture, job.prompts, config.chunk, update)
        weights = weight_bytes(loaded.model)
        del loaded  # the weights have done their part
        meter.without(weights)
        with clock("layers"), reporter.phase("index", "layers") as update:
            if not early:
                measured = None
                if not job.layers_are_known:
                    with clock("dense_layers"):
                        measured = measure_layers(capture)
                _begin(job, writing, measured)
            written = writing.finish(update)
    return written, dtype_name(compute), plan.used(meter.peak())


def _begin(job: _Job, writing: LayerWriting, measured: Sequence[Selectivity] | None) -> None:
    """Says which layers get which index; without a measurement, and where it is wanted, it is made on the way."""
    dense = job.dense_layers(measured or ())
    indexes = [(spec, job.plan.layers(spec, job.identity.layers, dense)) for spec in job.plan.specs]
    writing.begin(indexes, measured, measure=measured is None and job.given_dense_layers is None)


def _manifest(
    job: _Job,
    id_: str,
    clock: Clock,
    compute_dtype: str,
    tokens: ArrayEntry,
    kv: ArrayEntry,
    written: WrittenLayers,
) -> Manifest:
    config = job.config
    now = utc_now()
    ttl = parse_ttl(config.ttl)
    prefill: dict[str, Scalar] = {
        "chunk": config.pass_tokens,
        "attention": config.attention,
        **({} if config.muse is None else config.muse.describe()),
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
        dense_layers=job.dense_layers(written.selectivity),
        selection_errors=tuple(round(layer.output_error, 6) for layer in written.selectivity),
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
