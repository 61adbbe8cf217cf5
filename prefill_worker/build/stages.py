"""How the stages of a job run side by side: work in order on a stream of its own, and chunks on their way to disk.

Without threads everything runs at once where it is asked for, in the same order; the bytes written are the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from index_store.memory.host_memory import HostBlock, default_page_locker
from index_store.store.writer import ContextWriter

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    """Copies chunks to the host, through a page-locked buffer in each thread, and writes them with their checksums.

    The buffers are as large as the largest chunk, one for each thread.
    """

    def __init__(self, writer: ContextWriter, stage: Stage, timer: Timer) -> None:
        self._writer = writer
        self._stage = stage
        self._timer = timer
        self._own = threading.local()

    def submit(self, path: str, indices: Sequence[int], chunk: Tensor) -> Future[None]:
        """`chunk` must be complete, on whatever device it is, and not change until the future is done."""
        return self._stage.submit(lambda: self._write(path, indices, chunk))

    def _write(self, path: str, indices: Sequence[int], chunk: Tensor) -> None:
        with self._timer("write"):
            self._writer.write_chunk(path, indices, self._fetch(chunk) if chunk.is_cuda else chunk)

    def _fetch(self, chunk: Tensor) -> Tensor:
        """The chunk in this thread's buffer, where it stays until the next one."""
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.nbytes < chunk.nbytes:
            # The old buffer goes first.
            self._own.buffer = buffer = None
            self._own.buffer = buffer = _Buffer(chunk.nbytes, chunk.device)
        return buffer.fetch(chunk)


class _Buffer:
    """Page-locked host memory and the stream on which it is filled."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._block = HostBlock(nbytes, default_page_locker())
        self._bytes = self._block.take((nbytes,), torch.uint8)
        self._block.lock()
        self._stream = _new_stream(device)

    def fetch(self, chunk: Tensor) -> Tensor:
        held = self._bytes[: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
        with torch.cuda.stream(self._stream):
            held.copy_(chunk, non_blocking=True)
        self._stream.synchronize()
        return held


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
