"""The memory in which contexts sit while they are served: one byte budget, shared by all sessions.

A context is loaded once however many ask for it, stays while anyone holds a lease on it, and is dropped when its
bytes are needed for another: the one unused for longest first.

Those who wait for memory stand in a line. Others may pass them, since their contexts are here or fit, but at most
MAX_PASSED times; after that whoever would wait for memory waits behind them, even for a context that is here. Else a
flood of requests on one context would renew its leases for ever, and another context would never be loaded.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from index_store.catalog import Store
from index_store.context import IndexKinds, ResidentContext
from index_store.context_loading import LoadedContext, load_context, resident_bytes
from index_store.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    MemoryBudgetError,
    StoreError,
)
from index_store.host_memory import PageLocker, default_page_locker
from index_store.manifest import Manifest

MAX_PASSED = 8
"""How many leases others get before one who waits for memory."""

_CHECK_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """What the arena holds now, and what it did so far.

    used_bytes includes contexts that are being loaded; leased_bytes is the part that cannot be evicted now.
    """

    budget_bytes: int
    used_bytes: int
    leased_bytes: int
    page_locked_bytes: int
    contexts: int
    leases: int
    loads: int
    hits: int
    evictions: int


@dataclass(slots=True, eq=False)
class _Slot:
    """One context's place: reserved first, filled by the thread that reserved it."""

    id: str
    nbytes: int
    leases: int = 1
    loaded: LoadedContext | None = None
    error: Exception | None = None
    drop_when_free: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """One who waits for `needed` bytes. passed: leases that others got meanwhile who came later, or do not wait."""

    needed: int
    passed: int = 0


class Arena:
    """Contexts in memory within a byte budget. Safe to use from several threads."""

    def __init__(
        self,
        budget_bytes: int,
        locker: PageLocker | None = None,
        kinds: IndexKinds | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`locker` page-locks what was loaded (CUDA's where there is a GPU); `kinds` are the index classes.

        device: whose memory holds the contexts and is budgeted; None for host memory, which alone is page-locked.
        """
        if budget_bytes <= 0:
            raise InvalidArgumentError(f"the memory budget must be positive, got {budget_bytes} bytes")
        self._budget = budget_bytes
        self._locker = default_page_locker() if locker is None and device is None else locker
        self._kinds = kinds
        self._device = device
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
    ) -> Iterator[ResidentContext]:
        """Leases a context, loading and verifying it if it is not here; it stays in memory inside the block.

        Threads that ask for one context while it is loaded wait for that one load, and share its error; other
        contexts are not held up. With `wait_for_memory` a context that does not fit beside the leased ones waits
        until it does, and any context behind those that were passed too often (see the module); one that never will
        fit is refused at once. A thread that holds a lease must not wait so for another one.

        check: called before a wait and then every 50 ms, with the arena locked; what it raises ends the wait. It is
            called once more after a load, which is never broken off: others may be waiting for it.
        Raises what `Store.open` and `check` raise, or MemoryBudgetError when the context does not fit.
        """
        manifest = self._current_manifest(store, id_)
        slot = self._lease(store, manifest, check, wait_for_memory)
        try:
            check()
            if slot.loaded is None:
                raise StoreError(f"context {id_} was released while it was leased")
            yield slot.loaded.resident
        finally:
            self._return(slot)

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

    def clear(self) -> None:
        """Drops every context: those in use when their last lease ends."""
        for id_ in self.ids():
            self.drop(id_)

    def ids(self) -> list[str]:
        """Ids of the contexts in memory, least recently used first."""
        with self._changed:
            return [slot.id for slot in self._slots.values() if slot.loaded is not None]

    def stats(self) -> ArenaStats:
        """The present state, consistent in itself."""
        with self._changed:
            slots = list(self._slots.values())
            return ArenaStats(
                budget_bytes=self._budget,
                used_bytes=sum(slot.nbytes for slot in slots),
                leased_bytes=sum(slot.nbytes for slot in slots if slot.leases),
                page_locked_bytes=sum(
                    slot.nbytes for slot in slots if slot.loaded and slot.loaded.block.locked
                ),
                contexts=sum(slot.loaded is not None for slot in slots),
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

    def _lease(
        self, store: Store, manifest: Manifest, check: Callable[[], None], wait_for_memory: bool
    ) -> _Slot:
        needed = resident_bytes(manifest, self._device)
        with self._changed:
            place = self._wait_for_turn(manifest.id, needed, check) if wait_for_memory else len(self._waiting)
            slot = self._slots.get(manifest.id)
            victims = [] if slot is not None else self._make_room(needed)
            for waiter in list(self._waiting)[:place]:
                waiter.passed += 1
            if slot is not None:
                return self._join(slot, check)
            slot = _Slot(manifest.id, needed)
            self._slots[slot.id] = slot
        try:
            for victim in victims:
                self._release(victim)
            with store.open(slot.id) as context:
                loaded = load_context(context, self._locker, self._kinds, self._device)
        except BaseException as error:
            interrupted = StoreError(f"loading context {slot.id} was interrupted; ask again")
            with self._changed:
                slot.error = error if isinstance(error, Exception) else interrupted
                del self._slots[slot.id]
                self._changed.notify_all()
            raise
        with self._changed:
            slot.loaded = loaded
            self._loads += 1
            self._changed.notify_all()
        return slot

    def _wait_for_turn(self, id_: str, needed: int, check: Callable[[], None]) -> int:
        """Waits until the context is here or fits, and it is one's turn. Called with the lock held.

        Returns how many wait on who came earlier: they are passed. What can never fit does not wait.
        """
        waiter = _Waiter(needed)
        self._waiting.append(waiter)
        try:
            while True:
                place = self._waiting.index(waiter)
                here = id_ in self._slots
                if self._may_enter(place, here, needed) or not (here or needed <= self._budget):
                    return place
                self._wait(check)
        finally:
            self._waiting.remove(waiter)
            self._changed.notify_all()

    def _may_enter(self, place: int, here: bool, needed: int) -> bool:
        """Whether it is the turn of who has this place in the line, and the context is here or fits."""
        earlier = list(self._waiting)[:place]
        if earlier and earlier[0].passed >= MAX_PASSED:
            return False
        return here or (self._fits(needed) and not any(self._fits(other.needed) for other in earlier))

    def _wait(self, check: Callable[[], None]) -> None:
        """Waits for a change, or for a while. Called with the lock held."""
        check()
        self._changed.wait(_CHECK_INTERVAL_S)

    def _join(self, slot: _Slot, check: Callable[[], None]) -> _Slot:
        """Takes part in a slot that exists, waiting until it is filled. Called with the lock held."""
        slot.leases += 1
        slot.drop_when_free = False
        self._slots.move_to_end(slot.id)
        try:
            while slot.loaded is None and slot.error is None:
                self._wait(check)
        except BaseException:
            slot.leases -= 1
            raise
        if slot.error is not None:
            # A copy: every thread gets a traceback of its own.
            raise copy.copy(slot.error) from slot.error
        self._hits += 1
        return slot

    def _return(self, slot: _Slot) -> None:
        with self._changed:
            slot.leases -= 1
            self._slots.move_to_end(slot.id)
            self._changed.notify_all()
            if slot.leases or not slot.drop_when_free:
                return
            del self._slots[slot.id]
        self._release(slot)

    def _leased(self) -> int:
        return sum(slot.nbytes for slot in self._slots.values() if slot.leases)

    def _fits(self, needed: int) -> bool:
        return self._leased() + needed <= self._budget

    def _make_room(self, needed: int) -> list[_Slot]:
        """Takes out slots until `needed` bytes fit; returns them, to be released outside the lock.

        Takes nothing out when it would not suffice: raises MemoryBudgetError instead.
        """
        used = sum(slot.nbytes for slot in self._slots.values())
        leased = self._leased()
        if leased + needed > self._budget:
            beside = f" beside {leased} bytes in use by other contexts" if leased else ""
            raise MemoryBudgetError(
                f"the context needs {needed} bytes of memory, which do not fit into the budget of {self._budget} "
                f"bytes{beside}; raise --memory" + (" or try again later" if needed <= self._budget else ""),
                needed=needed,
                budget=self._budget,
                in_use=leased,
            )
        victims = []
        for slot in [slot for slot in self._slots.values() if not slot.leases]:
            if used + needed <= self._budget:
                break
            del self._slots[slot.id]
            used -= slot.nbytes
            victims.append(slot)
        self._evictions += len(victims)
        return victims

    @staticmethod
    def _release(slot: _Slot) -> None:
        if slot.loaded is not None:
            slot.loaded.release()
