"""Cleaning a store up: what killed jobs, interrupted deletions and ended contexts left, found and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    to `on_failure` and left; the rest is removed all the same.
    """
    with storing("looking for leftovers", store.path):
        found = chain(_folders_left(store), _expired(store), _files_left(store))
        return [item for item in found if dry_run or removed(item, on_failure)]


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


def _expired(store: Store) -> Iterator[Leftover]:
    needed = {entry.parent.id for entry in store.list() if entry.parent and not store.expired(entry)}
    for manifest in store.list():
        if store.expired(manifest) and manifest.id not in needed:
            folder = store.folders.context(manifest.id)
            yield leftover("expired", folder, partial(_remove_expired, store, manifest.id))


def _remove_expired(store: Store, id_: str) -> bool:
    # A job may be replacing it, or may have removed it: then it is not ours to remove.
    with locked_file(store.folders.lock_path(id_), wait=False) as held, store.family_lock(id_):
        try:
            unused = held and store.expired(store.manifest(id_)) and not store.children(id_, living=True)
            return unused and discard(store.folders.context(id_))
        except (ContextNotFoundError, ContextCorruptError, FormatVersionError):
            return False


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
