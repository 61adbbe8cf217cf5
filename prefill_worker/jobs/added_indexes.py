"""Indexes that a stored context gains: from its keys and values, or from a second reading of its document."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from index_store.cli.console import Reporter
from index_store.errors import InvalidArgumentError
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.method import IndexSpec
from index_store.store.catalog import Store
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.manifest import IndexEntry, Manifest
from index_store.store.stored_context import Context
from index_store.store.writer import ContextWriter
from prefill_worker.build.index_choice import check_build, choose_indexes
from prefill_worker.build.layer_writing import LayerWriting
from prefill_worker.build.stages import Clock
from prefill_worker.build.stored_rows import StoredRows
from prefill_worker.config import AddIndexConfig
from prefill_worker.jobs.changes import Changes, plan_changes
from prefill_worker.jobs.document_layers import sync_written, write_layers
from prefill_worker.jobs.means import Means
from prefill_worker.jobs.prepared_job import PreparedJob
from prefill_worker.jobs.report import PrefillReport

Build = Callable[[Context, ContextWriter], Sequence[IndexEntry]]
"""Builds and writes the missing indexes of an open context."""


def run_add_index(config: AddIndexConfig, reporter: Reporter) -> PrefillReport:
    """Adds indexes to a stored context, without its document and its model.

    Raises InvalidArgumentError for an index that needs either, and what `Store.resolve` and `Store.open` raise.
    """
    clock = Clock()
    chosen = choose_indexes(config.method, config.index)
    store = Store(config.store)
    id_ = store.resolve(config.context)

    def plan() -> Changes:
        with store.open(id_) as context:
            changes = plan_changes(context.manifest, chosen)
        for spec in changes.missing:
            _check_rows_suffice(spec)
        return changes

    def build(context: Context, writer: ContextWriter) -> Sequence[IndexEntry]:
        missing = plan_changes(context.manifest, chosen).missing
        return build_from_rows(context, missing, None, config.torch_device, writer, clock, reporter)

    changes = plan()
    for note in changes.notes:
        reporter.note(note)
    if changes.told():
        with store.lock(
            id_, lambda: reporter.note(f"another job is writing context {id_[:12]}; waiting for it")
        ):
            changes = plan()
            manifest = apply_changes(store, changes, build, clock, reporter)
            return PrefillReport(manifest, False, clock.seconds, changes.told())
    return PrefillReport(changes.present, False, clock.seconds)


def add_missing(
    job: PreparedJob, store: Store, changes: Changes, clock: Clock, reporter: Reporter, means: Means
) -> Manifest:
    """Applies what a job changes of the context that it would have made; its lock is held."""

    def build(context: Context, writer: ContextWriter) -> Sequence[IndexEntry]:
        missing, device = changes.missing, job.config.torch_device
        again = [spec.name for spec in missing if INDEX_KINDS[spec.kind].needs_queries]
        if again:
            reporter.note(f"{', '.join(again)}: built from queries, so the document is read again")
            return write_layers(job, missing, writer, clock, reporter, context, means=means)[0].indexes
        frequencies = None
        if any(map(_needs_rotary, missing)):
            with clock("load"):
                _, frequencies = means.load(job.folder, device)
        return build_from_rows(context, missing, frequencies, device, writer, clock, reporter)

    return apply_changes(store, changes, build, clock, reporter)


def apply_changes(store: Store, changes: Changes, build: Build, clock: Clock, reporter: Reporter) -> Manifest:
    """Has the context become what is wanted, all at once; its lock is held."""
    present = changes.present
    with store.writer(present.id) as writer:
        added: Sequence[IndexEntry] = ()
        if changes.missing:
            with store.open(present.id, present) as context:
                added = build(context, writer)
            sync_written(writer, sum(index.nbytes for index in added), clock, reporter)
        with clock("publish"):
            return writer.publish_into(present, changes.wanted_with(added))


def build_from_rows(
    context: Context,
    specs: Sequence[IndexSpec],
    frequencies: Tensor | None,
    device: torch.device,
    writer: ContextWriter,
    clock: Clock,
    reporter: Reporter,
) -> Sequence[IndexEntry]:
    """Builds and writes indexes from stored keys and values; thresholds are calibrated on the stored queries.

    frequencies: [d/2] of the model's rotary embedding, for windowed RoPE.
    """
    manifest = context.manifest
    for spec in specs:
        check_build(spec, manifest.model, frequencies, stored_dtype(manifest.dtype).torch_dtype, device)
    seed = manifest.prefill.get("seed", 0)
    rows = StoredRows(context, device)
    with (
        LayerWriting(writer, rows, frequencies, int(seed), clock) as writing,
        clock("layers"),
        reporter.phase("index", "layers") as update,
    ):
        writing.begin(specs)
        return writing.finish(update).indexes


def _check_rows_suffice(spec: IndexSpec) -> None:
    how = "run `prefill-worker run` with the document and the options that it was read with, which adds the index"
    if INDEX_KINDS[spec.kind].needs_queries:
        raise InvalidArgumentError(
            f"index {spec.name} is built from thousands of the document's queries, of which the store keeps "
            f"a few; {how}",
            index=spec.name,
        )
    if _needs_rotary(spec):
        raise InvalidArgumentError(
            f"index {spec.name} undoes the model's rotary embedding, which the store does not have; {how}",
            index=spec.name,
        )


def _needs_rotary(spec: IndexSpec) -> bool:
    return bool(spec.parameters.get("window", 0))
