"""Cleaning a store up: what killed jobs, interrupted deletions and ended contexts left, found and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from index_store.errors import (
    ContextCorruptError,
    ContextNotFoundError,
    FormatVersionError,
    SparseKVError,
    StoreError,
)
from index_store.store.catalog import Store
from index_store.store.description.manifest import Manifest
from index_store.store.files.additions import remove_unlisted, unlisted_arrays, unlisted_indexes
from index_store.store.files.durable import TEMPORARY_PREFIX, TRASH_PREFIX, discard, storing
from index_store.store.files.leftovers import (
    Leftover,
    dead_folders,
    free_locks,
    leftover,
    log_failure,
    removed,
)
from index_store.store.files.locks import is_locked, locked_file
from index_store.store.listing import BrokenContext, Entry
from index_store.store.store_folders import is_lock_name
from index_store.store.tuned_defaults import DefaultsFolder


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
        yield leftover("expired", store.folders.context(id_), partial(_remove_expired, store, id_))


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


def _remove_expired(store: Store, id_: str) -> bool:
    return remove_if(store, id_, store.expired)


def remove_if(store: Store, id_: str, unwanted: Callable[[Manifest], bool]) -> bool:
    """Removes a context that is unwanted as it is now, and that no living one continues; whether it did.

    Raises StoreError where nobody can tell whether another one continues it.
    """
    # A job may be replacing it, or may have removed it: then it is not ours to remove.
    with locked_file(store.folders.lock_path(id_), wait=False) as held, store.family_lock(id_):
        try:
            if not held or not unwanted(store.manifest(id_)):
                return False
        except (ContextNotFoundError, ContextCorruptError, FormatVersionError):
            return False
        entries = store.entries()  # a child may have come meanwhile
        _require_usable(entries)
        return id_ not in needed_ids(store, entries) and discard(store.folders.context(id_))


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
