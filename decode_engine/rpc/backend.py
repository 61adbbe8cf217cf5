"""What the services serve from, and what stands in for it while the model is being loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_engine.engine.engine import Engine
from decode_engine.errors import NotReadyError
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc.describe import describe_broken, describe_context
from decode_engine.rpc.transport.status import Paths
from index_store.errors import SparseKVError
from index_store.memory.arena import Arena
from index_store.store.catalog import BrokenContext, Store
from index_store.store.manifest import Manifest
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import context_pb2


@dataclass(frozen=True, slots=True)
class ServiceBackend:
    """What the services serve from. paths: what no client is told."""

    store: Store
    arena: Arena
    runner: ModelRunner
    engine: Engine[Session]
    paths: Paths = field(default_factory=Paths)

    def servable(self, id_: str) -> Manifest:
        """The manifest of a context that can be decoded against by the loaded model.

        Raises what `Store.manifest` raises, ContextExpiredError, ModelMismatchError or DtypeMismatchError.
        """
        manifest = self.store.manifest(id_)
        self.store.check_expiry(manifest)
        self.runner.check(manifest)
        return manifest

    def describe(self, entry: Manifest | BrokenContext, resident: set[str]) -> context_pb2.Context:
        """A context of the store as the API shows it; `resident` are the ids in memory."""
        if isinstance(entry, BrokenContext):
            broken = describe_broken(entry)
            broken.state_message = self.paths.hide(broken.state_message)
            return broken
        tuned, problem = None, ""
        try:
            tuned = self.tuned_default(entry.id)
        except SparseKVError as error:
            problem = self.paths.hide(error.message)
        return describe_context(
            entry,
            tuned,
            problem,
            expired=self.store.expired(entry),
            resident=entry.id in resident,
            placement=self.arena.placement(entry),
        )

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
