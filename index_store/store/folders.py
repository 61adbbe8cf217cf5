"""What a store needs from the file system: locks that die with their process, durable renames, clear errors."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from index_store.errors import StoreError, StoreFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FSYNC_THREADS = 8


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


def clear_free_lock(path: Path, dry_run: bool) -> bool:
    """Removes a lock file that nobody holds, which a killed holder left; False when it is held, gone or another user's.

    With `dry_run` only looks. Who waits for the lock notices that the file was replaced, and takes the new one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        if not (_try_lock(descriptor) and _is_current(path, descriptor)):
            return False
        if not dry_run:
            path.unlink()
        return True
    finally:
        os.close(descriptor)


def lock_folder(path: Path) -> int | None:
    """Locks a folder and returns the descriptor that holds the lock; None when it is locked or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _try_lock(descriptor) and _is_current(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def unused_name(folder: Path, prefix: str) -> Path:
    """A path inside the folder that nobody uses: the prefix and a random part."""
    return folder / f"{prefix}-{secrets.token_hex(8)}"


def remove_tree(path: Path) -> None:
    """Removes a folder, whatever part of it is left; another process may be removing it too."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def tree_bytes(path: Path) -> int:
    """Bytes of all files below the folder that are still there."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def sync_tree(path: Path) -> None:
    """Makes every file and folder below (and including) `path` durable."""
    names = [path]
    for parent, folders, files in os.walk(path):
        names += [Path(parent, name) for name in (*folders, *files)]
    # Several at once let the file system commit them together.
    with ThreadPoolExecutor(_FSYNC_THREADS) as pool:
        for _ in pool.map(sync_path, names):
            pass


def sync_path(path: Path) -> None:
    """Makes one file, or one folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_current(path: Path, on_wait: Callable[[], None] | None, wait: bool) -> int | None:
    """Locks the file that is at `path` once the lock is held; a former holder may have removed an older one."""
    waited = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
