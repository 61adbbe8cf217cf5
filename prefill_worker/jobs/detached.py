"""Children made whole: contexts of their own, with all keys and values and with indexes built anew.

Sessions on a child hold what it adds, and search it in extensions of their own. Where that is no longer short beside
its parent, or the parent is to go, it is better written as a context that stands alone. Indexes are built from all of
its rows. Those that are built from queries get the few that the parent has stored, where these are enough.

Shape legend: H KV heads, N tokens of the parent, D tokens of the child's own, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from index_store.cli.progress import Reporter
from index_store.errors import ContextNotFoundError, InvalidArgumentError
from index_store.family.children import ATTENTION, OwnRows, attention_of, read_own_rows
from index_store.family.parents import parent_of
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import IndexSpec
from index_store.store.catalog import Store, utc_now
from index_store.store.context_id import context_id
from index_store.store.manifest import ArrayEntry, IndexEntry, Manifest, kv_entry, window_entry
from index_store.store.stored_context import Context
from index_store.store.writer import ContextWriter
from prefill_worker.build.layer_writing import LayerWriting
from prefill_worker.build.stages import Clock
from prefill_worker.build.stored_rows import LOGIT_CAP, StoredRows
from prefill_worker.config import DetachConfig
from prefill_worker.jobs.document_layers import verify_written
from prefill_worker.jobs.report import PrefillReport

_QUERIES_PER_CENTROID = 8
"""Stored queries that an index which is made of queries needs at least, for each of its centroids."""


def run_detach(config: DetachConfig, reporter: Reporter) -> PrefillReport:
    """Writes a child as a context of its own and removes the child; its name stays, its id is another.

    Killed in between it leaves both, and can be run again. Raises InvalidArgumentError for a context that is no child,
    and what reading and writing raise.
    """
    clock, store = Clock(), Store(config.store)
    child = store.manifest(store.resolve(config.context))
    parent = parent_of(store, child)
    if parent is None:
        raise InvalidArgumentError(f"context {child.id} continues no other one: it stands alone already")
    with store.open(parent.id, parent, expired=True) as context:
        with store.open(child.id, child, expired=True) as own:
            said = own.conversation()
        rows = _JoinedRows(context, read_own_rows(store, child), said, config.torch_device)
        token_ids = torch.cat([context.tokens(), rows.own.token_ids])
        reading: dict[str, object] = {
            "parent": parent.id,
            ATTENTION: attention_of(child),
            "whole": True,
            **({} if said is None else {"messages": True}),
        }
        id_ = context_id(child.model, child.dtype, reading, "", token_ids)
        with store.lock(id_):
            present = _present(store, id_)
            manifest = present or _write(
                store, rows, replace(child, id=id_), parent, token_ids, clock, reporter
            )
    store.delete(child.id)
    return PrefillReport(manifest, present is None, clock.seconds)


def _present(store: Store, id_: str) -> Manifest | None:
    """The whole context where a job that was killed has left it; a damaged one is removed."""
    try:
        if not store.verify(id_):
            return store.manifest(id_)
        store.delete(id_)
    except ContextNotFoundError:
        pass
    return None


class _JoinedRows(StoredRows):
    """Those of a child's parent, and behind them the child's own."""

    def __init__(
        self, context: Context, own: OwnRows, conversation: bytes | None, device: torch.device
    ) -> None:
        super().__init__(context, device)
        self.own = own
        self.conversation = conversation

    def kv_on_device(self, layer: int) -> Tensor:
        return torch.cat([super().kv_on_device(layer), self.own.rows[layer].to(self.device)], dim=1)


def _write(
    store: Store,
    rows: _JoinedRows,
    child: Manifest,
    parent: Manifest,
    token_ids: Tensor,
    clock: Clock,
    reporter: Reporter,
) -> Manifest:
    """Writes the context that has the child's name and expiry, and the id that it is given here."""
    with store.writer(child.id) as writer:
        manifest = _write_arrays(writer, rows, child, parent, token_ids, clock, reporter)
        verify_written(writer, sum(entry.nbytes for entry in manifest.arrays), clock, reporter)
        with clock("publish"):
            return writer.publish(manifest)


def _write_arrays(
    writer: ContextWriter,
    rows: _JoinedRows,
    child: Manifest,
    parent: Manifest,
    token_ids: Tensor,
    clock: Clock,
    reporter: Reporter,
) -> Manifest:
    seed = parent.prefill.get("seed", 0)
    made = (child.model, child.token_count, child.dtype)
    kv, window = kv_entry(*made), window_entry(*made)
    tokens = writer.write_tokens(token_ids)
    said = None if rows.conversation is None else writer.write_conversation(rows.conversation)
    with clock("write"):
        for entry in (kv,) if window is None else (kv, window):
            _copy_rows(writer, rows, entry, child)
        if parent.queries is not None:
            _copy_queries(writer, rows, parent.queries.layout)
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
        created_at=utc_now(),
        selection_errors=parent.selection_errors,
        tokens=tokens,
        kv=kv,
        window=window,
        queries=None if parent.queries is None else parent.queries.layout,
        query_positions=parent.query_positions,
        conversation=said,
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
        lacks = None
        if entry.parameters.get("window", 0):
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
    for place, layer in enumerate(layers if entry.path == "kv" else child.model.window_layers):
        for head, joined in enumerate(rows.kv_on_device(layer).cpu()):
            writer.write_chunk(entry.path, (place, head), joined[len(joined) - entry.shape[2] :])


def _copy_queries(writer: ContextWriter, rows: _JoinedRows, entry: ArrayEntry) -> None:
    writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
    for place, layer in enumerate(rows.identity.full_layers):
        for head, queries in enumerate(rows.query_sample(layer).queries_HPGD.cpu()):
            writer.write_chunk(entry.path, (place, head), queries)
