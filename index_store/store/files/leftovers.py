"""What killed jobs and interrupted deletions left in a store: found without changing anything, removed on demand."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from index_store.errors import StoreError
from index_store.store.files.durable import (
    clear_free_lock,
    is_locked,
    locked_file,
    remove_tree,
    storing,
    sync_path,
)

WHOLE = "whole"
"""That folder: beside the child's own arrays, which some may still read."""

_INDEXES = "index"
_CHILDS = ("tokens", "kv", "window")


def move_indexes(names: Collection[str], written: Path, context: Path) -> None:
    """Moves indexes from a folder where they were written and synced into a context's, durably.

    The context's manifest does not list them yet, so whatever is there under their names is a killed writer's, and
    nobody reads it. Raises FileNotFoundError when the context is gone.
    """
    if not names:
        return
    source, target = written / _INDEXES, context / _INDEXES
    if not target.exists():
        os.rename(source, target)
        sync_path(context)
        return
    for name in sorted(names):
        remove_tree(target / name)
        os.rename(source / name, target / name)
    # The group's own metadata, where a clean-up was killed that removed all of a dead writer's.
    for path in source.iterdir():
        if path.is_file() and not (target / path.name).exists():
            os.rename(path, target / path.name)
    sync_path(target)


def move_arrays(written: Path, context: Path) -> None:
    """Moves the folder of a whole context's arrays into a child's, durably, in place of a killed writer's.

    Raises FileNotFoundError when the context is gone.
    """
    remove_tree(context / WHOLE)
    os.rename(written / WHOLE, context / WHOLE)
    sync_path(context)


def replaced_arrays(context: Path, arrays: str) -> list[Path]:
    """Folders of arrays that a context had as a child, where its own ones lie in a folder now. Raises OSError."""
    found = [context / name for name in _CHILDS] if arrays else []
    return [path for path in found if path.is_dir()]


def unlisted_arrays(context: Path, arrays: str) -> list[Path]:
    """Those, or what is left of a whole context's arrays by who was killed while making a child whole."""
    return (
        replaced_arrays(context, arrays) if arrays else [path for path in (context / WHOLE,) if path.is_dir()]
    )


def unlisted_indexes(context: Path, listed: Collection[str]) -> list[Path]:
    """Folders of indexes besides the listed ones: left by who was killed while adding them. Raises OSError."""
    indexes = context / _INDEXES
    try:
        found = sorted(path for path in indexes.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in found if path.name not in listed] if listed else [indexes]


def remove_unlisted(path: Path, context: Path, listed: Collection[str], arrays: str) -> bool:
    """Removes what `unlisted_indexes` or `unlisted_arrays` found; False when it is not unlisted any more."""
    there = path in (*unlisted_indexes(context, listed), *unlisted_arrays(context, arrays))
    if there:
        remove_tree(path)
    return there


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that nobody can use and a clean-up removes.

    kind: "temporary" (of a job that was killed), "index" and "array" (that it was adding to a context; also arrays of a
    child that was made whole), "trash" (of a deletion that was interrupted), "expired", "default" (a tuned default
    without a context) or "lock". nbytes: of its files.
    changed_at: when something in it changed last.
    """

    kind: str
    path: Path
    nbytes: int
    changed_at: datetime
    remove: Callable[[], bool] = field(repr=False, compare=False)
    """Removes it; False when it was gone or in use again. Raises OSError or StoreError."""


def leftover(kind: str, path: Path, remove: Callable[[], bool]) -> Leftover:
    """A file or folder, measured."""
    nbytes, changed = _measure(path)
    return Leftover(kind, path, nbytes, datetime.fromtimestamp(changed, UTC), remove)


def dead_folders(kind: str, folder: Path, prefix: str, locks: Path | None) -> Iterator[Leftover]:
    """Folders with that prefix; with `locks` only those whose lock, a file of the same name there, nobody holds."""
    for path in sorted(folder.glob(f"{prefix}*")):
        lock = None if locks is None else locks / path.name
        if lock is None or not is_locked(lock):
            yield leftover(kind, path, _removal(path, lock))


def free_locks(locks: Path, is_lock: Callable[[str], bool]) -> Iterator[Leftover]:
    """Lock files, by their names, that nobody holds."""
    for path in sorted(locks.glob("*")):
        if is_lock(path.name) and path.is_file() and not is_locked(path):
            yield leftover("lock", path, partial(clear_free_lock, path))


def removed(item: Leftover, on_failure: Callable[[StoreError], None]) -> bool:
    """Removes a leftover; False when it was gone, in use again, or could not be removed, which is told."""
    try:
        with storing("removing", item.path):
            return item.remove()
    except StoreError as error:
        on_failure(error)
        return False


def log_failure(error: StoreError) -> None:
    """Logs what could not be removed."""
    logger.warning("not removed: %s", error)


def _removal(path: Path, lock: Path | None) -> Callable[[], bool]:
    def remove() -> bool:
        if lock is None:
            remove_tree(path)
            return True
        with locked_file(lock, wait=False) as held:
            there = held and os.path.lexists(path)
            if there:
                remove_tree(path)
            return there

    return remove


def _measure(path: Path) -> tuple[int, float]:
    """Bytes of all files at or below the path that are still there, and the time of the last change."""
    total, changed = 0, 0.0
    names = [str(path)]
    for parent, _, files in os.walk(path):
        names += [parent, *(os.path.join(parent, name) for name in files)]
    for name in names:
        try:
            status = os.lstat(name)
        except FileNotFoundError:
            continue
        changed = max(changed, status.st_mtime)
        if not stat.S_ISDIR(status.st_mode):
            total += status.st_size
    return total, changed
