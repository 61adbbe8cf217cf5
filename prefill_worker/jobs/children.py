"""Contexts that continue others: read behind their parents, and made whole.

A child's own keys and values are computed by exact attention to all before them, its parent's are taken as they are
stored. Nothing is kept on the way: who takes such a job over begins it anew.

Sessions on a child hold what it adds, and search it in extensions of their own. Where that is no longer short beside
its parent, or the parent is to go, it is better written as a context that stands alone: under the same id, since it
says the same. Indexes are built from all of its rows. Those that are built from queries get the few that the parent has
stored, where these are enough. Where the parent's rows have 8 bits, those of the whole have them, too: what was coded
is coded again, and may be off by twice as much.

Shape legend: H KV heads, N tokens of the parent, D tokens of the child's own, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from index_store.cli.console import Reporter
from index_store.cli.options import parse_ttl, seconds_of
from index_store.errors import (
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
)
from index_store.family.children import Continuation, OwnRows, attention_of, publish_child, read_own_rows
from index_store.family.parents import ATTENTION, EXACT, child_id, parent_of
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.two_planes import find_low_plane
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.interface.retired import why_retired
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.method import IndexSpec
from index_store.store.catalog import CHANGEABLE, Store, free_name, utc_now
from index_store.store.description.array_entry import (
    ArrayEntry,
    kv_entry,
    plane_entry,
    queries_entry,
    window_entry,
)
from index_store.store.description.dtypes import INT8, stored_dtype
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry, Manifest
from index_store.store.files.leftovers import WHOLE
from index_store.store.stored_context import Context
from index_store.store.writer import ContextWriter
from prefill_worker.build.kv_placement import device_limit, place_kv
from prefill_worker.build.layer_writing import LOGIT_CAP, LayerWriting, StoredRows
from prefill_worker.build.stages import Clock
from prefill_worker.config import DetachConfig
from prefill_worker.jobs.document_layers import Means, TakenBeginning, sync_written
from prefill_worker.jobs.prepared_job import PrefillReport, PreparedJob
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import SampledPositions


@dataclass(frozen=True, slots=True)
class ChildJob:
    """job: over all tokens, those of the parent first."""

    job: PreparedJob
    parent: Manifest

    def id(self) -> str:
        """The child's."""
        messages = self.job.conversation is not None
        return child_id(self.parent, EXACT, self.job.token_ids, messages=messages)

    @property
    def own_tokens(self) -> Sequence[int]:
        """Those behind the parent's."""
        return self.job.token_ids[self.parent.token_count :]


def carry_out_child(child: ChildJob, reporter: Reporter, clock: Clock, means: Means) -> PrefillReport:
    """Makes the child, or finds it; see `publish_child`. Raises what reading, writing and the model raise."""
    job, parent = child.job, child.parent
    store, id_ = means.store or job.config.open_store(), child.id()
    ttl = parse_ttl(job.config.ttl)
    there = _is_there(store, id_)
    token_ids = torch.tensor(child.own_tokens, dtype=torch.int64)
    own = OwnRows(token_ids, []) if there else _read(child, token_ids, store, reporter, clock, means)
    made = Continuation(
        parent=parent,
        before=torch.tensor(job.token_ids[: parent.token_count], dtype=torch.int64),
        own=own,
        attention=EXACT,
        name=free_name(store, job.config.name or job.title, parent.model.fingerprint, id_, parent.tenant),
        expires_at=None if ttl is None else utc_now() + ttl,
        renew=seconds_of(job.config.renew),
        owner=job.owner,
        labels=job.labels,
        conversation=None if job.conversation is None else job.conversation.to_bytes(),
    )
    with clock("publish"):
        return PrefillReport(publish_child(store, made), not there, clock.seconds)


def _is_there(store: Store, id_: str) -> bool:
    """Whether the store has the child, whole."""
    try:
        with store.open(id_):
            return not store.verify(id_)
    except (ContextNotFoundError, ContextExpiredError, ContextCorruptError):
        return False


def _read(
    child: ChildJob, token_ids: Tensor, store: Store, reporter: Reporter, clock: Clock, means: Means
) -> OwnRows:
    """Keys and values of the child's own tokens, and the states behind them."""
    job, config, identity = child.job, child.job.config, child.job.identity
    with clock("load"):
        loaded, _ = means.load(job.folder, config.torch_device)
    placement = place_kv(job.sizes(loaded.model, ()), device_limit(config.torch_device, config.device_memory))
    capture = Capture(
        identity,
        len(job.token_ids),
        stored_dtype(job.dtype).torch_dtype,
        SampledPositions(torch.empty(0, dtype=torch.int64)),
        config.torch_device,
        block_tokens=placement.block_tokens,
    )
    first, total = child.parent.token_count, len(job.token_ids)
    # The capture keeps no more of a layer with a window than its queries see.
    chunk = config.pass_tokens if identity.window is None else min(config.pass_tokens, identity.window.size)
    parts: list[list[Tensor]] = [[] for _ in range(identity.layers)]

    def collect(start: int, count: int) -> None:
        for layer, (kv, _) in enumerate(capture.rows(start, count)):
            parts[layer].append(kv.cpu().clone())

    with closing(capture):
        with clock("taken"):
            unsampled = replace(child.parent, queries=None, query_positions=())
            TakenBeginning(store, unsampled, first).fill(capture)
        with clock("prefill"), reporter.phase("prefill", "tokens") as update:
            run_context(
                loaded.model,
                capture,
                job.token_ids,
                chunk,
                lambda done, of: update(done - first, of - first),
                first,
                collect,
            )
        last = first + (total - first - 1) // chunk * chunk
        collect(last, total - last)
        state = capture.packed_state(capture.kv_dtype)
    rows = [torch.cat(layer, dim=1) for layer in parts]
    return OwnRows(token_ids, rows, state)


_QUERIES_PER_CENTROID = 8
"""Stored queries that an index which is made of queries needs at least, for each of its centroids."""


def run_detach(config: DetachConfig, reporter: Reporter) -> PrefillReport:
    """Makes a child whole that somebody names. Raises InvalidArgumentError for a context that is no child, too."""
    store = Store(config.store)
    child = store.manifest(store.resolve(config.context))
    if child.parent is None:
        raise InvalidArgumentError(f"context {child.id} continues no other one: it stands alone already")
    return make_whole(store, child, config.torch_device, Clock(), reporter)


def make_whole(
    store: Store, child: Manifest, device: torch.device, clock: Clock, reporter: Reporter
) -> PrefillReport:
    """Has a child become a context that stands alone, all at once; nothing happens to one that does already.

    It is written elsewhere without the context's lock, so that it can be used and changed meanwhile. Killed in between,
    the child stays as it was. device: where indexes are built. Raises what reading and writing raise,
    ContextNotFoundError where it is deleted meanwhile.
    """
    parent = parent_of(store, child)
    if parent is None:
        return PrefillReport(child, False, clock.seconds)
    with store.open(parent.id, parent, expired=True) as context, store.writer(child.id) as writer:
        rows = _JoinedRows(context, read_own_rows(store, child), device)
        token_ids = torch.cat([context.tokens(), rows.own.token_ids])
        manifest = _write_arrays(writer, rows, child, parent, token_ids, clock, reporter)
        sync_written(writer, sum(entry.nbytes for entry in manifest.arrays), clock, reporter)
        with clock("publish"), store.lock(child.id):
            present = store.manifest(child.id)
            if present.parent is None:
                return PrefillReport(present, False, clock.seconds)
            now = {name: getattr(present, name) for name in CHANGEABLE}
            return PrefillReport(writer.publish_whole(replace(manifest, **now)), True, clock.seconds)


class _JoinedRows(StoredRows):
    """Those of a child's parent, and behind them the child's own."""

    def __init__(self, context: Context, own: OwnRows, device: torch.device) -> None:
        super().__init__(context, device)
        self.own = own

    def kv_on_device(self, layer: int) -> Tensor:
        return torch.cat([super().kv_on_device(layer), self.own.rows[layer].to(self.device)], dim=1)


def _write_arrays(
    writer: ContextWriter,
    rows: _JoinedRows,
    child: Manifest,
    parent: Manifest,
    token_ids: Tensor,
    clock: Clock,
    reporter: Reporter,
) -> Manifest:
    """The arrays below WHOLE, and the indexes; the messages stay where they are."""
    seed = parent.prefill.get("seed", 0)
    made = (child.model, child.token_count, child.dtype)
    planes = parent.rows == INT8
    kv = (plane_entry(*made[:2]) if planes else kv_entry(*made)).below(WHOLE)
    beside = window_entry(*made)
    window = None if beside is None else beside.below(WHOLE)
    sample = queries_entry(child.model, len(parent.query_positions))
    queries = None if sample is None else sample.below(WHOLE)
    tokens, state = writer.write_tokens(token_ids, WHOLE), writer.write_state(rows.own.state, WHOLE)
    with clock("write"):
        if planes:
            _write_planes(writer, rows, kv, parent)
        for entry in (() if planes else (kv,)) + (() if window is None else (window,)):
            _copy_rows(writer, rows, entry, child)
        if queries is not None:
            _copy_queries(writer, rows, queries)
    with (
        LayerWriting(writer, rows, None, int(seed), clock) as writing,
        clock("layers"),
        reporter.phase("index", "layers") as update,
    ):
        writing.begin(_specs(parent, reporter))
        indexes: Sequence[IndexEntry] = writing.finish(update).indexes
    notes = {note: parent.prefill[note] for note in ("seed", LOGIT_CAP) if note in parent.prefill}
    return replace(
        child,
        selection_errors=parent.selection_errors,
        tokens=tokens,
        kv=kv,
        window=window,
        state=state,
        queries=queries,
        query_positions=parent.query_positions,
        indexes=tuple(indexes),
        prefill={ATTENTION: attention_of(child), "detached_from": parent.id, **notes},
        seconds={phase: round(spent, 6) for phase, spent in clock.seconds.items()},
        parent=None,
    )


def _specs(parent: Manifest, reporter: Reporter) -> list[IndexSpec]:
    """The parent's indexes, but for those that cannot be built from what is stored, which are told."""
    group = parent.model.query_heads // parent.model.kv_heads
    queries = len(parent.query_positions) * group
    specs = []
    for entry in parent.indexes:
        lacks = why_retired(entry.kind, entry.parameters)
        if lacks is not None:
            pass
        elif entry.parameters.get("window", 0):
            lacks = "it undoes the model's rotary embedding, which the store does not have"
        elif INDEX_KINDS[entry.kind].needs_queries:
            wanted = _QUERIES_PER_CENTROID * int(entry.parameters.get("centroids", 0))
            if queries < wanted:
                lacks = f"it is made of queries, of which {queries} are stored and {wanted} are needed"
        if lacks is None:
            specs.append(IndexSpec(entry.name, entry.kind, entry.parameters))
        else:
            reporter.note(f"index {entry.name} is left out: {lacks}")
    return specs


def _copy_rows(writer: ContextWriter, rows: _JoinedRows, entry: ArrayEntry, child: Manifest) -> None:
    """Writes an array of keys and values: those of both; of layers with a window the last of them."""
    writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
    layers = child.model.full_layers or child.model.window_layers
    beside = entry.path.endswith("window")
    for place, layer in enumerate(child.model.window_layers if beside else layers):
        for head, joined in enumerate(rows.kv_on_device(layer).cpu()):
            writer.write_chunk(entry.path, (place, head), joined[len(joined) - entry.shape[2] :])


def _write_planes(writer: ContextWriter, rows: _JoinedRows, entry: ArrayEntry, parent: Manifest) -> None:
    """Codes the rows of both again, and writes the low plane; the high one is built as an index."""
    writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
    high = next(index for index in parent.indexes if index.name == HIGH_PLANE)
    for place, layer in enumerate(parent.model.full_layers):
        kv_HN2D = rows.kv_on_device(layer)
        source = LayerSource(kv_HN2D, rows.query_sample(layer))
        coarse = CoarseRows.build(high.parameters, source, 0).rows
        for head, low in enumerate(find_low_plane(kv_HN2D, coarse).cpu()):
            writer.write_chunk(entry.path, (place, head), low)


def _copy_queries(writer: ContextWriter, rows: _JoinedRows, entry: ArrayEntry) -> None:
    writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
    for place, layer in enumerate(rows.identity.full_layers):
        for head, queries in enumerate(rows.query_sample(layer).queries_HPGD.cpu()):
            writer.write_chunk(entry.path, (place, head), queries)
