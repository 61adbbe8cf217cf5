"""A context as one file: exported, imported, and as an object of an object store.

28 bytes come first: MAGIC, the file's version, the manifest's length (uint32 each), the file's length (uint64) and the
crc32c of all these, little-endian. Behind them stands the manifest as `manifest.json` has it, sealed by a checksum of
its own, and then the file of every chunk, its crc32c behind it, in the order of `parts_of`: what a first token needs
first. Where a part lies and what its checksum must be follows from the manifest.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from index_store.errors import (
    ChecksumError,
    ContextCorruptError,
    ContextElsewhereError,
    ContextFileError,
    ContextNotFoundError,
    FormatVersionError,
    ParentMissingError,
)
from index_store.store.catalog import Store, free_name
from index_store.store.clean_up import note_use
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import MANIFESTS, Manifest
from index_store.store.files.durable import CHECKSUM_BYTES, TEMPORARY_PREFIX, storing, sync_path, unused_name
from index_store.store.files.reading import WrongFileError, file_threads, open_regular, unavailable
from index_store.store.zarr_io import chunk_file, extend_crc32c

MAGIC = b"SPARSEKV"
FILE_VERSION = 1

_HEAD = struct.Struct("<8sIIQ")
HEAD_BYTES = _HEAD.size + CHECKSUM_BYTES
_FIRST_READ = 1 << 18
_LARGEST_MANIFEST = 64 << 20
_RANGE_BYTES = 8 << 20
"""Of one read: small parts are read together, large ones in pieces."""
_ATTEMPTS = 3
"""Of a part whose checksum is wrong: what spoiled it may have been the way here."""
_LOOK_S = 0.25


class Source(Protocol):
    """The bytes of one file, wherever it is. Read by several threads."""

    where: str
    """As errors name it."""
    size: int

    def read(self, start: int, count: int) -> bytes:
        """Exactly so many bytes. Raises StoreUnavailableError, or ContextFileError where the file is shorter."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk in the file: where it begins, and how many bytes it has with the checksum behind them."""

    entry: ArrayEntry
    indices: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file's beginning says: the context, and where each of its parts is."""

    manifest: Manifest
    parts: Sequence[Part]

    def some(self, entries: Iterable[ArrayEntry]) -> Sequence[Part]:
        """The parts of some arrays."""
        paths = {entry.path for entry in entries}
        return [part for part in self.parts if part.entry.path in paths]


def parts_of(manifest: Manifest, start: int) -> Sequence[Part]:
    """Every chunk, laid out from byte `start` on: tokens, messages and states, then layer by layer keys, values and
    indexes, and the sample of the queries, which no token needs, at the end."""
    whole = [entry for entry in (manifest.tokens, manifest.conversation, manifest.state) if entry is not None]
    order = [(entry, indices) for entry in whole for indices in entry.chunk_indices()]
    rows, apart = manifest.layers_of, (*whole, manifest.queries)
    layered = [entry for entry in manifest.arrays if entry not in apart]
    places = [
        (rows[entry.path][indices[0]], entry, indices)
        for entry in layered
        for indices in entry.chunk_indices()
    ]
    order += [(entry, indices) for _, entry, indices in sorted(places, key=lambda place: place[0])]
    if manifest.queries is not None:
        order += [(manifest.queries, indices) for indices in manifest.queries.chunk_indices()]
    parts = []
    for entry, indices in order:
        parts.append(Part(entry, indices, start, entry.chunk_bytes + CHECKSUM_BYTES))
        start += parts[-1].nbytes
    return parts


def _end(parts: Sequence[Part]) -> int:
    return parts[-1].start + parts[-1].nbytes


def file_bytes(manifest: Manifest) -> int:
    """Length of the context's file."""
    return _end(parts_of(manifest, HEAD_BYTES + len(MANIFESTS.render(manifest))))


def packed(store: Store, manifest: Manifest, said: Manifest | None = None) -> Iterator[bytes]:
    """The bytes of a context's file, piece by piece, from what the store holds.

    said: what stands in the file in place of the manifest, with the same arrays. Every checksum is verified before the
    piece behind a chunk comes: raises a ContextCorruptError or StoreUnavailableError, and the file is then to be
    dropped.
    """
    head = MANIFESTS.render(said or manifest)
    parts = parts_of(manifest, HEAD_BYTES + len(head))
    begins = _HEAD.pack(MAGIC, FILE_VERSION, len(head), _end(parts))
    yield begins + google_crc32c.value(begins).to_bytes(CHECKSUM_BYTES, "little") + head
    folder = store.folders.context(manifest.id)
    for part in parts:
        yield from chunk_file(folder, part.entry, part.indices)


def read_contents(source: Source) -> Contents:
    """Reads and checks a file's beginning.

    Raises ContextFileError, which names what was found, FormatVersionError for a file or manifest of another version,
    a ContextCorruptError of the manifest, and what the source raises.
    """
    where = source.where
    first = source.read(0, min(source.size, _FIRST_READ))
    if not first.startswith(MAGIC):
        raise ContextFileError(
            f"{where}: no file of a context: it begins with {first[: len(MAGIC)]!r}, expected {MAGIC!r}; files are "
            "made by `index-store export`",
            path=where,
        )
    if len(first) < HEAD_BYTES:
        raise _damaged(where, f"has {source.size} bytes, expected {HEAD_BYTES} and more")
    sealed = int.from_bytes(first[_HEAD.size : HEAD_BYTES], "little")
    if sealed != google_crc32c.value(first[: _HEAD.size]):
        raise _damaged(where, f"does not have the checksum {sealed:08x} over its first {_HEAD.size} bytes")
    _, version, length, total = _HEAD.unpack_from(first)
    if version != FILE_VERSION:
        raise FormatVersionError(
            f"{where}: the file has version {version}, this program reads version {FILE_VERSION}; update sparsekv",
            found=version,
            expected=FILE_VERSION,
            path=where,
        )
    if source.size != total or length > _LARGEST_MANIFEST or HEAD_BYTES + length > total:
        raise _damaged(where, f"has {source.size} bytes, its beginning says {total}")
    rest = HEAD_BYTES + length - len(first)
    if rest > 0:
        first += source.read(len(first), rest)
    manifest = MANIFESTS.parse(first[HEAD_BYTES : HEAD_BYTES + length], where)
    parts = parts_of(manifest, HEAD_BYTES + length)
    if _end(parts) != total:
        raise _damaged(where, f"has {total} bytes, its manifest describes {_end(parts)}")
    return Contents(manifest, parts)


def _damaged(where: str, said: str) -> ContextFileError:
    return ContextFileError(
        f"{where}: the file of a context {said}; it was cut or damaged: export or copy it again", path=where
    )


Write = Callable[[str, Sequence[int], int, NDArray[np.uint8]], None]
"""Takes bytes of a chunk: array, grid coordinates, where in the chunk they begin. In order for each chunk."""


def receive(
    source: Source,
    parts: Sequence[Part],
    write: Write,
    on_bytes: Callable[[int], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
    threads: int = 0,
) -> None:
    """Reads parts of a file in parallel ranges, the first ones first, and verifies each against the manifest.

    write: gets what was read before it is verified; a part that is wrong is read once more, from its beginning. check:
    called now and then; what it raises ends reading. Raises ChecksumError for the first part that stays wrong, and what
    the source and `write` raise.
    """
    pool = ThreadPoolExecutor(threads or file_threads(), thread_name_prefix="ranges")
    stopped = threading.Event()

    def take(span: Sequence[Part]) -> int:
        for attempt in range(_ATTEMPTS):
            if stopped.is_set():
                return 0
            try:
                _take(source, span, write)
                break
            except ChecksumError:
                if attempt == _ATTEMPTS - 1:
                    raise
        return sum(part.nbytes for part in span)

    try:
        pending = {pool.submit(take, span) for span in _spans(parts)}
        while pending:
            done, pending = wait(pending, _LOOK_S, FIRST_COMPLETED)
            for each in done:
                on_bytes(each.result())
            check()
    finally:
        stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _spans(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Neighbours that are read together."""
    span: list[Part] = []
    for part in parts:
        if span and (part.start != _end(span) or _end([part]) - span[0].start > _RANGE_BYTES):
            yield span
            span = []
        span.append(part)
    if span:
        yield span


def _take(source: Source, span: Sequence[Part], write: Write) -> None:
    """Reads parts that follow each other: all at once, or a large one in pieces."""
    begin, end = span[0].start, _end(span)
    if len(span) > 1:
        read = memoryview(source.read(begin, end - begin))
        for part in span:
            place = part.start - begin
            _check_part(source, part, [read[place : place + part.nbytes]], write)
        return
    pieces = (source.read(at, min(_RANGE_BYTES, end - at)) for at in range(begin, end, _RANGE_BYTES))
    _check_part(source, span[0], pieces, write)


def _check_part(source: Source, part: Part, pieces: Iterable[bytes | memoryview], write: Write) -> None:
    found = done = 0
    trailer = b""
    for piece in pieces:
        raw = np.frombuffer(piece, np.uint8)
        data = raw[: max(0, part.entry.chunk_bytes - done)]
        if data.size:
            found = extend_crc32c(found, data)
            write(part.entry.path, part.indices, done, data)
            done += data.size
        trailer += raw[data.size :].tobytes()
    expected = part.entry.checksum(part.indices)
    said = int.from_bytes(trailer, "little")
    if not found == said == expected:
        raise ChecksumError(
            f"{source.where}: array {part.entry.path!r} has crc32c {found:08x} in chunk {part.indices}, bytes "
            f"{part.start} to {part.start + part.nbytes}; the file says {said:08x} there, its manifest {expected:08x}: "
            "the file was altered or damaged; export or copy it again",
            path=source.where,
            array=part.entry.path,
            found=f"{found:08x}",
            expected=f"{expected:08x}",
        )


def nowhere(path: str, indices: Sequence[int], start: int, raw: NDArray[np.uint8]) -> None:
    """A `Write` of who only verifies."""


class LocalFile:
    """A file of this machine, as a Source."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.where, self.size, self._descriptor = str(path), size, descriptor

    def read(self, start: int, count: int) -> bytes:
        try:
            found = os.pread(self._descriptor, count, start)
        except OSError as error:
            raise unavailable(Path(self.where), error) from error
        if len(found) != count:
            raise _damaged(self.where, f"ends at byte {start + len(found)}")
        return found


@contextmanager
def open_file(path: Path) -> Iterator[LocalFile]:
    """Raises ContextFileError for what is no file, StoreUnavailableError for one that cannot be read."""
    try:
        with open_regular(path) as (descriptor, status):
            yield LocalFile(path, descriptor, status.st_size)
    except WrongFileError as error:
        raise ContextFileError(
            f"{path}: {error.strerror}; expected one that `index-store export` wrote", path=path
        ) from error
    except OSError as error:
        raise unavailable(path, error) from error


def export_context(
    store: Store, manifest: Manifest, path: Path, on_bytes: Callable[[int], None] = lambda _: None
) -> int:
    """Writes the context's file, all at once and durably; returns its length.

    Raises StoreFullError or StoreError, and what `packed` raises; there is then no file that was not there before.
    """
    store.bring(manifest.id)
    temporary = unused_name(path.parent, f"{TEMPORARY_PREFIX}{path.name}")
    try:
        with storing("writing", path):
            with open(temporary, "xb") as file:
                for piece in packed(store, manifest):
                    file.write(piece)
                    note_use(store, manifest.id)  # so that it stays on the disk meanwhile
                    on_bytes(len(piece))
                nbytes = file.tell()
            sync_path(temporary)
            os.replace(temporary, path)
            sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return nbytes


def import_context(
    store: Store, path: Path, on_bytes: Callable[[int], None] = lambda _: None
) -> tuple[Manifest, bool]:
    """Brings a file's context into a store, verified before it appears; whether it was not there before.

    One that is there already stays as it is; where another has its name, it gets digits of its id behind that. A child
    needs its parent in the store. Raises ParentMissingError, what `read_contents` and `receive` raise, StoreFullError
    or StoreError.
    """
    with open_file(path) as source:
        contents = read_contents(source)
        manifest = contents.manifest
        _require_parent(store, manifest)
        with store.lock(manifest.id):
            try:
                return store.check(manifest.id, expired=True), False
            except ContextElsewhereError:
                return store.manifest(manifest.id), False
            except (ContextNotFoundError, ContextCorruptError):
                pass  # what is damaged is replaced
            name = free_name(store, manifest.name, manifest.model.fingerprint, manifest.id, manifest.tenant)
            unwritten = dict.fromkeys(entry.path for entry in manifest.arrays)
            draft = replace(manifest.with_checksums(unwritten), name=name)
            with store.writer(manifest.id) as writer:
                for entry in draft.arrays:
                    writer.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
                receive(source, contents.parts, writer.write_bytes, on_bytes)
                if manifest.parent is None:
                    return writer.publish(draft), True
                with store.family_lock(manifest.parent.id):
                    _require_parent(store, manifest)
                    return writer.publish(draft), True


def _require_parent(store: Store, manifest: Manifest) -> None:
    if manifest.parent is None:
        return
    try:
        store.manifest(manifest.parent.id)
    except ContextNotFoundError:
        raise ParentMissingError(
            f"context {manifest.id[:12]} continues context {manifest.parent.id}, which is not in the store; import "
            "that one first (`index-store export --with-parents` writes both)",
            context=manifest.id,
            parent=manifest.parent.id,
        ) from None
