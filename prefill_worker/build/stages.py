"""How the stages of a job run side by side: work in order on a stream of its own, and chunks on their way to disk.

Without threads everything runs at once where it is asked for, in the same order; the bytes written are the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor

from index_store.memory.host_memory import HostBlock, default_page_locker
from index_store.store.writer import ContextWriter

STAGING_BYTES = 8 << 20
"""Page-locked, in each thread that writes: what is copied from a device at a time, unless one row is larger."""

Chunk = tuple[str, tuple[int, int], Tensor]
"""Path, place and contents of one chunk, or of rows of it."""

Timer = Callable[[str], AbstractContextManager[None]]
"""Measures a block of code under the name of a phase."""


class Clock:
    """Seconds per phase. A phase that runs several times adds up, also where threads run it at the same time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._adding = threading.Lock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            with self._adding:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + taken


class Stage:
    """Runs what it is given, each call's result or error in its future. Use as a context manager.

    Leaving it drops what has not begun and waits for what has.
    """

    def __init__(self, threads: int, name: str) -> None:
        """`threads` of 0 run every call before `submit` returns."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name) if threads else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[None] = Future()
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done


class BuildStream:
    """A device's stream beside the one that the model runs on; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _new_stream(device) if device.type == "cuda" else None

    def mark(self) -> Callable[[], None]:
        """Notes what has been asked of the caller's stream so far; the result lets this one wait for it."""
        stream = self._stream
        if stream is None:
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(stream.device))
        return lambda: stream.wait_event(event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work of this block runs on the stream, and is done when the block is left without an error."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield
        if self._stream is not None:
            self._stream.synchronize()


class ChunkWriting:
    """Copies chunks, or rows of them, to the host, and writes them with their checksums. Use as a context manager.

    What is submitted under one key is written in that order, by one thread. On a device every thread has a stream and
    a page-locked buffer of its own.
    """

    def __init__(self, writer: ContextWriter, threads: int, timer: Timer) -> None:
        """`threads` of 0 write before `submit` returns."""
        self._writer = writer
        self._timer = timer
        self._lanes = [Stage(min(1, threads), "write") for _ in range(max(1, threads))]
        self._stages = ExitStack()
        self._own = threading.local()

    def __enter__(self) -> Self:
        for lane in self._lanes:
            self._stages.enter_context(lane)
        return self

    def __exit__(self, *raised: object) -> None:
        self._stages.close()

    def submit(
        self, key: int, ready: Callable[[], None], chunks: Sequence[Chunk], start: int = 0
    ) -> Future[None]:
        """Writes rows of chunks, from row `start` on: by default whole chunks, which begin with row 0.

        ready: returns once they are complete, on whatever device they are. They must not change until the future is
        done.
        """

        def write() -> None:
            ready()
            for path, indices, rows in chunks:
                self._write(path, indices, start, rows)

        return self._lanes[key % len(self._lanes)].submit(write)

    def _write(self, path: str, indices: Sequence[int], start: int, rows: Tensor) -> None:
        rows = rows if rows.dim() else rows[None]
        if not rows.is_cuda:
            with self._timer("write"):
                self._writer.write_rows(path, indices, start, rows)
            return
        at_once = max(1, STAGING_BYTES * len(rows) // max(1, rows.nbytes))
        for first in range(0, max(1, len(rows)), at_once):
            with self._timer("copy"):
                held = self._fetch(rows[first : first + at_once])
            with self._timer("write"):
                self._writer.write_rows(path, indices, start + first, held)

    def _fetch(self, rows: Tensor) -> Tensor:
        """The rows in this thread's buffer, where they stay until the next ones."""
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < rows.nbytes:
            # The old buffer goes first.
            self._own.buffer = buffer = None
            self._own.buffer = buffer = _Buffer(max(rows.nbytes, STAGING_BYTES), rows.device)
        return buffer.fetch(rows)


class _Buffer:
    """Page-locked host memory and the stream on which it is filled."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._block = HostBlock(nbytes, default_page_locker())
        self._bytes = self._block.take((nbytes,), torch.uint8)
        self._block.lock()
        self._stream = _new_stream(device)

    def fetch(self, rows: Tensor) -> Tensor:
        held = self._bytes[: rows.nbytes].view(rows.dtype).view(rows.shape)
        with torch.cuda.stream(self._stream):
            held.copy_(rows, non_blocking=True)
        self._stream.synchronize()
        return held


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
