"""Writing to a file system: private by default, durable, locked, replaced and removed whole, and with clear errors."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from index_store.errors import ContextNotFoundError, StoreError, StoreFullError

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


_POLL_S = 0.02
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def locked_file(path: Path, on_wait: Callable[[], None] | None = None, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock on a file that exists only while somebody holds or wants it.

    Yields True with the lock held; `on_wait` is called once if another holder makes this one wait. Without `wait`
    yields False at once when somebody else holds it. The lock ends with its process, however that ends.
    """
    with storing("locking", path):
        descriptor = _lock_current(path, on_wait, wait)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def locked_within(path: Path, seconds: float) -> Iterator[bool]:
    """As `locked_file`; yields False where others have held the lock for so long."""
    end = time.monotonic() + seconds
    while True:
        with locked_file(path, wait=False) as held:
            if held or time.monotonic() >= end:
                yield held
                return
        time.sleep(_POLL_S)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock; nothing is changed. Also True where that cannot be found out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def clear_free_lock(path: Path) -> bool:
    """Removes a lock file that nobody holds, which a killed holder left; False when it is held, gone or another user's.

    Who waits for the lock notices that the file was replaced, and takes the new one.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in _NOT_OURS:
            return False
        raise
    try:
        if not (_try_lock(descriptor) and _is_current(path, descriptor)):
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)


def _lock_current(path: Path, on_wait: Callable[[], None] | None, wait: bool) -> int | None:
    """Locks the file that is at `path` once the lock is held; a former holder may have removed an older one."""
    waited = False
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        descriptor = os.open(path, flags, permissions_in(path.parent) & 0o666)
        try:
            held = _try_lock(descriptor)
            if not held and wait:
                if on_wait is not None and not waited:
                    on_wait()
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                held = True
            if not held:
                os.close(descriptor)
                return None
            if _is_current(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def replace_in_context(path: Path, data: bytes, folder: Path, locks: Path) -> None:
    """Replaces a file of a context's folder durably: readers see the old contents or the new ones.

    It goes through a temporary file in `folder`, on the same file system. locks: where a lock of that file's name says
    that it is no dead writer's. Raises ContextNotFoundError where the context's folder was removed, StoreFullError or
    StoreError where the file cannot be written.
    """
    temporary = unused_name(folder, f"{TEMPORARY_PREFIX}{path.parent.name}")
    with locked_file(locks / temporary.name):
        try:
            with storing("writing", path):
                with new_file(temporary, permissions_in(folder)) as file:
                    file.write(data)
                sync_path(temporary)
                os.replace(temporary, path)
                sync_path(path.parent)
        except StoreError as error:
            if path.parent.is_dir():
                raise
            id_ = path.parent.name
            raise ContextNotFoundError(
                f"context {id_} was deleted while it was being changed", context=id_
            ) from error
        finally:
            temporary.unlink(missing_ok=True)


def move_into_place(folder: Path, target: Path, keep: Callable[[], bool]) -> None:
    """Moves a context's folder, of which all is durable, to where it is visible, durably.

    What is there already stays where `keep` says so, and the folder with it. Otherwise it is set aside, and removed
    once the new one is there: children read an expired parent on while it is made again. Raises OSError.
    """
    with ExitStack() as replaced:
        while True:
            if os.path.lexists(target):
                if keep():
                    return
                trash = set_aside(target)
                if trash is not None:
                    replaced.callback(_remove_trash, trash)
            try:
                os.rename(folder, target)
            except OSError as error:
                # Another writer of the same content was faster: decide again.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                continue
            sync_path(target.parent)
            return


def _remove_trash(trash: Path) -> None:
    with suppress(OSError):  # a clean-up removes what is left; what was published stands
        remove_tree(trash)
