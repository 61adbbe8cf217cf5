"""The memory in which contexts sit while they are served: byte budgets of host and device, shared by all sessions.

A context is loaded once however many ask for it, stays while anyone holds a lease on it, and is dropped when its
bytes are needed for another: the one unused for longest first, and pinned ones last. Who asks to be let in early gets a
lease as soon as memory is reserved, and waits for layers where it needs them; loading ends with the last lease.

Those who wait for memory stand in a line. Others may pass them, since their contexts are here or fit, but at most
MAX_PASSED times; after that whoever would wait for memory waits behind them, even for a context that is here. Else a
flood of requests on one context would renew its leases for ever, and another context would never be loaded.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from index_store.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    MemoryBudgetError,
    QuotaExceededError,
    StoreError,
    format_bytes,
)
from index_store.memory.context_loading import LoadedContext, choose_placement, placed_bytes, start_loading
from index_store.memory.host_memory import PageLocker, default_page_locker
from index_store.memory.patience import Patience, note_passed
from index_store.memory.placement import SLOT_SHARE, MemoryBytes, Placement
from index_store.memory.resident import IndexKinds, ResidentContext
from index_store.store.catalog import Store
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import Manifest
from index_store.store.heads_part import HeadsPart

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
        return _sum(slot for slot in (*self, *self._leaving) if slot.holds)

    def fits(self, needed: MemoryBytes) -> bool:
        """Whether there is room for so many bytes, with all evicted that nobody uses."""
        return (self.leased() + needed).fits(self.budget)

    def of_tenant(self, tenant: str) -> list[Slot]:
        return [slot for slot in self if slot.manifest.tenant == tenant]

    def check_quota(self, needed: MemoryBytes, tenant: str, quota: int | None) -> None:
        """Raises QuotaExceededError where so many bytes do not fit beside those of the tenant that are in use."""
        used = _sum(slot for slot in self.of_tenant(tenant) if slot.leases).total
        if quota is not None and used + needed.total > quota:
            retry_s = _SOON_S if needed.total <= quota else None
            raise QuotaExceededError.of("resident_bytes", used, needed.total, quota, retry_s)

    def make_quota_room(self, needed: MemoryBytes, tenant: str, quota: int | None) -> list[Slot]:
        """Takes out slots of a tenant until `needed` bytes fit into its quota, pinned ones last."""
        own, victims = self.of_tenant(tenant), []
        used = _sum(own).total + needed.total
        for slot in _unused(own):
            if quota is None or used <= quota:
                break
            self.take_out(slot)
            used -= slot.needed.total
            victims.append(slot)
        return victims

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
        for slot in _unused(self):
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

    def _stuck(self) -> MemoryBytes:
        return _sum(slot for slot in self._leaving if slot.stuck)


def _key(manifest: Manifest) -> _Key:
    """Which bytes are loaded. Another name or expiry makes no difference."""
    return manifest.id, manifest.arrays


def _unused(slots: Iterable[Slot]) -> list[Slot]:
    """Those that nobody holds a lease on, in the order in which they go: pinned ones last."""
    return sorted((slot for slot in slots if not slot.leases), key=lambda slot: slot.pinned)


def _sum(slots: Iterable[Slot]) -> MemoryBytes:
    return sum((slot.needed for slot in slots), MemoryBytes())


_CHECK_INTERVAL_S = 0.05
_SOON_S = 1.0

logger = logging.getLogger(__name__)


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
        slot_share: int = SLOT_SHARE,
        quota: Callable[[str], int | None] = lambda tenant: None,
        part: HeadsPart | None = None,
    ) -> None:
        """`locker` page-locks host memory (CUDA's where there is a GPU); `kinds` are the index classes.

        budget: bytes of host and device memory; a number is the budget of the memory that the device computes in.
        device: what computes, where that is not the CPU; None for the CPU, in whose memory everything is then.
        placement: of every context; None for in device memory what fits into its budget, else hybrid, and host what has
            indexes that fit only without those which the host can search.
        slot_share: see `slots_per_head`; slots count into the device's budget.
        quota: most bytes of both memories that a tenant's contexts may take. part: what is loaded of every context.
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
        self._books = Books(budget)
        self._locker = default_page_locker(device) if locker is None else locker
        self._kinds = kinds
        self._device = device
        self._placement = placement
        self._slot_share = slot_share
        self._quota = quota
        self._part = part or HeadsPart()
        self._waiting: deque[_Waiter] = deque()  # first come first
        self._changed = threading.Condition()
        self._loads = self._loaded_bytes = self._hits = self._evictions = 0

    @contextmanager
    def acquire(
        self,
        store: Store,
        id_: str,
        *,
        check: Callable[[], None] = lambda: None,
        wait_for_memory: bool = False,
        early: bool = False,
        expired: bool = False,
        manifest: Manifest | None = None,
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
        expired: also where its time to live has passed: its children need it as long as they live.
        manifest: the context's, where the caller has just read and judged it; None reads it here.
        Raises what `Store.open` and `check` raise, or MemoryBudgetError or QuotaExceededError when the context does not
        fit.
        """
        if manifest is None:
            manifest = self._current_manifest(store, id_, expired)
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
            slot = self._books.find(manifest)
        return self._choose(manifest)[0] if slot is None else slot.placement

    def held_by_tenant(self) -> Mapping[str, int]:
        """Bytes of both memories that contexts of each tenant take."""
        held: Counter[str] = Counter()
        with self._changed:
            for slot in self._books:
                held[slot.manifest.tenant] += slot.needed.total
        return held

    def may_hold(self, manifest: Manifest) -> bool:
        """Whether the context fits into the budget, with everything else evicted."""
        return self._choose(manifest)[1].fits(self._books.budget)

    def ready(self, manifest: Manifest) -> bool:
        """Whether the context is wholly in memory, and who asks for it need not wait behind others."""
        with self._changed:
            slot = self._books.find(manifest)
            return slot is not None and slot.complete and not self._waiting

    def tier(self, manifest: Manifest) -> Literal["device", "host", "disk"]:
        """Where its keys and values are: in memory of a device or of the host, or not wholly in memory yet."""
        with self._changed:
            slot = self._books.find(manifest)
            if slot is None or not slot.complete:
                return "disk"
        return "host" if self._device is None or slot.placement.kv_on_host else "device"

    def in_use(self, id_: str) -> bool:
        """Whether anybody holds a lease on the context."""
        with self._changed:
            return any(slot.leases for slot in self._books.all_of(id_))

    def note(self, manifest: Manifest) -> None:
        """Learns that a context was pinned or unpinned, if it is here."""
        with self._changed:
            for slot in self._books.all_of(manifest.id):
                slot.pinned = manifest.pinned

    def drop(self, id_: str) -> bool:
        """Frees a context's memory: now (True), or when its last lease ends (False). Nothing happens if absent."""
        with self._changed:
            slots = self._books.all_of(id_)
            unused = [slot for slot in slots if not slot.leases]
            for slot in slots:
                slot.drop_when_free = True
            for slot in unused:
                self._books.take_out(slot)
        for slot in unused:
            self._free(slot)
        return bool(unused) and len(unused) == len(slots)

    def stop_loading(self) -> None:
        """Ends all loading soon; who waits for layers gets an error."""
        with self._changed:
            loading = [slot for slot in self._books if not slot.complete]
            for slot in loading:
                slot.cancelled = True
                if slot.loaded is not None:
                    slot.loaded.stop()
            self._changed.notify_all()

    def clear(self) -> None:
        """Drops every context: those in use when their last lease ends."""
        for id_ in self.ids():
            self.drop(id_)

    def ids(self) -> list[str]:
        """Ids of the contexts that are wholly in memory, least recently used first."""
        with self._changed:
            return list(dict.fromkeys(slot.id for slot in self._books if slot.complete))

    def leased_ids(self) -> list[str]:
        """Ids of the contexts that somebody uses now."""
        with self._changed:
            return list(dict.fromkeys(slot.id for slot in self._books if slot.leases))

    def stats(self) -> ArenaStats:
        """The present state, consistent in itself."""
        with self._changed:
            books = self._books
            return ArenaStats(
                budget=books.budget,
                used=books.held(),
                leased=books.leased(),
                page_locked_bytes=books.page_locked_bytes,
                contexts=sum(slot.complete for slot in books),
                leases=sum(slot.leases for slot in books),
                loads=self._loads,
                loaded_bytes=self._loaded_bytes,
                hits=self._hits,
                evictions=self._evictions,
            )

    def _current_manifest(self, store: Store, id_: str, expired: bool) -> Manifest:
        """The manifest as stored now: what was deleted or has expired is not served from memory either."""
        try:
            manifest = store.manifest(id_)
            if not expired:
                store.check_expiry(manifest)
        except (ContextNotFoundError, ContextExpiredError):
            self.drop(id_)
            raise
        if manifest.parent is not None:
            raise InvalidArgumentError(
                f"context {id_} continues context {manifest.parent.id}, which has the indexes; name that one here",
                context=id_,
                parent=manifest.parent.id,
            )
        return manifest

    def _choose(self, manifest: Manifest) -> tuple[Placement, MemoryBytes, str]:
        """Where a context goes, how many bytes that takes, and why."""
        manifest = self._part.manifest(manifest)
        placement, why = self._placement, "as told"
        if self._device is None:
            placement, why = Placement.DEVICE, "the CPU computes"
        elif placement is None:
            placement, why = choose_placement(
                manifest, self._device, self._books.budget.device, self._slot_share
            )
        return placement, placed_bytes(manifest, self._device, placement, self._slot_share), why

    def _enter(
        self, manifest: Manifest, check: Callable[[], None], wait_for_memory: bool
    ) -> tuple[Slot, list[Slot] | None]:
        """Takes a lease on a slot. Where it is new the caller must free the slots that come with it, and load."""
        with self._changed:
            here = self._books.find(manifest)
        placement, needed, why = (
            self._choose(manifest) if here is None else (here.placement, here.needed, "as before")
        )
        tenant, quota = manifest.tenant, None if here is not None else self._quota(manifest.tenant)
        with self._changed:
            if self._books.find(manifest) is None:
                self._books.check_quota(needed, tenant, quota)  # who is over does not wait
            place = self._wait_for_turn(manifest, needed, check) if wait_for_memory else len(self._waiting)
            slot, victims = self._books.find(manifest), []
            if slot is None:
                self._books.check_quota(needed, tenant, quota)
                victims = self._books.make_room(needed, manifest.id)
                victims += self._books.make_quota_room(needed, tenant, quota)
            note_passed(waiter.patience for waiter in list(self._waiting)[:place])
            if slot is not None:
                slot.leases += 1
                slot.drop_when_free = False
                slot.pinned = manifest.pinned
                self._books.note_use(slot)
                return slot, None
            slot = Slot(manifest, needed, placement)
            self._books.add(slot)
            self._evictions += len(victims)
        if self._device is not None:
            logger.info(
                "context %s goes to placement %s: %s; %s in host memory, %s on the device",
                slot.id[:12],
                placement.value,
                why,
                format_bytes(needed.host),
                format_bytes(needed.device),
            )
        return slot, victims

    def _begin_loading(self, store: Store, slot: Slot, victims: Sequence[Slot]) -> None:
        """Begins to load what has a place, when the memory of others is free."""
        try:
            for victim in victims:
                self._free(victim)
            self._take_memory(slot)
            loaded = start_loading(
                self._part.context(store.open(slot.id, slot.manifest, expired=True)),
                self._locker,
                self._kinds,
                self._device,
                slot.placement,
                partial(self._end_loading, store, slot),
                self._slot_share,
            )
        except BaseException as error:
            interrupted = StoreError(f"loading context {slot.id} was interrupted; ask again")
            store.mend(slot.id, error)
            with self._changed:
                slot.error = error if isinstance(error, Exception) else interrupted
                slot.holds = False
                self._changed.notify_all()
            raise
        with self._changed:
            slot.loaded = loaded
            if slot.cancelled:
                loaded.stop()
            self._changed.notify_all()

    def _take_memory(self, slot: Slot) -> None:
        """Waits until the memory that was promised is free: those who had it may take a moment to let go of it.

        Raises MemoryBudgetError where it will not be, because a read into it does not come back.
        """
        with self._changed:
            while not self._books.can_hold(slot):
                if slot.cancelled:
                    raise StoreError("the context was released before it was loaded; ask again")
                if not self._books.can_keep_promises():
                    raise self._books.refusal(slot.needed)
                self._changed.wait(_CHECK_INTERVAL_S)
            slot.holds = True

    def _end_loading(self, store: Store, slot: Slot, error: Exception | None) -> None:
        """Called by the thread that loaded the slot's context."""
        store.mend(slot.id, error)
        with self._changed:
            slot.error = error
            if error is None:
                slot.complete = True
                self._loads += 1
                self._loaded_bytes += slot.needed.total
            self._changed.notify_all()

    def _await(self, slot: Slot, check: Callable[[], None], early: bool) -> None:
        """Waits until the slot is filled, or with `early` until there is something to wait for in it."""
        with self._changed:
            while slot.error is None and (slot.loaded is None or not (early or slot.complete)):
                self._wait(check)
            error = slot.error
        if error is not None:
            # A copy: every thread gets a traceback of its own.
            raise copy.copy(error) from error

    def _wait_for_turn(self, manifest: Manifest, needed: MemoryBytes, check: Callable[[], None]) -> int:
        """Waits until the context is here or fits, and it is one's turn. Called with the lock held.

        Returns how many wait on who came earlier: they are passed. What can never fit does not wait.
        """
        waiter = _Waiter(needed)
        self._waiting.append(waiter)
        try:
            while True:
                place = self._waiting.index(waiter)
                here = self._books.find(manifest) is not None
                if self._may_enter(place, here, needed) or not (here or needed.fits(self._books.budget)):
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
        return here or (
            self._books.fits(needed) and not any(self._books.fits(other.needed) for other in earlier)
        )

    def _wait(self, check: Callable[[], None]) -> None:
        """Waits for a change, or for a while. Called with the lock held."""
        check()
        self._changed.wait(_CHECK_INTERVAL_S)

    def _return(self, slot: Slot) -> None:
        with self._changed:
            slot.leases -= 1
            self._books.note_use(slot)
            self._changed.notify_all()
            if slot.leases or (slot.complete and not slot.drop_when_free):
                return
            self._books.take_out(slot)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        """Has the memory of a slot that was taken out let go of, without waiting for reads into it."""
        if slot.loaded is None:
            self._freed(slot)
        else:
            slot.loaded.release(partial(self._freed, slot))

    def _freed(self, slot: Slot) -> None:
        with self._changed:
            self._books.note_freed(slot)
            self._changed.notify_all()
