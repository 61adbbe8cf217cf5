"""How arrays lie on disk, and reading them: zarr v3, one uncompressed chunk per entry, crc32c at its end.

A chunk file is the raw little-endian array followed by four bytes of crc32c, which is memory-mapped or read in place.
Unlike zarr, which fills what is missing with zeros, every reader here fails when a chunk is absent, short, long or
altered, or is an intact one that belongs elsewhere: its checksum is then not the one that the array's entry has for
this place. What cannot be read at the moment is a StoreUnavailableError, and not called damaged.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from index_store.errors import (
    REPAIR,
    ArrayMetadataError,
    ChecksumError,
    ContextCorruptError,
    ContextNotFoundError,
    InvalidArgumentError,
    MissingChunkError,
    StoreUnavailableError,
    TruncatedChunkError,
    UnexpectedFileError,
)
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.dtypes import STORED_DTYPES
from index_store.store.description.json_fields import shown
from index_store.store.description.manifest import MANIFEST_NAME, Manifest
from index_store.store.files.durable import CHECKSUM_BYTES
from index_store.store.files.leftovers import replaced_arrays
from index_store.store.files.reading import (
    READ_LIMIT_S,
    WrongFileError,
    file_threads,
    may_block,
    open_regular,
    read_bounded,
    read_file,
    unavailable,
)

Extend = Callable[[int, NDArray[np.uint8]], int]


def _unlocked() -> Extend | None:
    """The C library's function; None where the package was built without it, or hides it."""
    try:
        from google_crc32c import _crc32c

        function = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32

    def extend(checksum: int, raw: NDArray[np.uint8]) -> int:
        found: int = function(checksum, raw.ctypes.data, raw.size)
        return found

    return extend


_extend: Extend = _unlocked() or google_crc32c.extend


def extend_crc32c(checksum: int, raw: NDArray[np.uint8]) -> int:
    """The crc32c of what has `checksum` so far (0 of nothing) and of these contiguous bytes behind it."""
    return _extend(checksum, raw)


METADATA_NAME = "zarr.json"
_PIECE_BYTES = (2 if file_threads() <= 4 else 8) << 20
"""Of one read and its checksum. Small pieces stay in the processor's cache; where many threads read, what they wait for
is the interpreter's lock, which each of them takes twice a piece."""
_FORGOTTEN_BYTES = 4 << 20
_LARGEST_METADATA = 1 << 20
_LEFT_OUT = frozenset({"attributes", "storage_transformers", "dimension_names", "consolidated_metadata"})
"""Fields of a `zarr.json` that have nothing to say here."""

Problem = ContextCorruptError | StoreUnavailableError
"""What is wrong with a file: it is damaged, or cannot be read now."""


def check_metadata(folder: Path, entries: Sequence[ArrayEntry]) -> Iterator[Problem]:
    """Compares every `zarr.json` with the entries; yields one error per file that says something else."""
    for path, expected in metadata(entries).items():
        yield from compare_metadata(folder / path / METADATA_NAME, path, expected)


def metadata(entries: Iterable[ArrayEntry]) -> dict[str, dict[str, object]]:
    """What every `zarr.json` must say, by the path of its group or array; groups first."""
    entries = list(entries)
    groups = sorted({str(parent) for entry in entries for parent in Path(entry.path).parents})
    group: dict[str, object] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    return {**dict.fromkeys(groups, group), **{entry.path: _metadata(entry) for entry in entries}}


def chunk_path(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> Path:
    """The file of the chunk at the given grid coordinates; coordinates left out are 0."""
    check_indices(entry, indices)
    return folder.joinpath(entry.path, "c", *map(str, _pad(entry, indices)))


def check_chunks(folder: Path, entries: Iterable[ArrayEntry]) -> Iterator[Problem]:
    """Looks at every chunk without reading it; yields one error per file that cannot be the one that was written.

    Such a file is absent, not exactly as long as it must be, or ends with another checksum than the entry has. Only
    in that last case is it read, to tell a damaged chunk from one that belongs elsewhere.
    """
    for entry in entries:
        for indices in entry.chunk_indices():
            try:
                if _trailer(folder, entry, indices) != entry.checksum(indices):
                    read_chunk(folder, entry, indices, Forgotten())
            except (ContextCorruptError, StoreUnavailableError) as error:
                yield error


def verify_chunks(
    folder: Path, entries: Iterable[ArrayEntry], on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[Problem]:
    """Reads every byte of every chunk and yields one error per bad file. `on_bytes` is told what was read."""
    pieces = Forgotten()
    for entry in entries:
        for indices in entry.chunk_indices():
            try:
                read_chunk(folder, entry, indices, pieces)
            except (ContextCorruptError, StoreUnavailableError) as error:
                yield error
            on_bytes(entry.chunk_bytes)


def map_chunk(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> NDArray[np.uint8]:
    """The bytes of a chunk's memory-mapped file.

    The mapping is copy-on-write: a stray write reaches neither the file nor other processes. Its checksum is not
    read. Raises MissingChunkError, TruncatedChunkError or StoreUnavailableError.
    """
    path = chunk_path(folder, entry, indices)
    with _opened(path, entry) as descriptor, open(descriptor, "rb", closefd=False) as file:
        return np.memmap(file, dtype=np.uint8, mode="c", shape=(entry.chunk_bytes,))


class Pieces(Protocol):
    """Takes a chunk's bytes piece by piece, in order."""

    def buffer(self, start: int, left: int) -> NDArray[np.uint8]:
        """Host memory for the bytes from `start` on: for 1 to `left` of them."""
        ...

    def filled(self, start: int, count: int) -> None:
        """The buffer that was handed out last holds these bytes."""
        ...


class Forgotten:
    """Pieces that are read only for their checksum, into memory that stays in the processor's cache."""

    def __init__(self) -> None:
        self._raw = np.empty(_FORGOTTEN_BYTES, dtype=np.uint8)

    def buffer(self, start: int, left: int) -> NDArray[np.uint8]:
        return self._raw[:left]

    def filled(self, start: int, count: int) -> None:
        pass


def read_chunk(
    folder: Path, entry: ArrayEntry, indices: Sequence[int], into: NDArray[np.uint8] | Pieces
) -> None:
    """Reads the chunk straight into as many bytes of memory, or through buffers that are smaller than it.

    Its crc32c is computed while reading, and must be the one at the file's end and the entry's. Raises
    MissingChunkError, TruncatedChunkError, ChecksumError or StoreUnavailableError, naming file and array; what the
    bytes went into then holds garbage.
    """
    if isinstance(into, np.ndarray) and into.size != entry.chunk_bytes:
        raise InvalidArgumentError(
            f"{entry.path}: a chunk has {entry.chunk_bytes} bytes, the buffer {into.size}"
        )
    path = chunk_path(folder, entry, indices)
    checksum = done = 0
    with _opened(path, entry) as descriptor:
        while done < entry.chunk_bytes:
            raw = into if isinstance(into, np.ndarray) else into.buffer(done, entry.chunk_bytes - done)
            checksum = _fill(path, descriptor, raw, checksum)
            if not isinstance(into, np.ndarray):
                into.filled(done, raw.size)
            done += raw.size
        with may_block(path):
            trailer = int.from_bytes(os.read(descriptor, CHECKSUM_BYTES), "little")
    _check_checksum(path, entry, checksum, trailer, entry.checksum(indices))


def chunk_file(folder: Path, entry: ArrayEntry, indices: Sequence[int]) -> Iterator[bytes]:
    """The bytes of a chunk's file, piece by piece. Raises as `read_chunk`, also behind the last piece."""
    path, checksum, done = chunk_path(folder, entry, indices), 0, 0
    with _opened(path, entry) as descriptor:
        while done < entry.chunk_bytes:
            with may_block(path):
                piece = os.read(descriptor, min(_PIECE_BYTES, entry.chunk_bytes - done))
            if not piece:
                raise WrongFileError("a file that shrank while it was read")
            checksum = extend_crc32c(checksum, np.frombuffer(piece, np.uint8))
            done += len(piece)
            yield piece
        with may_block(path):
            last = os.read(descriptor, CHECKSUM_BYTES)
    _check_checksum(path, entry, checksum, int.from_bytes(last, "little"), entry.checksum(indices))
    yield last


@contextmanager
def _opened(path: Path, entry: ArrayEntry) -> Iterator[int]:
    """The open file of a chunk, of the right length. Raises like `read_chunk` for what cannot be read, inside too."""
    try:
        with open_regular(path) as (descriptor, status):
            _check_size(path, entry, status.st_size)
            yield descriptor
    except OSError as error:
        raise _unreadable(path, entry, error) from error


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
    """The checksum at the end of a chunk's file. Raises like `read_chunk` for a file that cannot hold one."""
    path = chunk_path(folder, entry, indices)
    with _opened(path, entry) as descriptor, may_block(path):
        return int.from_bytes(os.pread(descriptor, CHECKSUM_BYTES, entry.chunk_bytes), "little")


def _fill(path: Path, descriptor: int, raw: NDArray[np.uint8], checksum: int) -> int:
    """Fills the buffer from the file's position; returns `checksum` continued by what was read."""
    done = 0
    while done < raw.size:
        # Pieces that stay in the cache between the read and the checksum.
        with may_block(path):
            count = os.readv(descriptor, [raw[done : done + _PIECE_BYTES].data])
        if count == 0:
            raise WrongFileError("a file that shrank while it was read")
        checksum = extend_crc32c(checksum, raw[done : done + count])
        done += count
    return checksum


def _pad(entry: ArrayEntry, indices: Sequence[int]) -> tuple[int, ...]:
    return (*indices, *([0] * (len(entry.shape) - len(indices))))


def check_indices(entry: ArrayEntry, indices: Sequence[int]) -> None:
    """Raises InvalidArgumentError for coordinates outside of the array's grid."""
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


def _unreadable(path: Path, entry: ArrayEntry, error: OSError) -> Problem:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return MissingChunkError(
            f"{path}: a chunk of array {entry.path!r} is missing; {REPAIR}", path=path, array=entry.path
        )
    if isinstance(error, WrongFileError):
        return ContextCorruptError(
            f"{path}: a chunk of array {entry.path!r} is {error.strerror}; {REPAIR}",
            path=path,
            array=entry.path,
        )
    return unavailable(path, error)


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


def compare_metadata(path: Path, array: str, expected: dict[str, object]) -> Iterator[Problem]:
    """Yields an error for the first field of a `zarr.json` that differs from what it must say."""
    try:
        found = json.loads(read_file(path, _LARGEST_METADATA)[0])
    except (FileNotFoundError, NotADirectoryError):
        yield ArrayMetadataError(
            f"{path}: metadata of {array!r} is missing; {REPAIR}", path=path, array=array
        )
        return
    except (WrongFileError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, WrongFileError) else error
        yield ArrayMetadataError(
            f"{path}: metadata of {array!r} cannot be used ({said}); {REPAIR}", path=path, array=array
        )
        return
    except OSError as error:
        yield unavailable(path, error)
        return
    document = found if isinstance(found, dict) else {}
    for field in sorted(expected.keys() | document.keys()):
        # What is empty may as well be left out: zarr's versions differ in that.
        unknown = field not in expected and field not in _LEFT_OUT
        if unknown or (document.get(field) or None) != (expected.get(field) or None):
            name, said, wanted = (shown(field)[1:-1], shown(document.get(field)), shown(expected.get(field)))
            yield ArrayMetadataError(
                f"{path}: metadata of {array!r} says {name} = {said}, the manifest says {wanted}; {REPAIR}",
                path=path,
                array=array,
                field=name,
                found=said,
                expected=wanted,
            )
            return


class ContextFiles:
    """A stored context, read-only. Nothing is held open between calls."""

    def __init__(self, folder: Path, manifest: Manifest, read_limit_s: float = READ_LIMIT_S) -> None:
        """read_limit_s: how long one step of reading may take."""
        self.read_limit_s = read_limit_s
        self._folder = folder
        self._manifest = manifest
        self._entries = {entry.path: entry for entry in manifest.arrays}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def token_ids(self) -> NDArray[np.uint32]:
        """The context's token ids, [N]. Their checksum is verified."""
        return self._small(self._manifest.tokens.path).view("<u4")

    def conversation(self) -> bytes | None:
        """The messages that the context was made of, as they were written; None without. Their checksum is verified."""
        return None if self._manifest.conversation is None else self._small("conversation").tobytes()

    def _small(self, path: str, chunk: int = 0) -> NDArray[np.uint8]:
        """The bytes of a chunk of an array of one dimension, which has one chunk or few."""
        entry = self._entry(path)
        raw = np.empty(entry.chunk_bytes, np.uint8)
        read_bounded(lambda: self._read(entry, (chunk,), raw), self.read_limit_s)
        return raw

    def close(self) -> None:
        """Ends the use of this object. What was handed out stays valid."""
        self._closed = True

    def _read(self, entry: ArrayEntry, indices: tuple[int, ...], out: NDArray[np.uint8] | Pieces) -> None:
        try:
            read_chunk(self._folder, entry, indices, out)
        except MissingChunkError:
            self._check_present()
            raise

    def _entry(self, path: str) -> ArrayEntry:
        if self._closed:
            raise InvalidArgumentError(f"context {self._manifest.id[:12]} was closed; open it again")
        if path not in self._entries:
            raise InvalidArgumentError(f"no array {path!r}; the context has {', '.join(self._entries)}")
        return self._entries[path]

    def _check_present(self) -> None:
        # Deleted while in use is no corruption.
        if not self._folder.exists():
            raise ContextNotFoundError(
                f"context {self._manifest.id} was deleted while it was being read", context=self._manifest.id
            )


def unexpected_files(folder: Path, manifest: Manifest) -> Iterator[UnexpectedFileError]:
    """Yields one error per file, or link to a folder, that is not part of the context."""
    replaced = set(replaced_arrays(folder, manifest.array_folder))
    expected = {folder / MANIFEST_NAME}
    for entry in manifest.arrays:
        nodes = (Path(entry.path), *Path(entry.path).parents)
        expected.update(folder / node / METADATA_NAME for node in nodes)
        expected.update(chunk_path(folder, entry, indices) for indices in entry.chunk_indices())
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent, name) not in replaced]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for path in sorted(Path(parent, name) for name in (*files, *links)):
            if path not in expected:
                yield UnexpectedFileError(
                    f"{path}: not part of the context, expected only what its manifest lists; nothing reads it: "
                    "remove the file, or delete the context (`index-store rm`) and make it again",
                    path=path,
                )
