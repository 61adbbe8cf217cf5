"""The files of arrays that are being written, each chunk with its checksum behind it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from index_store.store.files.durable import CHECKSUM_BYTES, new_file

_WRITTEN_PIECE_BYTES = 1 << 20  # no other thread of Python runs while its checksum is computed


class FolderStore(LocalStore):  # type: ignore[misc]  # zarr is not type-checked here
    """The files of arrays in a folder, none of which is begun after `seal` or a failed write.

    zarr writes several files at once and, when one fails or its caller is interrupted, leaves the others to finish
    whenever they do: they would come back into a folder that is being removed.
    """

    def __init__(self, root: Path, permissions: int) -> None:
        super().__init__(root)
        self._permissions = permissions
        self._state = threading.Condition()
        self._writing = 0
        self._ended: OSError | None = None
        self._trailers: dict[str, bytes] = {}

    def trailer(self, key: str) -> bytes | None:
        """The last bytes that were written to a file, as many as a checksum has; None when it was not written."""
        return self._trailers.get(key)

    def seal(self) -> None:
        """Waits for the writes under way, if any; later ones raise."""
        with self._state:
            self._ended = self._ended or OSError(errno.ESHUTDOWN, "writing has ended")
            self._state.wait_for(lambda: self._writing == 0)

    def write_chunk(self, key: str, raw: NDArray[np.uint8]) -> None:
        """Writes a chunk's bytes and their crc32c behind them, as zarr does, without a copy and from any thread."""
        checksum = 0
        with self._new_file(key) as file:
            for start in range(0, raw.size, _WRITTEN_PIECE_BYTES):
                # Pieces that stay in the cache between the checksum and the write.
                piece = raw[start : start + _WRITTEN_PIECE_BYTES]
                checksum = google_crc32c.extend(checksum, piece)
                file.write(piece.data)
            trailer = checksum.to_bytes(CHECKSUM_BYTES, "little")
            file.write(trailer)
        self._trailers[key] = trailer

    def adopt_chunk(self, key: str, nbytes: int, checksum: int) -> bool:
        """Counts a chunk of so many bytes as written that an earlier writer left; False where it has other contents."""
        trailer = checksum.to_bytes(CHECKSUM_BYTES, "little")
        found = 0
        try:
            with open(self.root / key, "rb") as file:
                for _ in range(0, nbytes, _WRITTEN_PIECE_BYTES):
                    found = google_crc32c.extend(
                        found, file.read(min(_WRITTEN_PIECE_BYTES, nbytes - file.tell()))
                    )
                if found != checksum or file.read() != trailer:
                    return False
        except OSError:
            return False
        self._trailers[key] = trailer
        return True

    def forget(self, key: str) -> None:
        """Removes a file that an earlier writer may have left."""
        (self.root / key).unlink(missing_ok=True)

    def set_sync(self, key: str, value: Buffer) -> None:
        with self._new_file(key) as file:
            file.write(value.as_numpy_array().data)

    @contextmanager
    def _new_file(self, key: str) -> Iterator[BinaryIO]:
        with self._state:
            if self._ended is not None:
                raise OSError(self._ended.errno, self._ended.strerror)
            self._writing += 1
        path = self.root / key
        try:
            self._make_folder(path.parent)
            with new_file(path, self._permissions) as file:
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

    async def set(self, key: str, value: Buffer) -> None:
        self.set_sync(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not (self.root / key).exists():
            self.set_sync(key, value)
