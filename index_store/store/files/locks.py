"""Locks that die with their process: on files that exist only while somebody holds or wants them.

They work on network file systems, too, where an exclusive lock wants a file that was opened for writing, and never a
folder. Whether a lock is held can be seen on a store that cannot be written to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from index_store.store.files.durable import permissions_in, storing

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
