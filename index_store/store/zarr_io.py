"""How arrays lie on disk: zarr v3, one uncompressed chunk per entry, crc32c at its end.

Arrays are created through zarr, so that any zarr v3 reader opens them. Chunks bypass it: a chunk file is the raw
little-endian array followed by four bytes of crc32c, which is written without a copy, memory-mapped or read in place.
Unlike zarr, which fills what is missing with zeros, every reader here fails when a chunk is absent, short, long or
altered, or is an intact one that belongs elsewhere: its checksum is then not the one that the array's entry has for
this place.

No other module knows about chunk files.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import google_crc32c
import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from index_store.errors import (
    REPAIR,
    ChecksumError,
    ContextCorruptError,
    InvalidArgumentError,
    MissingChunkError,
    TruncatedChunkError,
)
from index_store.store.dtypes import STORED_DTYPES, dtype_name
from index_store.store.manifest import ArrayEntry, join_checksums

CHECKSUM_BYTES = 4
_PIECE_BYTES = 16 << 20
_WRITTEN_PIECE_BYTES = 1 << 20  # no other thread of Python runs while its checksum is computed


class _FolderStore(LocalStore):  # type: ignore[misc]  # zarr is not type-checked here
    """The files of arrays in a folder, none of which is begun after `seal` or a failed write.

    zarr writes several files at once and, when one fails or its caller is interrupted, leaves the others to finish
    whenever they do: they would come back into a folder that is being removed.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
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
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                yield file
        except OSError as error:
            self._ended = self._ended or error
            raise
        finally:
            with self._state:
                self._writing -= 1
                self._state.notify_all()

    async def set(self, key: str, value: Buffer) -> None:
        self.set_sync(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not (self.root / key).exists():
            self.set_sync(key, value)


class ArrayWriter:
    """Creates arrays below one folder, through zarr, and writes their chunks as it does.

    Chunks may be written by several threads, at the same time. After an error nothing more can be written.
    """

    def __init__(self, folder: Path) -> None:
        self._store = _FolderStore(folder)

    def open(self) -> None:
        """Creates the root group. Comes first."""
        zarr.create_group(self._store, zarr_format=3)

    def create(self, entry: ArrayEntry) -> None:
        """Creates the array without any chunk; it is complete once every chunk has been written."""
        dtype = STORED_DTYPES[entry.dtype]
        zarr.create_array(
            self._store,
            name=entry.path,
            shape=entry.shape,
            chunks=entry.chunks,
            dtype=dtype.zarr_name,
            filters=None,
            compressors=[Crc32cCodec()],
            fill_value=0,
            attributes={"dtype": dtype.name},
        )

    def write_chunk(self, entry: ArrayEntry, indices: Sequence[int], data: Tensor) -> None:
        """Writes one chunk. `data` holds the chunk's elements in order; leading sizes of 1 may be absent.

        Raises InvalidArgumentError when coordinates, shape or dtype disagree with the array.
        """
        _check_indices(entry, indices)
        if data.numel() * data.element_size() != entry.chunk_bytes or _trim(data.shape) != _trim(
            entry.chunks
        ):
            raise InvalidArgumentError(f"{entry.path}: a chunk is {entry.chunks}, got {tuple(data.shape)}")
        if dtype_name(data.dtype) != entry.dtype:
            raise InvalidArgumentError(
                f"{entry.path}: a chunk is {entry.dtype}, got {dtype_name(data.dtype)}"
            )
        raw = _bytes_of(data.detach().cpu().contiguous())
        self._store.write_chunk(self._key(entry, indices), raw)

    def checksums(self, entry: ArrayEntry) -> str:
        """The checksums of an array's chunks as they were written, for its entry; nothing is read.

        Raises MissingChunkError when a chunk was never written.
        """
        found = []
        for indices in entry.chunk_indices():
            trailer = self._store.trailer(self._key(entry, indices))
            if trailer is None:
                path = chunk_path(self._store.root, entry, indices)
                raise MissingChunkError(
                    f"{path}: a chunk of array {entry.path!r} was never written", path=path, array=entry.path
                )
            found.append(int.from_bytes(trailer, "little"))
        return join_checksums(found)

    def close(self) -> None:
        """Ends all writing, also by threads that zarr has left running."""
        self._store.seal()

    def _key(self, entry: ArrayEntry, indices: Sequence[int]) -> str:
        return chunk_path(self._store.root, entry, indices).relative_to(self._store.root).as_posix()


def chunk_path(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> Path:
    """The file of the chunk at the given grid coordinates; coordinates left out are 0."""
    _check_indices(entry, indices)
    return folder.joinpath(entry.path, "c", *map(str, _pad(entry, indices)))


def check_chunks(folder: Path, entries: Iterable[ArrayEntry]) -> Iterator[ContextCorruptError]:
    """Looks at every chunk without reading it; yields one error per file that cannot be the one that was written.

    Such a file is absent, not exactly as long as it must be, or ends with another checksum than the entry has. Only
    in that last case is it read, to tell a damaged chunk from one that belongs elsewhere.
    """
    for entry in entries:
        for indices in entry.chunk_indices():
            try:
                if _trailer(folder, entry, indices) != entry.checksum(indices):
                    read_chunk_into(folder, entry, indices, _chunk_buffer(entry))
            except ContextCorruptError as error:
                yield error


def verify_chunks(
    folder: Path, entries: Iterable[ArrayEntry], on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[ContextCorruptError]:
    """Reads every byte of every chunk and yields one error per bad file. `on_bytes` is told what was read."""
    for entry in entries:
        buffer = _chunk_buffer(entry)
        for indices in entry.chunk_indices():
            try:
                read_chunk_into(folder, entry, indices, buffer)
            except ContextCorruptError as error:
                yield error
            on_bytes(entry.chunk_bytes)


def map_chunk(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> Tensor:
    """The chunk as a tensor over its memory-mapped file, leading sizes of 1 removed by `indices`.

    The mapping is copy-on-write: a stray write reaches neither the file nor other processes. Its checksum is not
    read. Raises MissingChunkError or TruncatedChunkError.
    """
    path = chunk_path(folder, entry, indices)
    try:
        with path.open("rb") as file:
            _check_size(path, entry, os.fstat(file.fileno()).st_size)
            raw = np.memmap(file, dtype=np.uint8, mode="c", shape=(entry.chunk_bytes,))
    except OSError as error:
        raise _unreadable(path, entry, error) from error
    tensor = torch.from_numpy(raw).view(STORED_DTYPES[entry.dtype].torch_dtype)
    return tensor.view(entry.chunks[len(indices) :])


def read_chunk_into(
    folder: Path, entry: ArrayEntry, indices: Sequence[int], buffer: Tensor, verify: bool = True
) -> None:
    """Reads the chunk straight into a contiguous CPU tensor of as many bytes.

    With `verify` its crc32c is computed while reading, and must be the one at the file's end and the entry's. Raises
    MissingChunkError, TruncatedChunkError or ChecksumError, naming file and array; the buffer then holds garbage.
    """
    raw = _bytes_of(buffer)
    if raw.size != entry.chunk_bytes:
        raise InvalidArgumentError(
            f"{entry.path}: a chunk has {entry.chunk_bytes} bytes, the buffer {raw.size}"
        )
    _read_chunk(folder, entry, indices, lambda descriptor: _fill(descriptor, raw, verify), verify)


class Pieces(Protocol):
    """Takes a chunk's bytes piece by piece, in order."""

    def buffer(self, start: int, left: int) -> NDArray[np.uint8]:
        """Host memory for the bytes from `start` on: for 1 to `left` of them."""
        ...

    def filled(self, start: int, count: int) -> None:
        """The buffer that was handed out last holds these bytes."""
        ...


def read_chunk_pieces(folder: Path, entry: ArrayEntry, indices: Sequence[int], pieces: Pieces) -> None:
    """Reads the chunk through buffers that are smaller than it, verifying it like `read_chunk_into`.

    What the pieces went into holds garbage when it raises.
    """

    def fill(descriptor: int) -> int:
        checksum = done = 0
        while done < entry.chunk_bytes:
            raw = pieces.buffer(done, entry.chunk_bytes - done)
            checksum = _fill(descriptor, raw, verify=True, checksum=checksum)
            pieces.filled(done, raw.size)
            done += raw.size
        return checksum

    _read_chunk(folder, entry, indices, fill, verify=True)


def _read_chunk(
    folder: Path, entry: ArrayEntry, indices: Sequence[int], fill: Callable[[int], int], verify: bool
) -> None:
    """Reads a chunk by `fill`, which is given the open file and returns the crc32c of what it read."""
    path = chunk_path(folder, entry, indices)
    try:
        with path.open("rb", buffering=0) as file:
            _check_size(path, entry, os.fstat(file.fileno()).st_size)
            checksum = fill(file.fileno())
            trailer = int.from_bytes(os.read(file.fileno(), CHECKSUM_BYTES), "little")
    except OSError as error:
        raise _unreadable(path, entry, error) from error
    if verify:
        _check_checksum(path, entry, checksum, trailer, entry.checksum(indices))


def _check_checksum(path: Path, entry: ArrayEntry, found: int, trailer: int, expected: int) -> None:
    """Compares the crc32c of a chunk's contents with the one at its file's end and the one in the manifest."""
    if found == trailer == expected:
        return
    if found == trailer:
        said = (
            f"this chunk of array {entry.path!r} is intact but not the one that was written: it has crc32c "
            f"{found:08x}, the manifest records {expected:08x}; the file was exchanged or rewritten"
        )
    else:
        said = (
            f"array {entry.path!r} has crc32c {found:08x} in this chunk, the file's end says {trailer:08x} and "
            f"the manifest {expected:08x}; the file was altered or damaged"
        )
    raise ChecksumError(
        f"{path}: {said}: {REPAIR}",
        path=path,
        array=entry.path,
        found=f"{found:08x}",
        trailer=f"{trailer:08x}",
        expected=f"{expected:08x}",
    )


def _trailer(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> int:
    """The checksum at the end of a chunk's file. Raises like `read_chunk_into` for a file that cannot hold one."""
    path = chunk_path(folder, entry, indices)
    try:
        # Before the file is opened: opening waits where somebody has put a pipe.
        _check_size(path, entry, path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            return int.from_bytes(os.pread(file.fileno(), CHECKSUM_BYTES, entry.chunk_bytes), "little")
    except OSError as error:
        raise _unreadable(path, entry, error) from error


def _chunk_buffer(entry: ArrayEntry) -> Tensor:
    return torch.empty(entry.chunk_bytes, dtype=torch.uint8)


def _fill(descriptor: int, raw: NDArray[np.uint8], verify: bool, checksum: int = 0) -> int:
    """Fills the buffer from the file's position; returns `checksum` continued by what was read (with `verify`)."""
    done = 0
    while done < raw.size:
        # Pieces that stay in the cache between the read and the checksum.
        count = os.readv(descriptor, [raw[done : done + _PIECE_BYTES].data])
        if count == 0:
            raise OSError(errno.EIO, "it shrank while it was read")
        if verify:
            checksum = google_crc32c.extend(checksum, raw[done : done + count])
        done += count
    return checksum


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's own memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _pad(entry: ArrayEntry, indices: Sequence[int]) -> tuple[int, ...]:
    return (*indices, *([0] * (len(entry.shape) - len(indices))))


def _trim(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without its leading ones."""
    sizes = list(shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    return tuple(sizes)


def _check_indices(entry: ArrayEntry, indices: Sequence[int]) -> None:
    inside = len(indices) <= len(entry.grid) and all(
        0 <= index < count for index, count in zip(indices, entry.grid, strict=False)
    )
    if not inside:
        raise InvalidArgumentError(f"{entry.path}: chunk {tuple(indices)} is outside the grid {entry.grid}")


def _check_size(path: Path, entry: ArrayEntry, size: int) -> None:
    expected = entry.chunk_bytes + CHECKSUM_BYTES
    if size != expected:
        raise TruncatedChunkError(
            f"{path}: array {entry.path!r} has {size} bytes in this chunk, expected {expected}; {REPAIR}",
            path=path,
            array=entry.path,
            found=size,
            expected=expected,
        )


def _unreadable(path: Path, entry: ArrayEntry, error: OSError) -> ContextCorruptError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return MissingChunkError(
            f"{path}: a chunk of array {entry.path!r} is missing; {REPAIR}", path=path, array=entry.path
        )
    return ContextCorruptError(
        f"{path}: array {entry.path!r} cannot be read ({error.strerror}); check the disk and permissions",
        path=path,
        array=entry.path,
    )
