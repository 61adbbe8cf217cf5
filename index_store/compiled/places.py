"""Folders that hold compiled loops: the user's own, and one that whoever installs fills for everybody.

What is loaded from there runs as machine code, so a folder counts only if nobody but the user and root can write to it.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

_FRESH_S = 24 * 3600
_KEPT_S = 60 * 24 * 3600


CACHE_VARIABLE = "SPARSEKV_CACHE"


def cache_folder() -> Path:
    """What can be made again is kept here: SPARSEKV_CACHE, or sparsekv in the user's cache folder (XDG_CACHE_HOME)."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekv"


def own_place() -> Path:
    """Where this user's processes write."""
    return cache_folder() / "loops"


def shared_place() -> Path:
    """Read by all users of this Python environment, where whoever installed it has put loops there."""
    return Path(sys.prefix) / "share" / "sparsekv" / "loops"


def distrust(folder: Path) -> str | None:
    """Who else could put files into the folder, as a clause; None where only the user and root can.

    The folder and those above it. Another user may write above where only owners rename (the sticky bit), and a group
    that has the user's own number is no other.
    """
    resolved = folder.absolute()
    for place in (resolved, *resolved.parents):
        try:
            found = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be looked at ({error.strerror})"
        if found.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to user {found.st_uid}"
        sticky = place != resolved and bool(found.st_mode & stat.S_ISVTX)
        own_group = found.st_gid in (0, found.st_uid)
        if not sticky and (found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group)):
            return f"other users may write to {place}"
    return None


def make(folder: Path) -> None:
    """Makes it, for its owner to write alone. Raises OSError."""
    mask = os.umask(0o022)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    finally:
        os.umask(mask)


def touch(file: Path) -> None:
    """Notes that a file was used, once a day."""
    try:
        if time.time() - file.stat().st_mtime > _FRESH_S:
            os.utime(file)
    except OSError:
        pass  # removed, or of somebody else


def remove_unused(place: Path) -> None:
    """Removes files that nobody used for two months: of other versions, or of other processors."""
    oldest = time.time() - _KEPT_S
    for file in place.glob("*/*"):
        try:
            if file.stat().st_mtime < oldest:
                file.unlink()
        except OSError:
            continue  # another process was faster, or it is not ours
