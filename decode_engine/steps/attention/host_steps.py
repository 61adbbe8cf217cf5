"""Attention on a GPU to contexts whose keys, values and query tables lie in host memory: threads search there.

Tails, and the clusters that make the remainder, are in the device's memory. The step is one graph as elsewhere: a
launch asks for a layer's lists, another one waits for them, and the remainder attends to all clusters meanwhile, on a
stream of its own.

Shape legend: L layers, B rows (sessions) of a batch, H KV heads, G query heads per KV head, d head dim, F fields of a
record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.host_search.mailbox import Mailbox, MailboxSizes, SearchedRow, SearchThreads, list_width
from decode_engine.host_search.mailbox_triton import await_lists, post_queries
from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.families import HOST_TABLES
from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.session import Session
from decode_engine.steps.attention.listed_steps import HybridSteps
from decode_engine.steps.attention.selections import TableOptions
from decode_engine.steps.attention.step_attention import KeySelection, StepPlan
from decode_engine.steps.attention.step_batch import kept_count, step_counts
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.indexes.query_tables.index import QueryTables
from index_store.memory.resident import ResidentContext
from index_store.methods.method import IndexSpec, Method
from index_store.store.description.manifest import Manifest

_LIMIT_NS = 2_000_000_000
"""How long the device waits for a list before it gives the step up."""


@dataclass(frozen=True, slots=True)
class HostPlan(StepPlan):
    """A plan for batches that may be searched by threads of the host."""

    searching: SearchThreads | None = None


class HostTableSelection(KeySelection):
    """Search of dense query tables in host memory, by threads.

    Lists are those of the general path for the same queries, key by key.
    """

    kind, what = QueryTables.kind, "query tables"

    def __init__(self, plan: StepPlan) -> None:
        """Raises InvalidArgumentError for a plan without threads."""
        super().__init__(plan)
        if not isinstance(plan, HostPlan) or plan.searching is None:
            raise InvalidArgumentError("a search on the host needs threads, the plan has none")
        tables = TableOptions.of(self.searched(plan.method), plan.method)
        parameters, search = tables.parameters, tables.search
        self._workers = plan.searching.workers
        self.mailbox = Mailbox(
            MailboxSizes(
                plan.size,
                plan.model.kv_heads,
                plan.group,
                plan.model.head_dim,
                parameters.subspaces,
                parameters.centroids,
                search.group == "pooled",
                parameters.split == "strided",
                plan.model.layers,
                plan.max_keys,
            ),
            page_locked=plan.device.type == "cuda",
        )
        self.waves = self.mailbox.sizes.wave_heads
        self.lists = KeyLists.allocate(plan.rows, 1, self.mailbox.sizes.width, plan.device)
        self._gave_up_1 = torch.zeros(1, dtype=torch.int32, device=plan.device)
        self._places: WeakKeyDictionary[Session, _Places] = WeakKeyDictionary()
        self._held: list[LayerIndex] = []
        self._in_flight = False

    @classmethod
    def index_refusal(cls, spec: IndexSpec, method: Method, manifest: Manifest) -> str | None:
        tables = TableOptions.of(spec, method)
        refusal = tables.refusal("threads on the host")
        if refusal is not None:
            return refusal
        group, head_dim = manifest.model.query_heads // manifest.model.kv_heads, manifest.model.head_dim
        refusal = HOST_TABLES.refusal(group, head_dim)
        if refusal is not None:
            return refusal
        keys, room = manifest.token_count, list_width(manifest.token_count)
        if method.budget is not None and min(kept_count(method, keys), keys) > room:
            return f"it keeps {method.budget.label} of {keys}; lists of the host have room for {room} keys"
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> Mapping[int, int]:
        """Nothing: the device does not see the tables. Raises InvalidArgumentError where threads cannot read them."""
        _arrays(context, method, layer)
        return {}

    def begin(self, sessions: Mapping[int, Session]) -> int:
        """See `KeySelection.begin`."""
        self._workers.check()  # before what threads may still read is written to, or let go of
        rows, order, held = [], [], []
        for row, session in sessions.items():
            places = self._places.get(session)
            if places is None:
                places = self._places[session] = _Places.of(session)
            order = places.layers
            held += places.hold()
            counts = step_counts(session)
            length = session.context.manifest.token_count
            first, end = counts[records.FIRST], counts[records.END]
            # A share of what a long session has come to may be more than lists have room for.
            keep = min(counts[records.KEEP], self.mailbox.sizes.width)
            rows.append(SearchedRow(row, first, end, keep, length, places.addresses_S3))
        if not order:
            return 0
        step = self.mailbox.begin(rows, order)
        self._held = held
        self._in_flight = True
        self._workers.begin(self.mailbox)
        return step

    def end(self) -> int:
        """See `KeySelection.end`."""
        if not self._in_flight:
            return 0
        self._in_flight = False
        self._workers.end()
        self._held = []  # not where threads may still be at work, and the line above has raised
        if self.mailbox.gave_up:
            self._gave_up_1.zero_()
            raise SparseKVError(
                f"the device waited {_LIMIT_NS / 1e9:.1f} s for a search on the host and gave up; "
                "the search threads may have too few cores (--search-threads)"
            )
        if self.mailbox.stopped:
            raise SparseKVError("the search on the host was cancelled")
        return self.mailbox.waited_ns()

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        self.ask(layer, q_BHGD, records_BF)
        for heads in self.waves:
            self.await_heads(layer, records_BF, heads)
        return self.lists

    def ask(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        post_queries(q_BHGD.flatten(1), records_BF, self.mailbox.shared, layer)
        return self.lists

    def await_heads(self, layer: int, records_BF: Tensor, heads: range | None) -> None:
        await_lists(records_BF, self.mailbox.shared, self.lists, self._gave_up_1, layer, _LIMIT_NS, heads)


class HostSteps(HybridSteps):
    """`HybridSteps` whose tables are searched on the host: the same results for the same lists."""

    flies: ClassVar[bool] = False
    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = MappingProxyType(
        {QueryTables.kind: HostTableSelection}
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a session's tables are: layers that are searched, and addresses [S, 3] int64 of their arrays.

    indexes: the tables, which this does not keep in memory: rows of a batch remember sessions that have ended, and
    their contexts may have been dropped for others.
    """

    context: str
    layers: list[int]
    addresses_S3: NDArray[np.int64]
    indexes: list[ref[LayerIndex]]

    @classmethod
    def of(cls, session: Session) -> _Places:
        """Raises InvalidArgumentError for tables that threads cannot read."""
        layers = [layer for layer, each in enumerate(session.layers) if not isinstance(each, DenseLayer)]
        context, method = session.context, session.method
        addresses = [[array.data_ptr() for array in _arrays(context, method, layer)] for layer in layers]
        indexes = [ref(_index(context, method, layer)) for layer in layers]
        return cls(context.manifest.id[:12], layers, np.array(addresses, np.int64), indexes)

    def hold(self) -> list[LayerIndex]:
        """The tables. Raises InvalidArgumentError when they are not in memory any more."""
        found = [index for each in self.indexes if (index := each()) is not None]
        if len(found) < len(self.indexes):
            raise InvalidArgumentError(
                f"context {self.context} has been released, threads cannot search it; start another session on it"
            )
        return found


def _index(context: ResidentContext, method: Method, layer: int) -> LayerIndex:
    return context.index(HostTableSelection.searched(method).name, layer)


def _arrays(context: ResidentContext, method: Method, layer: int) -> list[Tensor]:
    """Scores, centroids and scales of a layer's tables. Raises InvalidArgumentError where threads cannot read them."""
    arrays = _index(context, method, layer).arrays()
    found = [arrays[name] for name in ("scores", "centroids", "scales")]
    for tensor in found:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"query tables of layer {layer} of context {context.manifest.id[:12]} are on {tensor.device} with "
                f"strides {tensor.stride()}; threads on the host search them in host memory, in one piece"
            )
    return found
