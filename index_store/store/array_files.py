"""The files of arrays while they are written, with the checksums that zarr gives chunks. It imports no torch."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from index_store.store.files.durable import CHECKSUM_BYTES, FSYNC_THREADS, new_file, sync_path
from index_store.store.zarr_io import extend_crc32c

_PIECE_BYTES = 1 << 20
_SYNC_BYTES = 8 << 20
"""Of a file that are not known to be durable before the disk is asked for them, while others are written."""


@dataclass(slots=True)
class _Part:
    """What has been written of a chunk: so many bytes, their crc32c, and how many the disk was not asked for yet."""

    done: int = 0
    checksum: int = 0
    unsynced: int = 0


class ArrayFiles:
    """The files of arrays in a folder, none of which is begun after `seal` or a failed write.

    Several threads write at once; when one fails, or whoever waits for them is interrupted, the others would come back
    into a folder that is being removed.
    """

    def __init__(self, root: Path, permissions: int) -> None:
        self.root = root
        self._permissions = permissions
        self._state = threading.Condition()
        self._writing = 0
        self._ended: OSError | None = None
        self._parts: dict[str, _Part] = {}
        self._trailers: dict[str, bytes] = {}
        self._syncers = ThreadPoolExecutor(FSYNC_THREADS, thread_name_prefix="sync")
        self._syncs: list[tuple[Future[None], int]] = []

    def trailer(self, key: str) -> bytes | None:
        """The last bytes that were written to a file, as many as a checksum has; None when it was not written."""
        return self._trailers.get(key)

    def seal(self) -> None:
        """Waits for the writes under way, if any; later ones raise."""
        with self._state:
            self._ended = self._ended or OSError(errno.ESHUTDOWN, "writing has ended")
            self._state.wait_for(lambda: self._writing == 0)
        self._syncers.shutdown(wait=True, cancel_futures=True)

    def write_part(self, key: str, start: int, raw: NDArray[np.uint8], total: int) -> None:
        """Writes bytes of a chunk from `start` on, and behind the last of `total` their crc32c, as zarr does.

        From any thread and without a copy. The parts of a chunk come one after the other; one from 0 on begins it anew.
        """
        part = self._parts.setdefault(key, _Part())
        if start == 0:
            self._trailers.pop(key, None)
            part.done = part.checksum = part.unsynced = 0
        if part.done != start:
            raise ValueError(f"{key}: bytes from {start} on were written, expected those from {part.done} on")
        with self._file(key, fresh=start == 0) as file:
            file.seek(start)
            for first in range(0, raw.size, _PIECE_BYTES):
                # Pieces that stay in the cache between the checksum and the write.
                piece = raw[first : first + _PIECE_BYTES]
                part.checksum = extend_crc32c(part.checksum, piece)
                file.write(piece.data)
            part.done += raw.size
            part.unsynced += raw.size
            if part.done == total:
                trailer = part.checksum.to_bytes(CHECKSUM_BYTES, "little")
                file.write(trailer)
                self._trailers[key] = trailer
            file.flush()
            if part.unsynced >= _SYNC_BYTES:
                self._sync(key, part)

    def sync(self, on_bytes: Callable[[int], None]) -> None:
        """Returns when all parts are durable; `on_bytes` is told how many are, as they come. Raises OSError."""
        for key, part in self._parts.items():
            self._sync(key, part)
        for done, nbytes in self._syncs:
            done.result()
            on_bytes(nbytes)
        self._syncs.clear()

    def _sync(self, key: str, part: _Part) -> None:
        """Has the disk asked for what was written of a file: it works while others are written."""
        if part.unsynced:
            self._syncs.append((self._syncers.submit(sync_path, self.root / key), part.unsynced))
            part.unsynced = 0

    def adopt_chunk(self, key: str, nbytes: int, checksum: int) -> bool:
        """Counts a chunk of so many bytes as written that an earlier writer left; False where it has other contents."""
        trailer = checksum.to_bytes(CHECKSUM_BYTES, "little")
        found, piece = 0, np.empty(_PIECE_BYTES, dtype=np.uint8)
        try:
            with open(self.root / key, "rb") as file:
                for start in range(0, nbytes, _PIECE_BYTES):
                    held = piece[: min(_PIECE_BYTES, nbytes - start)]
                    if file.readinto(held.data) != held.size:
                        return False
                    found = extend_crc32c(found, held)
                if found != checksum or file.read() != trailer:
                    return False
        except OSError:
            return False
        self._parts[key] = _Part(nbytes, checksum, nbytes)  # a dead writer may not have synced it
        self._trailers[key] = trailer
        return True

    def write(self, key: str, data: bytes) -> None:
        """Writes a small file as a whole. Raises OSError."""
        with self._file(key) as file:
            file.write(data)

    @contextmanager
    def _file(self, key: str, fresh: bool = True) -> Iterator[BinaryIO]:
        """A file to be written: begun anew, or where it is."""
        with self._state:
            if self._ended is not None:
                raise OSError(self._ended.errno, self._ended.strerror)
            self._writing += 1
        path = self.root / key
        try:
            if fresh:
                self._make_folder(path.parent)
            with new_file(path, self._permissions) if fresh else open(path, "r+b") as file:
                yield file
        except OSError as error:
            self._ended = self._ended or error
            raise
        finally:
            with self._state:
                self._writing -= 1
                self._state.notify_all()

    def _make_folder(self, path: Path) -> None:
        if path != self.root and not path.is_dir():
            self._make_folder(path.parent)
            path.mkdir(self._permissions, exist_ok=True)
