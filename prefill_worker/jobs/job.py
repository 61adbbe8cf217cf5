"""One prefill job, from text to a published context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import BinaryIO

from index_store.cli.console import Reporter
from index_store.cli.options import parse_ttl, seconds_of
from index_store.cli.report import layers_text
from index_store.cli.traces import TRACEPARENT
from index_store.errors import ContextCorruptError, ContextExpiredError, ContextNotFoundError, format_bytes
from index_store.models.attention_reading import logit_cap
from index_store.models.loading import attention_of, identifying
from index_store.models.resolve import resolve_model
from index_store.store.catalog import Store, free_name, require_free, take_name, utc_now
from index_store.store.clean_up import clean_up_at_times
from index_store.store.description.array_entry import ArrayEntry, state_entry, window_entry
from index_store.store.description.context_id import continued_digests, first_digest
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import STATE_MARKS, Manifest
from prefill_worker.build.kv_placement import UsedMemory
from prefill_worker.build.layer_writing import LOGIT_CAP, WrittenLayers
from prefill_worker.build.stages import Clock
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.added_indexes import Changes, add_missing, plan_changes
from prefill_worker.jobs.document_layers import (
    DEFAULT_MEANS,
    Means,
    find_beginning,
    sync_written,
    write_layers,
)
from prefill_worker.jobs.prepared_job import PrefillReport, PreparedJob, check_space, prepare_job


def run_job(
    config: PrefillConfig, reporter: Reporter, standard_input: BinaryIO | None = None
) -> PrefillReport:
    """Prefills a document unless the store has it already; then adds what the context lacks, if anything.

    A second job on the same content waits for the first and then finds the context there. Whatever interrupts a job
    leaves the store as it was; leftovers of killed jobs are removed by the next one that writes. Raises SparseKVError
    with a sentence for every input, model, store or disk that cannot be used.
    """
    clock = Clock()
    with clock("find model"):  # a GGUF file is hashed and converted when it is new
        folder = resolve_model(config.model)
    with reporter.phase("hash weights", "bytes") as update, identifying(folder, update) as model:
        with clock("tokenize"):
            job = prepare_job(config, folder, model.described, standard_input or sys.stdin.buffer)
        with clock("hash weights"):  # as far as it took longer than that
            job = replace(job, identity=model.result())
    name, id_ = config.name, job.id()
    if name is None:
        return carry_out(job, reporter, clock)
    store = config.open_store()
    if not config.move_name:
        require_free(store, name, job.identity.fingerprint, id_, config.tenant)
        return carry_out(job, reporter, clock)
    report = carry_out(replace(job, config=replace(config, name=None, move_name=False)), reporter, clock)
    before = report.manifest.name
    changed = {} if report.created or before == name else {"name": f"{before!r} is now {name!r}"}
    return replace(report, manifest=take_name(store, id_, name), changed={**report.changed, **changed})


def carry_out(
    job: PreparedJob, reporter: Reporter, clock: Clock, means: Means = DEFAULT_MEANS
) -> PrefillReport:
    """Does a job that was prepared; see `run_job`."""
    store = means.store or job.config.open_store()
    id_ = job.id()
    # Looked at without the lock first: a store that cannot be written to may have all that is wanted.
    changes = _planned(job, _find(store, id_, lambda _: None))
    if changes is not None:
        for note in changes.notes:
            reporter.note(note)
        if not changes.told():
            return PrefillReport(changes.present, False, clock.seconds)
        told = "; ".join(f"{what}: {words}" for what, words in changes.told().items())
        reporter.note(f"the store has context {id_[:12]} already, to be changed: {told}")
    clean_up_at_times(store)
    with store.lock(id_, lambda: reporter.note(f"another job is writing context {id_[:12]}; waiting for it")):
        changes = _planned(job, _find(store, id_, reporter.note))
        if changes is not None:
            manifest = (
                add_missing(job, store, changes, clock, reporter, means)
                if changes.told()
                else changes.present
            )
            return PrefillReport(manifest, False, clock.seconds, changes.told())
        check_space(job)
        reporter.note(f"context {id_[:12]}: {len(job.token_ids)} tokens, model {job.identity.name}")
        state = state_entry(job.identity, job.dtype, job.state_marks)
        if state is not None and job.state_marks:
            told = format_bytes(state.nbytes - state.chunk_bytes)
            reporter.note(f"states are kept behind {job.state_marks} marks, which takes {told}")
        manifest, memory = _write(job, store, id_, clock, reporter, means)
    return PrefillReport(manifest, True, clock.seconds, memory=memory)


def _planned(job: PreparedJob, present: Manifest | None) -> Changes | None:
    """What is to be changed of the context in the store; None when there is none."""
    if present is None:
        return None
    return plan_changes(present, job.chosen, job.config.name, job.config.ttl, job.labels, job.config.renew)


def _find(store: Store, id_: str, note: Callable[[str], None]) -> Manifest | None:
    """The published context, or None when there is none or when it has to be made again, of which `note` is told."""
    try:
        if store.elsewhere(id_):  # it is fetched where something is to be added
            manifest = store.manifest(id_)
            store.check_expiry(manifest)
            return manifest
        with store.open(id_) as context:
            return context.manifest
    except ContextNotFoundError:
        return None
    except ContextExpiredError:
        note(f"context {id_[:12]} has expired; prefilling it again")
    except ContextCorruptError as error:
        note(f"context {id_[:12]} is damaged ({error.message}); prefilling it again")
    return None


def _write(
    job: PreparedJob, store: Store, id_: str, clock: Clock, reporter: Reporter, means: Means
) -> tuple[Manifest, UsedMemory]:
    beginning = find_beginning(job, store, id_)
    with store.writer(id_, means.writing) as writer:
        written, compute_dtype, memory, taken = write_layers(
            job, job.chosen.specs, writer, clock, reporter, beginning=beginning, means=means
        )
        dense = job.dense_layers(written.selectivity)
        reporter.note(f"dense layers: {layers_text(dense, job.identity.layers)}")
        tokens = writer.write_tokens(job.token_ids)
        said = job.conversation
        messages = None if said is None else writer.write_conversation(said.to_bytes())
        wanted = job.config.name or job.title
        name = free_name(store, wanted, job.identity.fingerprint, id_, job.config.tenant)
        if name != wanted:
            reporter.note(f"another context has the name already; this one is called {name!r}")
        made = _manifest(job, id_, name, clock, compute_dtype, tokens, written, taken)
        manifest = replace(made, conversation=messages)
        sync_written(writer, sum(entry.nbytes for entry in manifest.arrays), clock, reporter)
        with clock("publish"):
            return writer.publish(replace(manifest, seconds=_seconds(clock))), memory


def _manifest(
    job: PreparedJob,
    id_: str,
    name: str,
    clock: Clock,
    compute_dtype: str,
    tokens: ArrayEntry,
    written: WrittenLayers,
    taken: Mapping[str, Scalar],
) -> Manifest:
    config = job.config
    made = (job.identity, len(job.token_ids), job.dtype)
    cap = logit_cap(attention_of(job.folder))
    now = utc_now()
    ttl = parse_ttl(config.ttl)
    prefill: dict[str, Scalar] = {
        "chunk": config.pass_tokens,
        **({} if config.state_marks is None else {STATE_MARKS: config.state_marks}),
        "attention": config.attention,
        **({} if config.muse is None else config.muse.describe()),
        "query_sample": config.query_sample,
        "seed": config.seed,
        "calibration_prompts": len(job.prompts),
        "dense_layers": config.dense_layers,
        "compute_dtype": compute_dtype,
        "device": config.torch_device.type,
        **({} if cap is None else {LOGIT_CAP: cap}),
        **({TRACEPARENT: job.traceparent} if job.traceparent else {}),
        **taken,
    }
    return Manifest(
        id=id_,
        name=name,
        created_at=now,
        expires_at=None if ttl is None else now + ttl,
        renew=seconds_of(config.renew),
        model=job.identity,
        dtype=job.dtype,
        token_count=len(job.token_ids),
        methods=job.chosen.method_names,
        dense_layers=job.dense_layers(written.selectivity),
        selection_errors=tuple(round(layer.output_error, 6) for layer in written.selectivity),
        tokens=tokens,
        kv=job.kv_entry(),
        indexes=written.indexes,
        prefill=prefill,
        seconds=_seconds(clock),
        queries=written.queries,
        query_positions=written.query_positions,
        window=window_entry(*made),
        state=state_entry(job.identity, job.dtype, job.state_marks),
        prefix_digests=continued_digests(
            first_digest(job.identity, job.dtype, config.salt, config.tenant), list(job.token_ids)
        ),
        labels=job.labels,
        owner=job.owner,
        tenant=config.tenant,
    )


def _seconds(clock: Clock) -> dict[str, float]:
    return {phase: round(seconds, 6) for phase, seconds in clock.seconds.items()}
