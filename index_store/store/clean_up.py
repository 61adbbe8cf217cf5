"""Cleaning a store up, and room in one that has a bound.

What killed jobs, interrupted deletions and ended contexts left is found and removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path

from index_store.errors import (
    QuotaExceededError,
    SparseKVError,
    StoreBoundError,
    StoreError,
    format_bytes,
)
from index_store.store.catalog import DefaultsFolder, Store, neutral
from index_store.store.description.array_entry import kv_entry, state_entry, window_entry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest
from index_store.store.files.durable import TEMPORARY_PREFIX, TRASH_PREFIX, is_locked, locked_file, storing
from index_store.store.files.leftovers import (
    Leftover,
    dead_folders,
    free_locks,
    leftover,
    log_failure,
    remove_unlisted,
    removed,
    unlisted_arrays,
    unlisted_indexes,
)
from index_store.store.listing import BrokenContext, Entry
from index_store.store.store_folders import is_lock_name

_EVERY_S = 600.0


def find_leftovers(store: Store) -> Sequence[Leftover]:
    """Folders that killed jobs and interrupted deletions left, with size and age; nothing is changed.

    What a job is still writing is none. `clean_up` removes them.
    """
    with storing("looking for leftovers", store.path):
        return list(_folders_left(store))


def clean_up(
    store: Store, dry_run: bool = False, on_failure: Callable[[StoreError], None] = log_failure
) -> Sequence[Leftover]:
    """Removes what nobody can use, leftovers and expired contexts without living children, and returns it.

    With `dry_run` only returns it, which works on a store that cannot be written to. What cannot be removed is told
    to `on_failure` and left; the rest is removed all the same. While the manifest of any context cannot be used, all
    expired ones are left: that context may continue one of them.
    """
    with storing("looking for leftovers", store.path):
        found = chain(_folders_left(store), _expired(store, on_failure), _files_left(store))
        return (
            _without_their_locks(found) if dry_run else [item for item in found if removed(item, on_failure)]
        )


def clean_up_at_times(store: Store) -> None:
    """Cleans up, unless that was done lately by this `store`: all contexts are looked at, however many there are."""
    if store.cleaned_s + _EVERY_S < time.monotonic():
        clean_up(store)
        store.cleaned_s = time.monotonic()


def _without_their_locks(found: Iterable[Leftover]) -> Sequence[Leftover]:
    """What a clean-up would tell of: whatever is removed takes its own lock with it."""
    items = list(found)
    names = {name for item in items if item.kind != "lock" for name in (*item.path.parts, item.path.stem)}
    return [item for item in items if item.kind != "lock" or item.path.stem not in names]


def _folders_left(store: Store) -> Iterator[Leftover]:
    yield from dead_folders("temporary", store.folders.contexts, TEMPORARY_PREFIX, store.folders.locks)
    yield from dead_folders("trash", store.folders.contexts, TRASH_PREFIX, None)
    for manifest in store.list():
        if not is_locked(store.folders.locks / manifest.id):  # otherwise they may be a living writer's
            folder = store.folders.context(manifest.id)
            for path in unlisted_indexes(folder, manifest.stored_indexes):
                yield leftover("index", path, partial(_remove_unlisted, store, manifest.id, path))
            for path in unlisted_arrays(folder, manifest.array_folder):
                yield leftover("array", path, partial(_remove_unlisted, store, manifest.id, path))


def _files_left(store: Store) -> Iterator[Leftover]:
    """Tuned defaults of contexts that are gone, what killed writers left of one, and locks of dead jobs."""
    defaults = DefaultsFolder(store.folders.defaults)
    for id_, path in defaults.files():
        current = path == defaults.path(id_) and store.folders.context(id_).is_dir()
        if not current and not is_locked(store.folders.locks / id_):
            yield leftover("default", path, partial(_remove_default, store, id_, path))
    # Of a context, or of what is being written.
    yield from free_locks(store.folders.locks, is_lock_name)


def _expired(store: Store, on_failure: Callable[[StoreError], None]) -> Iterator[Leftover]:
    entries = store.entries()
    unneeded = _unneeded(store, entries)
    try:
        if unneeded:
            _require_usable(entries)
    except StoreError as error:
        on_failure(error)
        return
    for id_ in unneeded:
        yield leftover("expired", store.folders.context(id_), partial(remove_if, store, id_, store.expired))


def _unneeded(store: Store, entries: Sequence[Entry]) -> Sequence[str]:
    """Ids of the expired contexts that no living one continues, as far as can be read."""
    needed = needed_ids(store, entries)
    manifests = (entry for entry in entries if isinstance(entry, Manifest))
    return [entry.id for entry in manifests if store.expired(entry) and entry.id not in needed]


def needed_ids(store: Store, entries: Sequence[Entry]) -> set[str]:
    """Ids of the contexts that a living one continues, as far as can be read."""
    manifests = (entry for entry in entries if isinstance(entry, Manifest))
    return {entry.parent.id for entry in manifests if entry.parent and not store.expired(entry)}


def _require_usable(entries: Sequence[Entry]) -> None:
    """Raises StoreError where nobody can tell what a context continues."""
    for entry in entries:
        if isinstance(entry, BrokenContext):
            raise StoreError(
                f"expired contexts are kept, since context {entry.id} may continue one of them: {entry.error.message}",
                context=entry.id,
            )


def remove_if(store: Store, id_: str, unwanted: Callable[[Manifest], bool]) -> bool:
    """Removes a context that is unwanted as it is now, and that no living one continues; whether it did. What it takes
    to make it again is kept (`store/ended.py`).

    Raises StoreError where nobody can tell whether another one continues it.
    """
    # A job may be replacing it, or may have removed it: then it is not ours to remove.
    with locked_file(store.folders.lock_path(id_), wait=False) as held, store.family_lock(id_):
        manifest = store.usable(id_) if held else None
        if manifest is None or not unwanted(manifest):
            return False
        entries = store.entries_for(id_)  # a child may have come meanwhile
        _require_usable(entries)
        if id_ in needed_ids(store, entries):
            return False
        if KEPT_BEGINNING not in manifest.labels:
            try:
                store.ended.keep(manifest)
            except SparseKVError as error:
                logger.warning("context %s cannot be made again: %s", id_[:12], error.message)
        return store.discard(id_)


def _remove_unlisted(store: Store, id_: str, path: Path) -> bool:
    with locked_file(store.folders.lock_path(id_), wait=False) as held, suppress(SparseKVError):
        present = store.manifest(id_)
        folder, indexes = store.folders.context(id_), present.stored_indexes
        return held and remove_unlisted(path, folder, indexes, present.array_folder)
    return False


def _remove_default(store: Store, id_: str, path: Path) -> bool:
    with locked_file(store.folders.lock_path(id_), wait=False) as held:
        there = held and path.exists()
        if there:
            path.unlink()
        return there


logger = logging.getLogger(__name__)

MARGIN = timedelta(minutes=10)
"""Nothing goes that was used, or that lived, so lately."""
BEYOND_MARGIN = timedelta(minutes=2)  # of what comes back: longer than a server takes to note what it uses
KEPT_BEGINNING = "sparsekv.kept-beginning"
"""Label of contexts that a server made of what came again and again, and may drop."""


def note_use(store: Store, id_: str) -> None:
    """Notes that a context is used now, where this process may."""
    with suppress(OSError):
        os.utime(store.folders.context(id_))


def renew(store: Store, manifest: Manifest) -> None:
    """Has a context live on that is used now, where its uses count (`Manifest.renew`). What fails is logged: the use
    goes on, and the next one tries again."""
    if manifest.renewed(store.now()) == manifest:
        return
    try:
        store.update(manifest.id, lambda present: present.renewed(store.now()), wait_s=0.0)
    except SparseKVError as error:
        logger.info("context %s is not renewed: %s", manifest.id[:12], error.message)


class StoreRoom:
    """The contexts of a store within a bound. Safe to use from several threads and processes at once."""

    def __init__(
        self,
        store: Store,
        most_bytes: int | None = None,
        margin: timedelta = MARGIN,
        quota: Callable[[str], int | None] = lambda tenant: None,
    ) -> None:
        """most_bytes: of keys, values and indexes of all contexts; None without a bound. quota: of a tenant's."""
        self._store = store
        self._most = most_bytes
        self._margin = margin
        self.quota = quota

    def used(self, tenant: str | None = None) -> int:
        """Bytes of the disk that contexts take whose manifest can be used; or of a tenant's, wherever they are."""
        if tenant is None:
            return sum(map(self._store.bytes_here, self._store.list()))
        return sum(_size(each) for each in self._store.list() if each.tenant == tenant)

    def needed(self, id_: str, model: ModelIdentity, dtype: str, tokens: int, methods: Sequence[str]) -> int:
        """Bytes that a context will take about; 0 of one that is there. id_: "" where it is not known yet.

        methods: whose indexes it gets, none of a child's. They are taken to be as those of a context for the same
        methods, and without one as large as keys and values.
        """
        if id_ and self._store.folders.context(id_).is_dir():
            return 0
        whole = bool(methods)
        beside = (window_entry(model, tokens, dtype, whole=whole), state_entry(model, dtype))
        rows = kv_entry(model, tokens, dtype, whole=whole).nbytes
        others = sum(entry.nbytes for entry in beside if entry is not None)
        if not methods:
            return rows + others
        like = next(
            (
                manifest
                for manifest in self._store.list()
                if manifest.model.fingerprint == model.fingerprint
                and manifest.parent is None
                and set(methods) <= set(manifest.methods)
            ),
            None,
        )
        return rows + others + (rows if like is None else like.index_bytes * tokens // like.token_count)

    def require(self, nbytes: int, tenant: str = "", coming: int = 0) -> None:
        """Raises StoreBoundError where there is no room for so many bytes more, and none can be made;
        QuotaExceededError where there is none in a tenant's quota. coming: bytes of its that are being made."""
        if nbytes <= 0:
            return
        quota = self.quota(tenant)
        if quota is not None:
            used = self.used(tenant) + coming
            if used - sum(map(_size, self._may_go(tenant))) + nbytes > quota:
                raise QuotaExceededError.of("stored_bytes", used, nbytes, quota)
        if self._most is None:
            return
        used, may_go = self.used(), sum(map(self._store.bytes_here, self._may_go()))
        if used - may_go + nbytes > self._most:
            what = "remove contexts, give some a time to live, or raise the bound"
            if self._store.beyond is not None:
                seconds = int(self._kept_for().total_seconds())
                what = (
                    f"what is pinned, not uploaded, or was used in the last {seconds} s stays: ask again later, or "
                    "raise the bound"
                )
            raise StoreBoundError(
                f"a context of about {format_bytes(nbytes)} does not fit: the store holds {format_bytes(used)}, of "
                f"which {format_bytes(may_go)} may go, and --store-bytes is {format_bytes(self._most)}; {what}",
                needed=nbytes,
                used=used,
                bound=self._most,
            )

    def make(self, nbytes: int, tenant: str = "") -> Sequence[str]:
        """Makes room for so many bytes more, by removing the least recently used that may go; returns their ids.

        For a tenant's quota its own go. Beside an object store what that holds verified leaves the disk, and comes back
        when it is asked for. Raises what `require` does, with nothing removed, where that does not suffice; StoreError
        where removing fails.
        """
        self.require(nbytes, tenant)
        own = self._bring_down(nbytes, self.quota(tenant), tenant)
        return [*own, *self._bring_down(nbytes, self._most)]

    def sweep(self) -> Sequence[str]:
        """Removes what expired before the margin, and what has to go for the bound; returns ids. Raises StoreError.

        Where what may go does not suffice, the store stays above its bound: nothing else is removed.
        """
        if not os.access(self._store.folders.contexts, os.W_OK):
            return ()
        self._store.ended.trim()
        expired = [
            manifest.id
            for manifest in self._store.list()
            if self._over(manifest) and self._idle(manifest) and self._remove(manifest, self._over)
        ]
        return [*expired, *self._bring_down(0, self._most)]

    def _bring_down(self, nbytes: int, most: int | None, tenant: str | None = None) -> Sequence[str]:
        """Removes what may go until there is room for so many bytes, or nothing may go any more."""
        removed: list[str] = []
        over = 0 if most is None else self.used(tenant) + nbytes - most
        for manifest in self._may_go(tenant) if over > 0 else ():
            taken = _size(manifest) if tenant is not None else self._store.bytes_here(manifest)
            if over > 0 and (self._leave(manifest) if tenant is None else self._remove(manifest, self._idle)):
                removed.append(manifest.id)
                over -= taken
        return removed

    def _leave(self, manifest: Manifest) -> bool:
        """Removes a context, or has it in the object store alone."""
        beyond = self._store.beyond
        if beyond is None:
            return self._remove(manifest, self._idle)
        gone = self._store.evict(manifest.id, self._idle)
        if gone:
            logger.info("context %s, %s, is in %s alone now", manifest.id[:12], manifest.name, beyond.url)
        return gone

    def _remove(self, manifest: Manifest, unwanted: Callable[[Manifest], bool]) -> bool:
        if not remove_if(self._store, manifest.id, unwanted):
            return False
        logger.info(
            "removed context %s, %s (%s): %s",
            manifest.id[:12],
            manifest.name,
            format_bytes(_size(manifest)),
            "it had expired" if self._over(manifest) else "others needed room within the bound of the store",
        )
        return True

    def _over(self, manifest: Manifest) -> bool:
        """Whether it expired before the margin."""
        return manifest.expired(self._now() - self._margin)

    def _may_go(self, tenant: str | None = None) -> list[Manifest]:
        """What may be removed before its time, of all or of a tenant, the least recently used first."""
        entries = self._store.entries()
        beyond = self._store.beyond
        if beyond is not None and tenant is None:
            held = beyond.held()
            found = [
                manifest
                for manifest in entries
                if isinstance(manifest, Manifest)
                and manifest.id in held
                and neutral(held[manifest.id]) == neutral(manifest)
                and self._idle(manifest)
                and self._store.bytes_here(manifest)
            ]
            return sorted(found, key=self._used_at)
        needed = needed_ids(self._store, entries)
        found = [
            manifest
            for manifest in entries
            if isinstance(manifest, Manifest)
            and tenant in (None, manifest.tenant)
            and (manifest.expires_at is not None or KEPT_BEGINNING in manifest.labels)
            and manifest.id not in needed
            and self._idle(manifest)
        ]
        return sorted(found, key=self._used_at)

    def _idle(self, manifest: Manifest) -> bool:
        """Whether it is neither pinned nor was used lately."""
        return not (manifest.pinned or self._used_at(manifest) > self._now() - self._kept_for())

    def _kept_for(self) -> timedelta:
        return self._margin if self._store.beyond is None else min(self._margin, BEYOND_MARGIN)

    def _used_at(self, manifest: Manifest) -> datetime:
        try:
            used = os.stat(self._store.folders.context(manifest.id)).st_mtime
        except OSError:
            return self._now()
        return datetime.fromtimestamp(used, UTC)

    def _now(self) -> datetime:
        return self._store.now()


def _size(manifest: Manifest) -> int:
    return manifest.kv_bytes + manifest.index_bytes
