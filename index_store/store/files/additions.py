"""What a published context gains: moved beside what it has, and what a killed writer left of it.

It gains indexes, and a child that is made whole all its arrays anew, in a folder of their own.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from index_store.store.files.durable import remove_tree, sync_path

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
