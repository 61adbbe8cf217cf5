"""Indexes that a published context gains: moved beside those that it has, and what a killed writer left of them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from index_store.store.files.durable import remove_tree, sync_path

_INDEXES = "index"


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
    sync_path(target)


def unlisted_indexes(context: Path, listed: Collection[str]) -> list[Path]:
    """Folders of indexes besides the listed ones: left by who was killed while adding them. Raises OSError."""
    indexes = context / _INDEXES
    try:
        found = sorted(path for path in indexes.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in found if path.name not in listed] if listed else [indexes]


def remove_unlisted(path: Path, context: Path, listed: Collection[str]) -> bool:
    """Removes what `unlisted_indexes` found; False when it is not unlisted any more."""
    there = path in unlisted_indexes(context, listed)
    if there:
        remove_tree(path)
    return there
