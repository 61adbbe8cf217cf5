"""The memory in which contexts sit while they are served: byte budgets of host and device, shared by all sessions.

A context is loaded once however many ask for it, stays while anyone holds a lease on it, and is dropped when its
bytes are needed for another: the one unused for longest first. Who asks to be let in early gets a lease as soon as
memory is reserved, and waits for layers where it needs them; loading ends with the last lease.

Those who wait for memory stand in a line. Others may pass them, since their contexts are here or fit, but at most
MAX_PASSED times; after that whoever would wait for memory waits behind them, even for a context that is here. Else a
flood of requests on one context would renew its leases for ever, and another context would never be loaded.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from index_store.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    MemoryBudgetError,
    StoreError,
)
from index_store.memory.context_loading import LoadedContext, choose_placement, placed_bytes, start_loading
from index_store.memory.host_memory import PageLocker, default_page_locker
from index_store.memory.patience import Patience, note_passed
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import IndexKinds, ResidentContext
from index_store.store.catalog import Store
from index_store.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What the arena holds now, and what it did so far.

    used includes contexts that are being loaded; leased is the part that cannot be evicted now. contexts: those that
    are wholly there.
    """

    budget: MemoryBytes
    used: MemoryBytes
    leased: MemoryBytes
    page_locked_bytes: int
    contexts: int
    leases: int
    loads: int
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


_CHECK_INTERVAL_S = 0.05


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Slot:
    """One context's place: reserved first, filled by the thread that loads it.

    complete: every layer is there. A slot that is not, or that has an error, is dropped with its last lease.
    """

    id: str
    needed: MemoryBytes
    placement: Placement
    leases: int = 1
    loaded: LoadedContext | None = None
    complete: bool = False
    error: Exception | None = None
    drop_when_free: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """One who waits for `needed` bytes, and is passed by leases of those who came later, or do not wait."""

    needed: MemoryBytes
    patience: Patience = field(default_factory=Patience)


class Arena:
    """Contexts in memory within byte budgets. Safe to use from several threads."""

    def __init__(
        self,
        budget: int | MemoryBytes,
        locker: PageLocker | None = None,
        kinds: IndexKinds | None = None,
        device: torch.device | None = None,
        placement: Placement | None = None,
        lanes: int = 1,
    ) -> None:
        """`locker` page-locks host memory (CUDA's where there is a GPU); `kinds` are the index classes.

        budget: bytes of host and device memory; a number is the budget of the memory that the device computes in.
        device: what computes, where that is not the CPU; None for the CPU, in whose memory everything is then.
        placement: of every context; None for in device memory what fits into its budget, else hybrid, and host what has
            indexes that fit only without those which the host can search.
        lanes: see `placed_bytes`.
        """
        if isinstance(budget, int):
            budget = MemoryBytes(host=budget) if device is None else MemoryBytes(device=budget)
        if min(budget.host, budget.device) < 0 or budget.total == 0:
            raise InvalidArgumentError(f"the memory budget must be positive, got {budget.total} bytes")
        if placement is not None and placement.kv_on_host and device is None:
            raise InvalidArgumentError(
                f"placement {placement.value} keeps indexes in memory of a GPU, and the CPU computes here; use auto or "
                "device",
                field="placement",
            )
        self._budget = budget
        self._locker = default_page_locker(device) if locker is None else locker
        self._kinds = kinds
        self._device = device
        self._placement = placement
        self._lanes = lanes
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # least recently used first
        self._waiting: deque[_Waiter] = deque()  # first come first
        self._changed = threading.Condition()
        self._loads = self._hits = self._evictions = 0

    @contextmanager
    def acquire(
        self,
        store: Store,
        id_: str,
        *,
        check: Callable[[], None] = lambda: None,
        wait_for_memory: bool = False,
        early: bool = False,
    ) -> Iterator[ResidentContext]:
        """Leases a context, loading and verifying it if it is not here; it stays in memory inside the block.

        Threads that ask for one context while it is loaded wait for that one load, and share its error; other
        contexts are not held up. With `wait_for_memory` a context that does not fit beside the leased ones waits
        until it does, and any context behind those that were passed too often (see the module); one that never will
        fit is refused at once. A thread that holds a lease must not wait so for another one.

        check: called before a wait and then every 50 ms, with the arena locked; what it raises ends the wait. It is
            called once more after a load, which who began it never breaks off: others may be waiting for it.
        early: the lease is granted once memory is reserved. The context then makes whoever asks for a layer wait until
            it is there, and raises there what loading raised. Who asks for the context after that gets the error here,
            until the last lease has ended and it can be loaded anew.
        Raises what `Store.open` and `check` raise, or MemoryBudgetError when the context does not fit.
        """
        manifest = self._current_manifest(store, id_)
        slot, victims = self._enter(manifest, check, wait_for_memory)
        try:
            if victims is None:
                self._await(slot, check, early)
                with self._changed:
                    self._hits += 1
            else:
                self._begin_loading(store, slot, victims)
                if not early:
                    self._await(slot, lambda: None, early)
            check()
            if slot.loaded is None:
                raise StoreError(f"context {id_} was released while it was leased")
            yield slot.loaded.resident
        finally:
            self._return(slot)

    def placement(self, manifest: Manifest) -> Placement:
        """Where the context is, or would be put."""
        with self._changed:
            slot = self._slots.get(manifest.id)
        return self._choose(manifest)[0] if slot is None else slot.placement

    def drop(self, id_: str) -> bool:
        """Frees a context's memory: now (True), or when its last lease ends (False). Nothing happens if absent."""
        with self._changed:
            slot = self._slots.get(id_)
            if slot is None:
                return False
            if slot.leases:
                slot.drop_when_free = True
                return False
            del self._slots[id_]
        self._release(slot)
        return True

    def stop_loading(self) -> None:
        """Ends all loading soon; who waits for layers gets an error."""
        with self._changed:
            loading = [slot.loaded for slot in self._slots.values() if slot.loaded and not slot.complete]
        for loaded in loading:
            loaded.stop()

    def clear(self) -> None:
        """Drops every context: those in use when their last lease ends."""
        for id_ in self.ids():
            self.drop(id_)

    def ids(self) -> list[str]:
        """Ids of the contexts that are wholly in memory, least recently used first."""
        with self._changed:
            return [slot.id for slot in self._slots.values() if slot.complete]

    def stats(self) -> ArenaStats:
        """The present state, consistent in itself."""
        with self._changed:
            slots = list(self._slots.values())
            return ArenaStats(
                budget=self._budget,
                used=_sum(slots),
                leased=self._leased(),
                page_locked_bytes=sum(slot.loaded.locked_bytes for slot in slots if slot.loaded),
                contexts=sum(slot.complete for slot in slots),
                leases=sum(slot.leases for slot in slots),
                loads=self._loads,
                hits=self._hits,
                evictions=self._evictions,
            )

    def _current_manifest(self, store: Store, id_: str) -> Manifest:
        """The manifest as stored now: what was deleted or has expired is not served from memory either."""
        try:
            manifest = store.manifest(id_)
            store.check_expiry(manifest)
        except (ContextNotFoundError, ContextExpiredError):
            self.drop(id_)
            raise
        return manifest

    def _choose(self, manifest: Manifest) -> tuple[Placement, MemoryBytes, str]:
        """Where a context goes, how many bytes that takes, and why."""
        placement, why = self._placement, "as told"
        if self._device is None:
            placement, why = Placement.DEVICE, "the CPU computes"
        elif placement is None:
            placement, why = choose_placement(manifest, self._device, self._budget.device, self._lanes)
        return placement, placed_bytes(manifest, self._device, placement, self._lanes), why

    def _enter(
        self, manifest: Manifest, check: Callable[[], None], wait_for_memory: bool
    ) -> tuple[_Slot, list[_Slot] | None]:
        """Takes a lease on a slot. Where it is new the caller must release the slots that come with it, and load."""
        placement, needed, why = self._choose(manifest)
        with self._changed:
            place = self._wait_for_turn(manifest.id, needed, check) if wait_for_memory else len(self._waiting)
            slot = self._slots.get(manifest.id)
            victims = [] if slot is not None else self._make_room(needed)
            note_passed(waiter.patience for waiter in list(self._waiting)[:place])
            if slot is not None:
                slot.leases += 1
                slot.drop_when_free = False
                self._slots.move_to_end(slot.id)
                return slot, None
            slot = _Slot(manifest.id, needed, placement)
            self._slots[slot.id] = slot
        if self._device is not None:
            logger.info(
                "context %s goes to placement %s: %s; host %d bytes, device %d",
                slot.id[:12],
                placement.value,
                why,
                needed.host,
                needed.device,
            )
        return slot, victims

    def _begin_loading(self, store: Store, slot: _Slot, victims: Sequence[_Slot]) -> None:
        """Begins to load what has a place, when others have left theirs."""
        try:
            for victim in victims:
                self._release(victim)
            loaded = start_loading(
                store.open(slot.id),
                self._locker,
                self._kinds,
                self._device,
                slot.placement,
                partial(self._end_loading, slot),
            )
        except BaseException as error:
            interrupted = StoreError(f"loading context {slot.id} was interrupted; ask again")
            with self._changed:
                slot.error = error if isinstance(error, Exception) else interrupted
                self._changed.notify_all()
            raise
        with self._changed:
            slot.loaded = loaded
            self._changed.notify_all()

    def _end_loading(self, slot: _Slot, error: Exception | None) -> None:
        """Called by the thread that loaded the slot's context."""
        with self._changed:
            slot.error = error
            if error is None:
                slot.complete = True
                self._loads += 1
            self._changed.notify_all()

    def _await(self, slot: _Slot, check: Callable[[], None], early: bool) -> None:
        """Waits until the slot is filled, or with `early` until there is something to wait for in it."""
        with self._changed:
            while slot.error is None and (slot.loaded is None or not (early or slot.complete)):
                self._wait(check)
            error = slot.error
        if error is not None:
            # A copy: every thread gets a traceback of its own.
            raise copy.copy(error) from error
        if not early and slot.loaded is not None:
            slot.loaded.join()  # its thread has nothing left to do, and then holds no memory

    def _wait_for_turn(self, id_: str, needed: MemoryBytes, check: Callable[[], None]) -> int:
        """Waits until the context is here or fits, and it is one's turn. Called with the lock held.

        Returns how many wait on who came earlier: they are passed. What can never fit does not wait.
        """
        waiter = _Waiter(needed)
        self._waiting.append(waiter)
        try:
            while True:
                place = self._waiting.index(waiter)
                here = id_ in self._slots
                if self._may_enter(place, here, needed) or not (here or needed.fits(self._budget)):
                    return place
                self._wait(check)
        finally:
            self._waiting.remove(waiter)
            self._changed.notify_all()

    def _may_enter(self, place: int, here: bool, needed: MemoryBytes) -> bool:
        """Whether it is the turn of who has this place in the line, and the context is here or fits."""
        earlier = list(self._waiting)[:place]
        if earlier and earlier[0].patience.ended:
            return False
        return here or (self._fits(needed) and not any(self._fits(other.needed) for other in earlier))

    def _wait(self, check: Callable[[], None]) -> None:
        """Waits for a change, or for a while. Called with the lock held."""
        check()
        self._changed.wait(_CHECK_INTERVAL_S)

    def _return(self, slot: _Slot) -> None:
        with self._changed:
            slot.leases -= 1
            self._slots.move_to_end(slot.id)
            self._changed.notify_all()
            if slot.leases or (slot.complete and not slot.drop_when_free):
                return
            del self._slots[slot.id]
        self._release(slot)

    def _leased(self) -> MemoryBytes:
        return _sum([slot for slot in self._slots.values() if slot.leases])

    def _fits(self, needed: MemoryBytes) -> bool:
        return (self._leased() + needed).fits(self._budget)

    def _make_room(self, needed: MemoryBytes) -> list[_Slot]:
        """Takes out slots until `needed` bytes fit; returns them, to be released outside the lock.

        Takes nothing out when it would not suffice: raises MemoryBudgetError instead.
        """
        if not self._fits(needed):
            raise self._refusal(needed)
        used = _sum(self._slots.values()) + needed
        victims = []
        for slot in [slot for slot in self._slots.values() if not slot.leases]:
            if used.fits(self._budget):
                break
            lacks_host, lacks_device = used.host > self._budget.host, used.device > self._budget.device
            if (lacks_host and slot.needed.host) or (lacks_device and slot.needed.device):
                del self._slots[slot.id]
                used = MemoryBytes(used.host - slot.needed.host, used.device - slot.needed.device)
                victims.append(slot)
        self._evictions += len(victims)
        return victims

    def _refusal(self, needed: MemoryBytes) -> MemoryBudgetError:
        """Names the memory that is too small."""
        leased = self._leased()
        in_host = needed.host + leased.host > self._budget.host
        kind, flag = ("", "--memory") if in_host else ("device ", "--device-memory")
        wanted, budget, in_use = (
            (memory.host if in_host else memory.device) for memory in (needed, self._budget, leased)
        )
        beside = f" beside {in_use} bytes in use by other contexts" if in_use else ""
        return MemoryBudgetError(
            f"the context needs {wanted} bytes of {kind}memory, which do not fit into the budget of {budget} "
            f"bytes{beside}; raise {flag}" + (" or try again later" if wanted <= budget else ""),
            needed=wanted,
            budget=budget,
            in_use=in_use,
        )

    @staticmethod
    def _release(slot: _Slot) -> None:
        if slot.loaded is not None:
            slot.loaded.release()


def _sum(slots: Iterable[_Slot]) -> MemoryBytes:
    return sum((slot.needed for slot in slots), MemoryBytes())
