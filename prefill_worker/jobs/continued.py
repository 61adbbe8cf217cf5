"""A queued job whose context continues another one: the model reads what follows, and the store gets a child.

The parent's keys and values are taken as they are stored; the child's own are computed by exact attention to all before
them. Nothing is kept on the way: who takes such a job over begins it anew.

Shape legend: H KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from index_store.cli.console import Reporter, Update
from index_store.cli.options import parse_ttl
from index_store.errors import ContextCorruptError, ContextExpiredError, ContextNotFoundError
from index_store.family.children import Continuation, OwnRows, publish_child
from index_store.family.parents import EXACT, child_id
from index_store.store.catalog import Store, free_name, utc_now
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.manifest import Manifest
from prefill_worker.build.kv_placement import device_limit, place_kv
from prefill_worker.build.stages import Clock
from prefill_worker.jobs.beginnings import TakenBeginning
from prefill_worker.jobs.means import Means
from prefill_worker.jobs.prepared_job import PreparedJob
from prefill_worker.jobs.report import PrefillReport
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
    store, id_ = Store(job.config.store), child.id()
    ttl = parse_ttl(job.config.ttl)
    there = _is_there(store, id_)
    token_ids = torch.tensor(child.own_tokens, dtype=torch.int64)
    own = OwnRows(token_ids, []) if there else _read(child, token_ids, store, reporter, clock, means)
    made = Continuation(
        parent=parent,
        before=torch.tensor(job.token_ids[: parent.token_count], dtype=torch.int64),
        own=own,
        attention=EXACT,
        name=free_name(store, job.config.name or job.title, parent.model.fingerprint, id_),
        expires_at=None if ttl is None else utc_now() + ttl,
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
                loaded.model, capture, job.token_ids, chunk, _own_progress(update, first), first, collect
            )
        last = first + (total - first - 1) // chunk * chunk
        collect(last, total - last)
        state = capture.packed_state(capture.kv_dtype)
    rows = [torch.cat(layer, dim=1) for layer in parts]
    return OwnRows(token_ids, rows, state)


def _own_progress(update: Update, before: int) -> Update:
    return lambda done, total: update(done - before, total - before)
