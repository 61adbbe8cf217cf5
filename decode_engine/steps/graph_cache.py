"""Captured steps that are kept: as many as memory was set aside for, those used longest ago dropped first."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from index_store.errors import format_bytes

logger = logging.getLogger(__name__)


class Kept(Protocol):
    """What is kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it holds; may grow."""


KeptT = TypeVar("KeptT", bound=Kept)
MadeT = TypeVar("MadeT")


class GraphCache(Generic[KeptT]):
    """Graphs by key. Those of the present turn of `begin_turn`, and of the one before, are in use and never dropped."""

    def __init__(self, limit_bytes: int | None = None, most: int = 48) -> None:
        """limit_bytes: of all graphs together, while others than those in use can be dropped; None has no bound."""
        self._limit_bytes = limit_bytes
        self._most = most
        self._graphs: OrderedDict[Hashable, tuple[KeptT, int]] = (
            OrderedDict()
        )  # with the turn of its last use
        self._turn = 0
        self.alone = Lock()
        """Held while a graph is captured, by whichever thread: nobody may give memory back then."""

    def __contains__(self, key: Hashable) -> bool:
        """Whether a graph of that key is kept; for any thread."""
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Bytes that all graphs hold."""
        return sum(graph.nbytes for graph, _ in self._graphs.values())

    def graphs(self) -> Sequence[KeptT]:
        """All of them, the one used longest ago first."""
        return [graph for graph, _ in self._graphs.values()]

    def begin_turn(self) -> None:
        """From here on graphs are used for another step."""
        self._turn += 1

    def find(self, key: Hashable) -> KeptT | None:
        """The graph of that key, which is used now."""
        found = self._graphs.pop(key, None)
        if found is None:
            return None
        self._graphs[key] = (found[0], self._turn)
        return found[0]

    def add(self, key: Hashable, graph: KeptT) -> None:
        """Keeps a graph that is used now."""
        self._graphs[key] = (graph, self._turn)
        self.trim()

    def trim(self) -> None:
        """Drops idle graphs until the others hold no more than they may."""
        while len(self._graphs) > self._most or (
            self._limit_bytes is not None and self.nbytes > self._limit_bytes
        ):
            if not self.drop_idle():
                return

    def drop_idle(self) -> bool:
        """Drops the graph that was used longest ago, if that is not in use. Returns whether it did."""
        key, (graph, turn) = next(iter(self._graphs.items()), (None, (None, 0)))
        if graph is None or turn > self._turn - 2:
            return False
        del self._graphs[key]
        logger.info(
            "captured steps of %s are dropped: they were not used for longest", format_bytes(graph.nbytes)
        )
        return True

    def with_room(self, make: Callable[[], MadeT], *, drop: bool = True) -> MadeT:
        """What `make` returns; when memory runs out, it is called again, after idle graphs were dropped, one by one.

        At first only what the allocator keeps for later is given back, which a capture cannot take by itself.
        drop: False drops nothing, and is for any thread. Raises torch.OutOfMemoryError when none is left to drop.
        """
        given_back = False
        while True:
            try:
                return make()
            except torch.OutOfMemoryError:
                if given_back and not (drop and self.drop_idle()):
                    raise
            given_back = True
            gc.collect()  # of what failed, and of what was dropped, nothing may stay
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                with self.alone:
                    torch.cuda.empty_cache()


class AllocationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, notes what operators make on a device, in this thread: others may load contexts meanwhile."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self._made: list[ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == self._type:
            self._made.append(ref(out))
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of what was made and is still there."""
        storages = [tensor.untyped_storage() for made in self._made if (tensor := made()) is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
