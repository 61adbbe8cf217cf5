"""One prefill job, from text to a published and verified context."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

from index_store.cli.progress import Reporter, Update
from index_store.errors import ContextCorruptError, ContextExpiredError, ContextNotFoundError
from index_store.models.loading import load_model
from index_store.store.catalog import Store, utc_now
from index_store.store.dtypes import dtype_name, stored_dtype
from index_store.store.json_fields import Scalar
from index_store.store.manifest import ArrayEntry, Manifest, kv_entry
from index_store.store.writer import ContextWriter
from prefill_worker.build.dense_layers import Selectivity, measure_layers
from prefill_worker.build.index_choice import check_build
from prefill_worker.build.kv_placement import DeviceMeter, UsedMemory, device_limit, place_kv, weight_bytes
from prefill_worker.build.layer_writing import LayerWriting, WrittenLayers
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig, parse_ttl
from prefill_worker.jobs.inputs import document_name
from prefill_worker.jobs.prepared_job import PreparedJob, check_space, prepare_job
from prefill_worker.muse.ranges import RangeAttention
from prefill_worker.reading.capture import Capture, register_attention
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
        job = prepare_job(config, standard_input or sys.stdin.buffer)
    store = Store(config.store, create=True)
    store.gc()
    id_ = job.id()
    with store.lock(id_, lambda: reporter.note(f"another job is writing context {id_[:12]}; waiting for it")):
        present = _find(store, id_, reporter)
        if present is not None:
            return PrefillReport(present, False, clock.seconds, _not_applied(config, present, reporter))
        check_space(job)
        reporter.note(f"context {id_[:12]}: {len(job.token_ids)} tokens, model {job.identity.name}")
        manifest, memory = _write(job, store, id_, clock, reporter)
    return PrefillReport(manifest, True, clock.seconds, memory=memory)


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


def _write(
    job: PreparedJob, store: Store, id_: str, clock: Clock, reporter: Reporter
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
    job: PreparedJob, writer: ContextWriter, clock: Clock, reporter: Reporter
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
        for spec in job.chosen.specs:
            check_build(spec, identity, frequencies, kv_dtype, config.torch_device)
    compute = next(loaded.model.parameters()).dtype
    placement = place_kv(job.sizes(loaded.model), device_limit(config.torch_device, config.device_memory))
    if placement.block_tokens is not None:
        reporter.note(placement.describe())
    meter = DeviceMeter(config.torch_device)
    capture = Capture(
        identity,
        len(job.token_ids),
        kv_dtype,
        job.sampled_positions(),
        config.torch_device,
        block_tokens=placement.block_tokens,
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
    return written, dtype_name(compute), placement.used(meter.peak())


def _begin(job: PreparedJob, writing: LayerWriting, measured: Sequence[Selectivity] | None) -> None:
    """Says which layers get which index; without a measurement, and where it is wanted, it is made on the way."""
    dense = job.dense_layers(measured or ())
    indexes = [(spec, job.chosen.layers(spec, job.identity.layers, dense)) for spec in job.chosen.specs]
    writing.begin(indexes, measured, measure=measured is None and job.given_dense_layers is None)


def _manifest(
    job: PreparedJob,
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
        methods=job.chosen.method_names,
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
