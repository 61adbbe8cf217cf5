"""Writing to a file system: private by default, durable, removed whole, and with clear errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from index_store.errors import StoreError, StoreFullError

TEMPORARY_PREFIX = ".tmp-"
"""Of the name of a file or folder that is being written."""
TRASH_PREFIX = ".trash-"
"""Of the name of a folder that is being removed."""

CHECKSUM_BYTES = 4
"""Of the crc32c that stands behind the contents of a chunk."""

PRIVATE = 0o700
"""Permissions of a new store: nobody but its owner. What is created in a folder later gets the folder's own."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FSYNC_THREADS = 8
"""Several at once let the file system commit them together."""


@contextmanager
def storing(action: str, path: Path) -> Iterator[None]:
    """Turns file system errors of a block that writes into StoreFullError (disk, quota, limit) or StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"{path}: {action} failed, no space is left ({error.strerror}); nothing was kept. "
                "Free space (`index-store gc`, `index-store rm`) and run again",
                path=path,
            ) from error
        if error.errno == errno.EFBIG:
            raise StoreFullError(
                f"{path}: {action} failed, a file would be larger than this process or the file system allows "
                f"({error.strerror}); nothing was kept. Raise the limit on file size (`ulimit -f`) and run again",
                path=path,
            ) from error
        detail = error.strerror or str(error)
        raise StoreError(
            f"{path}: {action} failed: {detail}; check the path and its permissions", path=path
        ) from error


def permissions_in(folder: Path) -> int:
    """Permission bits of what is created in the folder: the folder's own, less what the umask takes away."""
    return os.stat(folder).st_mode & 0o777


def make_folder(path: Path, permissions: int = PRIVATE) -> None:
    """Makes a folder durably, and those above it that are missing; nothing happens where it is there."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent, 0o777)
    with suppress(
        FileExistsError
    ):  # made by another process meanwhile, or a file, as whoever uses it will find
        path.mkdir(permissions)
    sync_path(path.parent)


def new_file(path: Path, permissions: int) -> BinaryIO:
    """Opens a file for writing; where it is new, with these permissions, but never executable."""
    return open(path, "wb", opener=partial(os.open, mode=permissions & 0o666))


def replace_file(path: Path, data: bytes, permissions: int) -> None:
    """Has the file hold these bytes: all at once, and durably. Writers of one file exclude each other."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        with new_file(temporary, permissions) as file:
            file.write(data)
        sync_path(temporary)
        os.replace(temporary, path)
        sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def unused_name(folder: Path, prefix: str) -> Path:
    """A path inside the folder that nobody uses: the prefix and a random part."""
    return folder / f"{prefix}-{secrets.token_hex(8)}"


def remove_tree(path: Path) -> None:
    """Removes a folder, whatever part of it is left; another process may be removing it too.

    Of a link to a folder only the link: what it leads to is not the store's.
    """
    while os.path.lexists(path):
        with suppress(FileNotFoundError):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)


def discard(folder: Path) -> bool:
    """Makes a context's folder invisible in one step, then removes it; False when it was not there.

    Processes that have its files mapped or open keep what they have. Of a link to a folder only the link is removed.
    """
    trash = set_aside(folder)
    if trash is None:
        return False
    sync_path(folder.parent)
    remove_tree(trash)
    return True


def set_aside(folder: Path) -> Path | None:
    """Makes a context's folder invisible in one step; returns where it lies, to be removed; None when it was not there.

    Whatever becomes of its remover, a clean-up removes it.
    """
    trash = unused_name(folder.parent, f"{TRASH_PREFIX}{folder.name}")
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return None
    return trash


def sync_tree(path: Path) -> None:
    """Makes every file and folder below (and including) `path` durable."""
    names = [path]
    for parent, folders, files in os.walk(path):
        names += [Path(parent, name) for name in (*folders, *files)]
    with ThreadPoolExecutor(FSYNC_THREADS) as pool:
        for _ in pool.map(sync_path, names):
            pass


def sync_path(path: Path) -> None:
    """Makes one file, or one folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
