"""Reading from a file system that may not answer: regular files only, and no step may take longer than a limit.

A read from a network file system whose server is gone blocks its thread, and nothing can interrupt it. So whoever must
not hang leaves reading to `Readers`: daemon threads that note every step that may block (`may_block`), while their
employer waits, and gives up when one step takes longer than the limit. Such a thread ends by itself when the file
system comes back, and does not keep the process from ending.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from index_store.errors import StoreUnavailableError

READ_LIMIT_S = 60.0
"""How long one step may take: opening a file, or reading a piece of it (at most 8 MiB)."""

_MOST_LOST = 32
_POLL_S = 0.25

_FEWEST_THREADS, _MOST_THREADS = 2, 16

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Result = TypeVar("Result")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def file_threads() -> int:
    """Threads that read or write large files and compute their checksums: one for each core, within bounds."""
    return min(max(_FEWEST_THREADS, available_cores()), _MOST_THREADS)


class WrongFileError(OSError):
    """What was found is not what a store keeps: no regular file, or too large. `strerror` says what it is."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EINVAL, what)


def unavailable(path: Path, error: OSError) -> StoreUnavailableError:
    """The error of a file that could not be read for a reason that says nothing about its contents."""
    return StoreUnavailableError(
        f"{path}: cannot be read now ({error.strerror or error}); nothing is known to be damaged: mend what prevents "
        "it, and try again",
        path=path,
    )


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Opens a file for reading: its descriptor and status.

    Raises WrongFileError for anything but a regular file, before it is opened: opening a pipe waits for its other end.
    Other OSErrors are the system's.
    """
    with may_block(path):
        _require_regular(os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _require_regular(status)  # it may have been exchanged meanwhile
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """A small file as a whole, and its status. Raises WrongFileError where it has more than `most` bytes."""
    with open_regular(path) as (descriptor, status):
        pieces: list[bytes] = []
        total = 0
        while total <= most:
            with may_block(path):
                piece = os.read(descriptor, min(most + 1 - total, 1 << 20))
            if not piece:
                return b"".join(pieces), status
            pieces.append(piece)
            total += len(piece)
    raise WrongFileError(f"a file of more than {most} bytes")


class _Mark:
    """What a thread does that may block, and since when. Written by the thread, read by who waits for it."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.since: float | None = None
        self.unwanted = False

    def blocked_s(self) -> float:
        now = time.monotonic()  # first: the step may end, and others be done, before this thread goes on
        since = self.since
        return 0.0 if since is None else now - since


class _ThreadsMark(threading.local):
    value: _Mark | None = None


_threads_mark = _ThreadsMark()
_lost: list[_Mark] = []


@contextmanager
def may_block(path: Path) -> Iterator[None]:
    """Notes that the block touches a file and may hang. Raises StoreUnavailableError where nobody waits any more."""
    mark = _threads_mark.value
    if mark is None:
        yield
        return
    if mark.unwanted:
        raise StoreUnavailableError(f"{path}: reading was given up", path=path)
    mark.path, mark.since = path, time.monotonic()
    try:
        yield
    finally:
        mark.since = None


class Readers:
    """A few daemon threads for work that reads files. Used by one thread."""

    def __init__(self, threads: int, name: str, limit_s: float = READ_LIMIT_S) -> None:
        self._count = threads
        self._name = name
        self.limit_s = limit_s
        self._queue: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._marks: list[_Mark] = []

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queues work. Raises StoreUnavailableError while too many threads of the process hang."""
        _lost[:] = [mark for mark in _lost if mark.blocked_s() > 0.0]
        if len(_lost) >= _MOST_LOST:
            raise StoreUnavailableError(
                f"{_lost[0].path}: the file system does not answer, {len(_lost)} reads wait for it; try again later",
                path=_lost[0].path,
            )
        future: Future[Result] = Future()
        if len(self._threads) < self._count:
            self._start_thread()
        self._queue.put((future, work))  # type: ignore[arg-type]
        return future

    def result(self, future: Future[Result], check: Callable[[], None] = lambda: None) -> Result:
        """Waits for the work and returns, or raises, what it did.

        Raises StoreUnavailableError once any of the threads has been held up by one step for longer than the limit.
        check: called every 250 ms; what it raises ends the wait.
        """
        try:
            while True:
                try:
                    return future.result(min(_POLL_S, self.limit_s))
                except TimeoutError:
                    if future.done():  # meanwhile, or it is the work's own
                        return future.result()
                check()
                for mark in self._marks:
                    if mark.blocked_s() > self.limit_s:
                        _lost.append(mark)
                        raise StoreUnavailableError(
                            f"{mark.path}: the file system has not answered for {self.limit_s:g} s; see whether its "
                            "disk or server is there, and try again",
                            path=mark.path,
                        )
        finally:
            del future  # an error's traceback leads here: no cycle may keep memory

    def stop(self) -> None:
        """Drops what was not begun; what is under way ends with its present step."""
        for mark in self._marks:
            mark.unwanted = True
        try:
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    item[0].cancel()
        except Empty:
            pass
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """After `stop`: waits until all threads have ended; False when they have not in that time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        mark = _Mark()
        thread = threading.Thread(target=self._run, args=(mark,), name=self._name, daemon=True)
        self._marks.append(mark)
        self._threads.append(thread)
        thread.start()

    def _run(self, mark: _Mark) -> None:
        _threads_mark.value = mark
        while (item := self._queue.get()) is not None:
            _work(*item)
            del item  # lest it is kept while the thread waits for more


def read_bounded(work: Callable[[], Result], limit_s: float = READ_LIMIT_S) -> Result:
    """Returns what `work` returns, which reads files; raises StoreUnavailableError when one step exceeds the limit."""
    if _threads_mark.value is not None:
        return work()
    try:
        readers = _idle.pop()
    except IndexError:
        readers = Readers(1, "read")
    readers.limit_s = limit_s
    future: Future[Result] | None = None
    try:
        future = readers.submit(work)
        return readers.result(future)
    finally:
        if (future is None or future.done()) and len(_idle) < _MOST_IDLE:
            _idle.append(readers)
        else:
            readers.stop()
        del future  # an error's traceback leads here


_MOST_IDLE = 4
_idle: list[Readers] = []
"""With a thread each that waits for work. To start one takes as long as what most of them are asked for."""

os.register_at_fork(after_in_child=_idle.clear)


def _work(future: Future[object], work: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        del future, work  # the error's traceback leads here: no cycle may keep memory


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise WrongFileError(f"{_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')} instead of a file")


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Changes whenever a file does; None where it cannot be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
