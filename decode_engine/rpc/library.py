"""What a door serves from beside the engine: the store, contexts as the API shows them, and where they are ordered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decode_engine.orders.core import Core, Residency
from decode_engine.rpc.contexts.names import COLLECTION
from decode_engine.rpc.creation.operations import Operations
from decode_engine.rpc.creation.orders import Workshop
from decode_engine.rpc.messages.describe import describe_broken, describe_context
from decode_engine.rpc.transport.status import Paths
from index_store.errors import ContextNotFoundError, SparseKVError
from index_store.family.parents import parent_of
from index_store.memory.placement import Placement
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.listing import BrokenContext
from sparsekv.v1 import context_pb2


@dataclass(frozen=True, slots=True)
class Library:
    """Contexts of a store. loop: on which the engine is asked; what is here is called by other threads.

    workshop: where contexts are ordered. paths: what no client is told.
    """

    store: Store
    workshop: Workshop
    core: Core
    loop: asyncio.AbstractEventLoop
    paths: Paths

    def operations(self) -> Operations:
        """The operations that follow orders."""
        return Operations(self.workshop.queue, self.describe_id, self.paths)

    def describe_id(self, id_: str) -> context_pb2.Context:
        """The context of an id as the API shows it, also where it has been deleted."""
        try:
            return self.describe([self.store.entry(id_)])[0]
        except ContextNotFoundError:
            gone = context_pb2.Context.UNAVAILABLE
            message = "the context was made, and has been deleted since"
            return context_pb2.Context(name=COLLECTION + id_, state=gone, state_message=message)

    def describe(self, entries: Sequence[Manifest | BrokenContext]) -> list[context_pb2.Context]:
        """Contexts of the store as the API shows them."""
        children = Counter(entry.parent.id for entry in self.store.list() if entry.parent is not None)
        bases = [self._base(entry) for entry in entries]
        wanted = [base.id for base in bases if isinstance(base, Manifest)]
        asking = self.core.residency(wanted)
        residency = asyncio.run_coroutine_threadsafe(asking, self.loop).result()
        return [
            self._describe(entry, base, residency, children[entry.id])
            for entry, base in zip(entries, bases, strict=True)
        ]

    def _base(self, entry: Manifest | BrokenContext) -> Manifest | BrokenContext:
        """What is searched of a context."""
        if isinstance(entry, BrokenContext):
            return entry
        try:
            return parent_of(self.store, entry) or entry
        except SparseKVError as error:
            return BrokenContext(entry.id, error)

    def _describe(
        self,
        entry: Manifest | BrokenContext,
        base: Manifest | BrokenContext,
        residency: Residency,
        children: int,
    ) -> context_pb2.Context:
        if isinstance(base, BrokenContext) or isinstance(entry, BrokenContext):
            broken = describe_broken(base if isinstance(base, BrokenContext) else entry)  # type: ignore[arg-type]
            broken.state_message = self.paths.hide(broken.state_message)
            return broken
        tuned, problem = None, ""
        try:
            tuned = self.store.default_method(base.id)
        except SparseKVError as error:
            problem = self.paths.hide(error.message)
        return describe_context(
            base,
            tuned,
            problem,
            expired=self.store.expired(entry),
            resident=base.id in residency.ids,
            placement=Placement(residency.placements.get(base.id, Placement.DEVICE.value)),
            child=entry if entry.parent is not None else None,
            children=children,
        )
