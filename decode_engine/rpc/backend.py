"""What the services serve from, and what stands in for it while the model is being loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_engine.engine.engine import Engine
from decode_engine.errors import NotReadyError
from decode_engine.layers.session import Session
from decode_engine.model.continuing import Ground
from decode_engine.model.method_choice import StepCosts
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc.contexts.names import COLLECTION
from decode_engine.rpc.creation.kept_beginnings import KeptBeginnings
from decode_engine.rpc.creation.operations import Operations
from decode_engine.rpc.creation.orders import Workshop
from decode_engine.rpc.messages.describe import describe_broken, describe_context
from decode_engine.rpc.transport.status import Paths
from index_store.errors import ContextNotFoundError, SparseKVError
from index_store.family.prefixes import longest_prefix
from index_store.memory.arena import Arena
from index_store.store.catalog import Store
from index_store.store.description.context_id import continued_digests, first_digest
from index_store.store.description.manifest import Manifest
from index_store.store.listing import BrokenContext
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import context_pb2


@dataclass(frozen=True, slots=True)
class ServiceBackend:
    """What the services serve from.

    workshop: where contexts are ordered. beginnings: of prompts that name no context, some of which are kept. paths:
    what no client is told. costs: of decode steps, by which a method is chosen where requests leave that to the server;
    auto: whether those do that name none.
    """

    store: Store
    arena: Arena
    runner: ModelRunner
    engine: Engine[Session]
    workshop: Workshop
    beginnings: KeptBeginnings
    paths: Paths = field(default_factory=Paths)
    costs: StepCosts = field(default_factory=StepCosts)
    auto: bool = True

    def operations(self) -> Operations:
        """The operations that follow orders."""
        return Operations(self.workshop.queue, self.describe_id, self.paths)

    def describe_id(self, id_: str) -> context_pb2.Context:
        """The context of an id as the API shows it, also where it has been deleted."""
        try:
            return self.describe(self.store.entry(id_), set(self.arena.ids()), self.children())
        except ContextNotFoundError:
            gone = context_pb2.Context.UNAVAILABLE
            message = "the context was made, and has been deleted since"
            return context_pb2.Context(name=COLLECTION + id_, state=gone, state_message=message)

    def servable(self, id_: str) -> Manifest:
        """The manifest of a context that can be decoded against by the loaded model.

        Raises what `Store.manifest` raises, ContextExpiredError, ModelMismatchError or DtypeMismatchError.
        """
        manifest = self.store.manifest(id_)
        self.store.check_expiry(manifest)
        self.runner.check(manifest)
        return manifest

    def ground(self, id_: str) -> Ground:
        """A context as `servable` gives it, and the one that it continues. Raises ParentMissingError, too."""
        return Ground.of(self.store, self.servable(id_))

    @property
    def nothing(self) -> Ground:
        """What a prompt stands on that begins with no stored context: no tokens."""
        manifest = self.runner.no_context.manifest
        return Ground(manifest, manifest)

    def beginning(self, token_ids: Sequence[int]) -> Ground:
        """The longest stored context, made without a salt, that tokens begin with, or are; `nothing` without one.

        Contexts that do not fit into memory are passed over.
        """
        first = first_digest(self.runner.identity, self.runner.kv_dtype, "")
        digests = continued_digests(first, token_ids)
        found = longest_prefix(self.store, digests, token_ids, self._may_hold)
        return self.nothing if found is None else Ground.of(self.store, found)

    def _may_hold(self, manifest: Manifest) -> bool:
        try:
            return self.arena.may_hold(Ground.of(self.store, manifest).base)
        except SparseKVError:
            return False

    def children(self) -> Counter[str]:
        """How many contexts continue each one, by its id."""
        return Counter(entry.parent.id for entry in self.store.list() if entry.parent is not None)

    def describe(
        self, entry: Manifest | BrokenContext, resident: set[str], children: Counter[str]
    ) -> context_pb2.Context:
        """A context of the store as the API shows it; `resident` are the ids in memory, `children` as above."""
        if isinstance(entry, BrokenContext):
            return self._describe_broken(entry)
        try:
            base = Ground.of(self.store, entry).base
        except SparseKVError as error:
            return self._describe_broken(BrokenContext(entry.id, error))
        tuned, problem = None, ""
        try:
            tuned = self.tuned_default(base.id)
        except SparseKVError as error:
            problem = self.paths.hide(error.message)
        return describe_context(
            base,
            tuned,
            problem,
            expired=self.store.expired(entry),
            resident=base.id in resident,
            placement=self.arena.placement(base),
            child=entry if entry.parent is not None else None,
            children=children[entry.id],
        )

    def _describe_broken(self, entry: BrokenContext) -> context_pb2.Context:
        broken = describe_broken(entry)
        broken.state_message = self.paths.hide(broken.state_message)
        return broken

    def tuned_default(self, id_: str) -> TunedDefault | None:
        """What the context was tuned to, if it was. Raises TunedDefaultError where that cannot be known any more."""
        return self.store.default_method(id_)


class BackendSlot:
    """Holds the backend once it is loaded; until then every call is told to come back later."""

    def __init__(self) -> None:
        self._backend: ServiceBackend | None = None

    def fill(self, backend: ServiceBackend) -> None:
        """From here on calls are served."""
        self._backend = backend

    def get(self) -> ServiceBackend:
        """Raises NotReadyError while there is none."""
        if self._backend is None:
            raise NotReadyError("the server is loading its model; try again in a moment")
        return self._backend
