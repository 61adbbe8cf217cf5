"""How arrays lie on disk: zarr v3, one uncompressed chunk per entry, crc32c at its end.

Arrays are written through zarr, so that any zarr v3 reader opens them. Reading bypasses zarr: a chunk file is the
raw little-endian array followed by four bytes of crc32c, which is memory-mapped or read in place. Unlike zarr, which
fills what is missing with zeros, every reader here fails when a chunk is absent, short, long or altered.

No other module knows about chunk files.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from index_store.dtypes import STORED_DTYPES, dtype_name
from index_store.errors import (
    ArrayMetadataError,
    ChecksumError,
    ContextCorruptError,
    InvalidArgumentError,
    MissingChunkError,
    TruncatedChunkError,
)
from index_store.manifest import ArrayEntry

CHECKSUM_BYTES = 4
_METADATA = "zarr.json"
_PIECE_BYTES = 16 << 20
_REPAIR = "delete the context and prefill it again"


class _FolderStore(LocalStore):  # type: ignore[misc]  # zarr is not type-checked here
    """zarr's files in a folder, written by one thread at a time and never after `seal` or a failed write.

    zarr writes several files at once and, when one fails or its caller is interrupted, leaves the others to finish
    whenever they do: they would come back into a folder that is being removed.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writing = threading.Lock()
        self._ended: OSError | None = None

    def seal(self) -> None:
        """Waits for the write under way, if any; later ones raise."""
        with self._writing:
            self._ended = self._ended or OSError(errno.ESHUTDOWN, "writing has ended")

    def set_sync(self, key: str, value: Buffer) -> None:
        with self._writing:
            if self._ended is not None:
                raise OSError(self._ended.errno, self._ended.strerror)
            path = self.root / key
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.write(value.as_numpy_array().data)
            except OSError as error:
                self._ended = error
                raise

    async def set(self, key: str, value: Buffer) -> None:
        self.set_sync(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not (self.root / key).exists():
            self.set_sync(key, value)


class ArrayWriter:
    """Creates arrays below one folder and writes their chunks, through zarr.

    Chunks may be written by several threads. After an error nothing more can be written.
    """

    def __init__(self, folder: Path) -> None:
        self._store = _FolderStore(folder)
        # An array that is opened again forgets that empty chunks are to be written.
        self._arrays: dict[str, zarr.Array[Any]] = {}

    def open(self) -> None:
        """Creates the root group. Comes first."""
        zarr.create_group(self._store, zarr_format=3)

    def create(self, entry: ArrayEntry) -> None:
        """Creates the array without any chunk; it is complete once every chunk has been written."""
        dtype = STORED_DTYPES[entry.dtype]
        self._arrays[entry.path] = zarr.create_array(
            self._store,
            name=entry.path,
            shape=entry.shape,
            chunks=entry.chunks,
            dtype=dtype.zarr_name,
            filters=None,
            compressors=[Crc32cCodec()],
            fill_value=0,
            attributes={"dtype": dtype.name},
            # A chunk of zeros is data like any other: by default zarr would leave it out.
            config={"write_empty_chunks": True},
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
        region = tuple(
            slice(index * chunk, (index + 1) * chunk)
            for index, chunk in zip(_pad(entry, indices), entry.chunks, strict=True)
        )
        self._arrays[entry.path][region] = raw.view(STORED_DTYPES[entry.dtype].zarr_name).reshape(
            entry.chunks
        )

    def close(self) -> None:
        """Ends all writing, also by threads that zarr has left running."""
        self._store.seal()


def chunk_path(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> Path:
    """The file of the chunk at the given grid coordinates; coordinates left out are 0."""
    _check_indices(entry, indices)
    return folder.joinpath(entry.path, "c", *map(str, _pad(entry, indices)))


def check_metadata(folder: Path, entries: Sequence[ArrayEntry]) -> Iterator[ContextCorruptError]:
    """Compares every `zarr.json` with the entries; yields one error per file that says something else."""
    groups = {str(parent) for entry in entries for parent in Path(entry.path).parents}
    for group in sorted(groups):
        expected = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        yield from _compare(folder / group / _METADATA, group, expected)
    for entry in entries:
        yield from _compare(folder / entry.path / _METADATA, entry.path, _metadata(entry))


def check_sizes(folder: Path, entries: Iterable[ArrayEntry]) -> Iterator[ContextCorruptError]:
    """Looks for every chunk and yields one error per file that is absent or not exactly as long as it must be."""
    for entry in entries:
        for indices in entry.chunk_indices():
            path = chunk_path(folder, entry, indices)
            try:
                _check_size(path, entry, path.stat().st_size)
            except OSError as error:
                yield _unreadable(path, entry, error)
            except ContextCorruptError as error:
                yield error


def verify_chunks(
    folder: Path, entries: Iterable[ArrayEntry], on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[ContextCorruptError]:
    """Reads every byte of every chunk and yields one error per bad file. `on_bytes` is told what was read."""
    for entry in entries:
        buffer = torch.empty(entry.chunk_bytes, dtype=torch.uint8)
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

    With `verify` its crc32c is computed while reading. Raises MissingChunkError, TruncatedChunkError or
    ChecksumError, naming file and array; the buffer then holds garbage.
    """
    path = chunk_path(folder, entry, indices)
    raw = _bytes_of(buffer)
    if raw.size != entry.chunk_bytes:
        raise InvalidArgumentError(
            f"{entry.path}: a chunk has {entry.chunk_bytes} bytes, the buffer {raw.size}"
        )
    try:
        with path.open("rb", buffering=0) as file:
            _check_size(path, entry, os.fstat(file.fileno()).st_size)
            checksum = _fill(file.fileno(), raw, verify)
            stored = os.read(file.fileno(), CHECKSUM_BYTES)
    except OSError as error:
        raise _unreadable(path, entry, error) from error
    if verify and stored != checksum.to_bytes(CHECKSUM_BYTES, "little"):
        raise ChecksumError(
            f"{path}: array {entry.path!r} has crc32c {checksum:08x}, expected "
            f"{int.from_bytes(stored, 'little'):08x}; the file was altered or damaged: {_REPAIR}",
            path=path,
            array=entry.path,
            found=f"{checksum:08x}",
            expected=f"{int.from_bytes(stored, 'little'):08x}",
        )


def _fill(descriptor: int, raw: NDArray[np.uint8], verify: bool) -> int:
    """Fills the buffer from the file's position; returns the crc32c of what was read (0 without `verify`)."""
    checksum = 0
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
    grid = [size // chunk for size, chunk in zip(entry.shape, entry.chunks, strict=True)]
    inside = len(indices) <= len(grid) and all(
        0 <= index < count for index, count in zip(indices, grid, strict=False)
    )
    if not inside:
        raise InvalidArgumentError(f"{entry.path}: chunk {tuple(indices)} is outside the grid {tuple(grid)}")


def _check_size(path: Path, entry: ArrayEntry, size: int) -> None:
    expected = entry.chunk_bytes + CHECKSUM_BYTES
    if size != expected:
        raise TruncatedChunkError(
            f"{path}: array {entry.path!r} has {size} bytes in this chunk, expected {expected}; {_REPAIR}",
            path=path,
            array=entry.path,
            found=size,
            expected=expected,
        )


def _unreadable(path: Path, entry: ArrayEntry, error: OSError) -> ContextCorruptError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return MissingChunkError(
            f"{path}: a chunk of array {entry.path!r} is missing; {_REPAIR}", path=path, array=entry.path
        )
    return ContextCorruptError(
        f"{path}: array {entry.path!r} cannot be read ({error.strerror}); check the disk and permissions",
        path=path,
        array=entry.path,
    )


def _metadata(entry: ArrayEntry) -> dict[str, object]:
    """What `zarr.json` of the array must say."""
    dtype = STORED_DTYPES[entry.dtype]
    to_bytes: dict[str, object] = {"name": "bytes"}
    if dtype.itemsize > 1:
        to_bytes["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(entry.shape),
        "data_type": dtype.zarr_name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(entry.chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [to_bytes, {"name": "crc32c"}],
        "fill_value": 0,
        "attributes": {"dtype": dtype.name},
        "storage_transformers": [],
    }


def _compare(path: Path, array: str, expected: dict[str, object]) -> Iterator[ContextCorruptError]:
    """Yields an error for the first field of a `zarr.json` that differs from what it must say."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        yield ArrayMetadataError(
            f"{path}: metadata of {array!r} is missing; {_REPAIR}", path=path, array=array
        )
        return
    except (OSError, ValueError, RecursionError) as error:
        yield ArrayMetadataError(
            f"{path}: metadata of {array!r} cannot be read ({error}); {_REPAIR}", path=path, array=array
        )
        return
    document = found if isinstance(found, dict) else {}
    for field in sorted(expected.keys() | document.keys()):
        # What is empty may as well be left out: zarr's versions differ in that.
        if (document.get(field) or None) != (expected.get(field) or None):
            yield ArrayMetadataError(
                f"{path}: metadata of {array!r} says {field} = {document.get(field)!r}, the manifest says "
                f"{expected.get(field)!r}; {_REPAIR}",
                path=path,
                array=array,
                field=field,
                found=document.get(field),
                expected=expected.get(field),
            )
            return
