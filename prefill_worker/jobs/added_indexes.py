"""What a job changes of a context that the store has already: its methods, name and expiry, and indexes that it lacks,
from its keys and values or from a second reading of its document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

import torch
from torch import Tensor

from index_store.cli.console import Reporter
from index_store.cli.options import parse_ttl
from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.retired import why_retired
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.method import IndexSpec
from index_store.store.catalog import Store, utc_now
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.json_fields import Scalar
from index_store.store.description.manifest import IndexEntry, Manifest
from index_store.store.stored_context import Context
from index_store.store.writer import ContextWriter
from prefill_worker.build.index_choice import ChosenIndexes, check_build, choose_indexes, fitted
from prefill_worker.build.layer_writing import LayerWriting, StoredRows
from prefill_worker.build.stages import Clock
from prefill_worker.config import AddIndexConfig
from prefill_worker.jobs.document_layers import Means, sync_written, write_layers
from prefill_worker.jobs.prepared_job import PrefillReport, PreparedJob


@dataclass(frozen=True, slots=True)
class Changes:
    """present: the context as it is. wanted: as it is to be, but for the indexes. missing: indexes to add.

    notes: what else whoever asked should know.
    """

    present: Manifest
    wanted: Manifest
    missing: tuple[IndexSpec, ...]
    notes: tuple[str, ...] = ()

    def wanted_with(self, added: Sequence[IndexEntry]) -> Manifest:
        """The context as it is to be, with the missing indexes."""
        return replace(self.wanted, indexes=(*self.present.indexes, *added))

    def told(self) -> dict[str, str]:
        """A few words on each change by what changes; nothing where the context is as wanted."""
        before, after = self.present, self.wanted
        added = {"indexes": f"added {', '.join(spec.name for spec in self.missing)}"} if self.missing else {}
        methods = {"methods": f"now {', '.join(after.methods)}"} if after.methods != before.methods else {}
        name = {"name": f"{before.name!r} is now {after.name!r}"} if after.name != before.name else {}
        labels = {"labels": f"now {', '.join(after.labels)}"} if after.labels != before.labels else {}
        if after.expires_at == before.expires_at:
            return {**added, **methods, **name, **labels}
        expiry = f"expires {_moment(after.expires_at)} instead of {_moment(before.expires_at)}"
        return {**added, **methods, **name, **labels, "ttl": expiry}


def plan_changes(
    present: Manifest,
    chosen: ChosenIndexes,
    name: str | None = None,
    ttl: str | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Changes:
    """What is to be done so that the context has these indexes, name, labels and time to live, counted from now.

    What is None stays. A method takes an index that is there as it was built. Raises InvalidArgumentError for an index
    that was asked for in another form than the context has it in, and for too many labels, and MethodUnsupportedError
    for a method that cannot work with an index as it was built.
    """
    if present.parent is not None:
        raise InvalidArgumentError(
            f"context {present.id[:12]} has the indexes of context {present.parent.id}, which it continues; add them "
            "there",
            context=present.id,
        )
    pairs = [(spec, present.index(spec.name)) for spec in chosen.specs]
    notes = [
        note
        for spec, entry in pairs
        if entry is not None
        for note in _check_suits(present, entry, spec, spec.name in chosen.shaped)
    ]
    built = {
        entry.name: IndexSpec(entry.name, entry.kind, entry.parameters)
        for entry in present.indexes
        if why_retired(entry.kind, entry.parameters) is None
    }
    for method in chosen.methods:
        fitted(method, built)
    lifetime = parse_ttl(ttl)
    wanted = replace(
        present,
        name=name or present.name,
        expires_at=present.expires_at if lifetime is None else utc_now() + lifetime,
        methods=tuple(dict.fromkeys((*present.methods, *chosen.method_names))),
        labels=present.labels_with(labels),
    )
    missing = tuple(spec for spec, entry in pairs if entry is None)
    return Changes(present, wanted, missing, tuple(notes))


def _check_suits(present: Manifest, entry: IndexEntry, spec: IndexSpec, shaped: bool) -> list[str]:
    """Says how the index differs. There is one of a name: to replace it would take it from those who use it."""
    differing = [key for key in spec.parameters if entry.parameters.get(key) != spec.parameters[key]]
    found = f"context {present.id[:12]} has index {spec.name} with {_listed(entry.parameters, differing)}"
    if shaped and differing:
        raise InvalidArgumentError(
            f"{found}, asked for is {_listed(spec.parameters, differing)}; take the index as it is, make another "
            f"context of the text with --salt, or delete this one (`index-store rm {present.id}`)",
            index=spec.name,
        )
    if len(entry.layers) < present.model.layers:
        raise InvalidArgumentError(
            f"context {present.id[:12]} has index {spec.name} of layers {', '.join(map(str, entry.layers))} alone, as "
            "an older version built it; prefill the document again (`prefill-worker run`)",
            index=spec.name,
        )
    return (
        [f"{found} instead of {_listed(spec.parameters, differing)}; it is used as it is"]
        if differing
        else []
    )


def _listed(parameters: Mapping[str, Scalar], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={parameters.get(key)}" for key in keys)


def _moment(time: datetime | None) -> str:
    return "never" if time is None else f"at {time:%F %T} UTC"


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
