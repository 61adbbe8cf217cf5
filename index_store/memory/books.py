"""What contexts take of the arena's memory: promised, taken, in use, on its way out.

A context that loses its place counts until its memory is free, which may take a moment, or for ever where a read into
it does not come back. Nothing here waits or locks: the arena does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from index_store.errors import MemoryBudgetError
from index_store.memory.context_loading import LoadedContext
from index_store.memory.placement import MemoryBytes, Placement
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import Manifest

_Key = tuple[str, tuple[ArrayEntry, ...]]


@dataclass(slots=True, eq=False)
class Slot:
    """One context's place: promised first, then taken, and filled by the thread that loads it.

    manifest: what is loaded. A context to which something is added later gets another place; this one stays while it
    is in use. complete: every layer is there. A slot that is not, or that has an error, is dropped with its last lease.
    holds: its memory is taken, or may be any moment. cancelled: it is not to be loaded any more.
    """

    manifest: Manifest
    needed: MemoryBytes
    placement: Placement
    leases: int = 1
    loaded: LoadedContext | None = None
    complete: bool = False
    error: Exception | None = None
    drop_when_free: bool = False
    holds: bool = False
    cancelled: bool = False
    pinned: bool = False

    def __post_init__(self) -> None:
        self.pinned = self.manifest.pinned

    @property
    def id(self) -> str:
        """The context's."""
        return self.manifest.id

    @property
    def stuck(self) -> bool:
        """Of one that is leaving: loading has failed, and something may still be read into the memory."""
        return self.holds and self.error is not None


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What the arena holds now, and what it did so far.

    used includes contexts that are being loaded or freed; leased is the part that cannot be evicted now. contexts:
    those that are wholly there. loaded_bytes: of all loads.
    """

    budget: MemoryBytes
    used: MemoryBytes
    leased: MemoryBytes
    page_locked_bytes: int
    contexts: int
    leases: int
    loads: int
    loaded_bytes: int
    hits: int
    evictions: int

    @property
    def budget_bytes(self) -> int:
        """Of both memories."""
        return self.budget.total

    @property
    def used_bytes(self) -> int:
        """Of both memories."""
        return self.used.total

    @property
    def leased_bytes(self) -> int:
        """Of both memories."""
        return self.leased.total


class Books:
    """Every context's place, the least recently used first, and how much of the budget is left."""

    def __init__(self, budget: MemoryBytes) -> None:
        self.budget = budget
        self._slots: OrderedDict[_Key, Slot] = OrderedDict()
        self._leaving: list[Slot] = []

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def find(self, manifest: Manifest) -> Slot | None:
        """The place of a context as the manifest describes it, if it has one."""
        return self._slots.get(_key(manifest))

    def all_of(self, id_: str) -> list[Slot]:
        """Every place of a context: as it is, and as it was before something was added to it."""
        return [slot for slot in self if slot.id == id_]

    def add(self, slot: Slot) -> None:
        """Gives a context a place."""
        self._slots[_key(slot.manifest)] = slot

    def note_use(self, slot: Slot) -> None:
        """Notes that a context was used last of all."""
        self._slots.move_to_end(_key(slot.manifest))

    def take_out(self, slot: Slot) -> None:
        """Takes its place from a context; its memory counts until `note_freed`."""
        del self._slots[_key(slot.manifest)]
        self._leaving.append(slot)

    def note_freed(self, slot: Slot) -> None:
        """Notes that the memory of a context that was taken out is free."""
        self._leaving.remove(slot)

    @property
    def page_locked_bytes(self) -> int:
        """Bytes of host memory whose pages are locked."""
        return sum(slot.loaded.locked_bytes for slot in (*self, *self._leaving) if slot.loaded)

    def leased(self) -> MemoryBytes:
        """What is in use, and what nobody can get back: memory that a read which hangs may still be written to."""
        return _sum(slot for slot in self if slot.leases) + self._stuck()

    def held(self) -> MemoryBytes:
        """What is taken of the memory."""
        return _sum(slot for slot in (*self, *self._leaving) if slot.holds)

    def fits(self, needed: MemoryBytes) -> bool:
        """Whether there is room for so many bytes, with all evicted that nobody uses."""
        return (self.leased() + needed).fits(self.budget)

    def make_room(self, needed: MemoryBytes, id_: str) -> list[Slot]:
        """Takes out slots until `needed` bytes fit; returns them, to be freed outside the lock.

        First goes what the context was before something was added to it: now, or with its last lease; pinned contexts
        go last. Takes nothing out when it would not suffice: raises MemoryBudgetError instead.
        """
        if not self.fits(needed):
            raise self.refusal(needed)
        victims = []
        for slot in self.all_of(id_):
            if slot.leases:
                slot.drop_when_free = True
            else:
                self.take_out(slot)
                victims.append(slot)
        used = _sum(self) + self._stuck() + needed
        for slot in sorted((slot for slot in self if not slot.leases), key=lambda slot: slot.pinned):
            if used.fits(self.budget):
                break
            lacks_host, lacks_device = used.host > self.budget.host, used.device > self.budget.device
            if (lacks_host and slot.needed.host) or (lacks_device and slot.needed.device):
                self.take_out(slot)
                used = MemoryBytes(used.host - slot.needed.host, used.device - slot.needed.device)
                victims.append(slot)
        return victims

    def refusal(self, needed: MemoryBytes) -> MemoryBudgetError:
        """Names the memory that is too small."""
        leased = self.leased()
        in_host = needed.host + leased.host > self.budget.host
        kind, flag = ("", "--memory") if in_host else ("device ", "--device-memory")
        wanted, budget, in_use = (
            (memory.host if in_host else memory.device) for memory in (needed, self.budget, leased)
        )
        beside = f" beside {in_use} bytes in use by other contexts" if in_use else ""
        return MemoryBudgetError(
            f"the context needs {wanted} bytes of {kind}memory, which do not fit into the budget of {budget} "
            f"bytes{beside}; raise {flag}" + (" or try again later" if wanted <= budget else ""),
            needed=wanted,
            budget=budget,
            in_use=in_use,
        )

    def can_hold(self, slot: Slot) -> bool:
        """Whether the memory that was promised to a context is free now."""
        return (self.held() + slot.needed).fits(self.budget)

    def can_keep_promises(self) -> bool:
        """Whether all promised memory will be free, once what is being freed is."""
        return (_sum(self) + self._stuck()).fits(self.budget)

    def stats(self, loads: int, loaded_bytes: int, hits: int, evictions: int) -> ArenaStats:
        """The present state, beside what the arena has counted."""
        return ArenaStats(
            budget=self.budget,
            used=self.held(),
            leased=self.leased(),
            page_locked_bytes=self.page_locked_bytes,
            contexts=sum(slot.complete for slot in self),
            leases=sum(slot.leases for slot in self),
            loads=loads,
            loaded_bytes=loaded_bytes,
            hits=hits,
            evictions=evictions,
        )

    def _stuck(self) -> MemoryBytes:
        return _sum(slot for slot in self._leaving if slot.stuck)


def _key(manifest: Manifest) -> _Key:
    """Which bytes are loaded. Another name or expiry makes no difference."""
    return manifest.id, manifest.arrays


def _sum(slots: Iterable[Slot]) -> MemoryBytes:
    return sum((slot.needed for slot in slots), MemoryBytes())
