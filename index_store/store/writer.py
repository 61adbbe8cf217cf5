"""Writing one context, or more of one that is there: into a temporary folder, made durable, then renamed into place.

zarr describes arrays and groups, so that any zarr v3 reader opens them. Chunks bypass it: the raw little-endian array
is written without a copy, and its crc32c behind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from index_store.errors import ContextNotFoundError, InvalidArgumentError, MissingChunkError
from index_store.store.array_files import ArrayFiles
from index_store.store.description.array_entry import (
    ArrayEntry,
    conversation_entry,
    join_checksums,
    tokens_entry,
)
from index_store.store.description.dtypes import STORED_DTYPES, dtype_name
from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    locked_file,
    move_into_place,
    new_file,
    permissions_in,
    remove_tree,
    storing,
    sync_path,
    sync_tree,
    unused_name,
)
from index_store.store.files.leftovers import move_arrays, move_indexes
from index_store.store.stored_context import raw_bytes
from index_store.store.zarr_io import check_chunks, check_indices, check_metadata, chunk_path


class ContextWriter:
    """A context being written. Use as a context manager: leaving it without `publish` removes everything.

    Arrays are created from one thread, as zarr describes them; their chunks may be written from several at once. After
    an error nothing more can be written. A lock of the temporary folder's name
    is held while this object lives, so that a folder without one is known to be a dead writer's.
    """

    def __init__(
        self,
        contexts: Path,
        locks: Path,
        context_id: str,
        keep_existing: Callable[[], bool],
        folder: Path | None = None,
    ) -> None:
        """`keep_existing` tells whether a context already published under this id is to stay.

        folder: of the same file system, where the context is written until it is published, by whoever alone may write
        there. It stays, so that a later writer may adopt its chunks. By default one beside the contexts, which does
        not.
        """
        self._contexts = contexts
        self._locks = locks
        self._id = context_id
        self._keep_existing = keep_existing
        self._entries: dict[str, ArrayEntry] = {}
        self._described: dict[str, Any] = {}
        self._written: set[str] = set()
        self._given = folder
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._folder = self._given or unused_name(self._contexts, f"{TEMPORARY_PREFIX}{self._id}")
        with ExitStack() as stack:
            if self._given is None:
                stack.enter_context(locked_file(self._locks / self._folder.name))
            with storing("creating a temporary folder", self._folder):
                self._permissions = permissions_in(self._contexts)
                self._folder.mkdir(self._permissions, exist_ok=self._given is not None)
            if self._given is None:
                stack.callback(self._remove_folder)
            self._files = ArrayFiles(self._folder, self._permissions)
            stack.callback(self._files.seal)
            with storing("writing", self._folder):
                zarr.create_group(MemoryStore(self._described), zarr_format=3)
                self._write_described()
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    def create_array(self, path: str, shape: Sequence[int], chunks: Sequence[int], dtype: str) -> ArrayEntry:
        """Declares an array and returns its manifest entry, which gets its checksums when it is published.

        Raises ManifestError for a bad path, shape or dtype, StoreFullError when the disk is full.
        """
        entry = ArrayEntry(path, tuple(shape), tuple(chunks), dtype)
        if path in self._entries:
            raise InvalidArgumentError(f"array {path!r} was created before")
        with storing("writing", self._folder):
            zarr.create_array(
                MemoryStore(self._described),
                name=entry.path,
                shape=entry.shape,
                chunks=entry.chunks,
                dtype=STORED_DTYPES[entry.dtype].zarr_name,
                filters=None,
                compressors=[Crc32cCodec()],
                fill_value=0,
                attributes={"dtype": STORED_DTYPES[entry.dtype].name},
            )
            self._write_described()
        self._entries[path] = entry
        return entry

    def write_chunk(self, path: str, indices: Sequence[int], data: Tensor | NDArray[np.generic]) -> None:
        """Writes the chunk at `indices`, for example (layer, head); `data` has the chunk's shape and dtype.

        Leading sizes of 1 may be left out of the shape. Raises InvalidArgumentError when shape, dtype or indices do
        not fit the array, StoreFullError when the disk is full.
        """
        entry = self._entry(path)
        tensor = data if isinstance(data, Tensor) else torch.from_numpy(data)
        if _trim(tensor.shape) != _trim(entry.chunks):
            raise InvalidArgumentError(f"{path}: a chunk is {entry.chunks}, got {tuple(tensor.shape)}")
        check_indices(entry, indices)
        self.write_rows(path, indices, 0, tensor.reshape(_row_shape(entry, indices)))

    def write_rows(self, path: str, indices: Sequence[int], start: int, rows: Tensor) -> None:
        """Writes rows of the chunk at `indices`, from row `start` on: those of its first axis behind `indices`.

        The rows of a chunk come in order, by any threads, one at a time; from row 0 on it is begun anew. Their
        checksum is that of the memory they come from, and stands behind the last of them. Raises as `write_chunk`.
        """
        entry = self._entry(path)
        key, (count, *row) = self._key(entry, indices), _row_shape(entry, indices)
        if start + len(rows) > count or list(rows.shape[1:]) != row:
            raise InvalidArgumentError(
                f"{path}: a chunk is {entry.chunks}, got {tuple(rows.shape)} from row {start} on"
            )
        if dtype_name(rows.dtype) != entry.dtype:
            raise InvalidArgumentError(f"{path}: a chunk is {entry.dtype}, got {dtype_name(rows.dtype)}")
        raw = raw_bytes(rows.detach().cpu().contiguous())
        with storing("writing", self._folder):
            self._files.write_part(key, start * (entry.chunk_bytes // count), raw, entry.chunk_bytes)

    def write_bytes(self, path: str, indices: Sequence[int], start: int, raw: NDArray[np.uint8]) -> None:
        """Writes bytes of the chunk at `indices` from `start` on, in order, as `write_rows` does with rows."""
        entry = self._entry(path)
        with storing("writing", self._folder):
            self._files.write_part(self._key(entry, indices), start, raw, entry.chunk_bytes)

    def _write_described(self) -> None:
        """Writes what zarr has said of an array, and of new groups above it, over what an earlier writer left."""
        for key in sorted(self._described.keys() - self._written):
            self._files.write(key, self._described[key].to_bytes())
            self._written.add(key)

    def _key(self, entry: ArrayEntry, indices: Sequence[int]) -> str:
        return chunk_path(self._folder, entry, indices).relative_to(self._folder).as_posix()

    def _entry(self, path: str) -> ArrayEntry:
        if path not in self._entries:
            raise InvalidArgumentError(f"array {path!r} was not created; create_array comes first")
        return self._entries[path]

    def adopt_chunk(self, path: str, indices: Sequence[int], checksum: int) -> bool:
        """Counts a chunk as written that an earlier writer left in the given folder; False where it is another one."""
        entry = self._entries[path]
        return self._files.adopt_chunk(self._key(entry, indices), entry.chunk_bytes, checksum)

    def checksum(self, path: str, indices: Sequence[int]) -> int:
        """The crc32c of a chunk that was written. Raises MissingChunkError."""
        entry = self._entries[path]
        trailer = self._files.trailer(self._key(entry, indices))
        if trailer is None:
            place = chunk_path(self._folder, entry, indices)
            raise MissingChunkError(
                f"{place}: a chunk of array {path!r} was never written", path=place, array=path
            )
        return int.from_bytes(trailer, "little")

    def checksums(self, path: str) -> str:
        """Those of all chunks of an array, as its entry has them. Raises MissingChunkError for one never written."""
        return join_checksums(self.checksum(path, indices) for indices in self._entries[path].chunk_indices())

    def write_tokens(
        self, token_ids: Sequence[int] | Tensor | NDArray[np.integer], folder: str = ""
    ) -> ArrayEntry:
        """Writes the array of token ids and returns its entry. folder: that it lies in."""
        ids = np.asarray(token_ids).astype(np.uint32)
        return self._write_whole(tokens_entry(len(ids)).below(folder), torch.from_numpy(ids))

    def write_state(
        self, stored: Tensor | None, folder: str = "", marks: Sequence[Tensor] = ()
    ) -> ArrayEntry | None:
        """Writes packed states, uint8 [bytes], and returns their entry; None of a model without. folder: see above.

        marks: those behind earlier tokens, which come first.
        """
        if stored is None:
            return None
        size, all_of_them = len(stored), [*marks, stored]
        entry = ArrayEntry("state", (len(all_of_them) * size,), (size,), "uint8").below(folder)
        self.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        for number, each in enumerate(all_of_them):
            self.write_chunk(entry.path, (number,), each)
        return entry

    def write_conversation(self, data: bytes) -> ArrayEntry:
        """Writes what is kept of messages, as one array of bytes, and returns its entry."""
        return self._write_whole(
            conversation_entry(len(data)), torch.frombuffer(bytearray(data), dtype=torch.uint8)
        )

    def _write_whole(self, entry: ArrayEntry, data: Tensor) -> ArrayEntry:
        """An array of one chunk."""
        self.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        self.write_chunk(entry.path, (0,), data)
        return entry

    def sync(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Returns when all that was written is durable; `publish` sees to what was not waited for here.

        on_bytes: told how many bytes have become so, for progress. Raises StoreError where the disk refuses some.
        """
        with storing("writing", self._folder):
            self._files.sync(on_bytes)

    def publish(self, manifest: Manifest) -> Manifest:
        """Makes the context durable and visible, all at once; returns the manifest with the chunks' checksums.

        `manifest` holds the entries as `create_array` returned them, without checksums. Where the same content is
        there already, that one stays and what was written here is dropped; an expired or broken one is replaced.
        Raises InvalidArgumentError when the manifest lists other arrays than were written, a ContextCorruptError when
        a chunk was never written, StoreFullError when the disk is full.
        """
        sealed = self._seal(manifest, {})
        with storing("publishing", self._folder):
            self._write_manifest(sealed)
            move_into_place(self._folder, self._contexts / self._id, self._keep_existing)
        return sealed

    def publish_into(self, present: Manifest, manifest: Manifest) -> Manifest:
        """Has the published context `present` become `manifest`, all at once and durably; returns it with checksums.

        `manifest` is `present` with what may change (name, expiry, labels, methods) and with the indexes that were
        written here behind its own, without checksums. No file of the context but its manifest is replaced, so that who
        has it open keeps a valid view. The caller holds the context's lock. Whatever happens, readers see one or the
        other.
        Raises InvalidArgumentError for any other difference, ContextNotFoundError when the context was deleted
        meanwhile, and what `publish` raises.
        """
        allowed = replace(
            present,
            name=manifest.name,
            expires_at=manifest.expires_at,
            labels=manifest.labels,
            renew=manifest.renew,
            methods=manifest.methods,
            indexes=(*present.indexes, *manifest.indexes[len(present.indexes) :]),
        )
        if manifest != allowed:
            raise InvalidArgumentError(
                f"context {present.id[:12]} can get another name, expiry, labels, methods and further indexes; nothing "
                "else"
            )
        sealed = self._seal(manifest, {entry.path: entry for entry in present.arrays})
        self._exchange(sealed, manifest.stored_indexes - present.stored_indexes, "something was added to it")
        return sealed

    def publish_whole(self, manifest: Manifest) -> Manifest:
        """Has a published child become a context that stands alone, all at once and durably; returns what it is then.

        `manifest` is the child with all arrays anew, which were written here below WHOLE, and with the indexes; its
        messages stay. What may change at any time (name, expiry, labels, pin) is as it is now. The child's own arrays
        stay for who reads them now, until `Store.gc`. The caller holds the context's lock, and has looked that it is
        still a child. Raises what `publish_into` raises.
        """
        said = [] if manifest.conversation is None else [manifest.conversation]
        sealed = self._seal(manifest, {entry.path: entry for entry in said})
        self._exchange(sealed, manifest.stored_indexes, "it was made whole", whole=True)
        return sealed

    def _exchange(
        self, sealed: Manifest, indexes: Collection[str], what: str, *, whole: bool = False
    ) -> None:
        """Moves indexes, and of a child all arrays, to where the context is, and then the manifest over the old one."""
        target = self._contexts / self._id
        with storing("publishing", self._folder):
            self._write_manifest(sealed)
            try:
                if whole:
                    move_arrays(self._folder, target)
                move_indexes(indexes, self._folder, target)
                os.replace(self._folder / MANIFEST_NAME, target / MANIFEST_NAME)
                sync_path(target)
            except FileNotFoundError as error:
                raise ContextNotFoundError(
                    f"context {self._id} was deleted while {what}", context=self._id
                ) from error

    def _write_manifest(self, sealed: Manifest) -> None:
        """The last file; all are durable then."""
        self._files.sync(lambda _: None)
        with new_file(self._folder / MANIFEST_NAME, self._permissions) as file:
            file.write(MANIFESTS.render(sealed))
        sync_tree(self._folder)

    def _seal(self, manifest: Manifest, present: Mapping[str, ArrayEntry]) -> Manifest:
        """The manifest with the checksums of what was written, which must be what it lists besides `present`."""
        if manifest.id != self._id:
            raise InvalidArgumentError(f"manifest of context {manifest.id}, expected {self._id}")
        promised = {entry.path: entry for entry in manifest.arrays if entry.path not in present}
        if promised != self._entries:
            raise InvalidArgumentError(
                f"the manifest lists arrays {sorted(promised)}, written were {sorted(self._entries)}; they must be "
                "the entries that create_array returned"
            )
        known = {path: entry.checksums or "" for path, entry in present.items()}
        written = {path: self.checksums(path) for path in self._entries}
        sealed = manifest.with_checksums({**known, **written})
        entries = [entry for entry in sealed.arrays if entry.path in written]
        for problem in chain(check_metadata(self._folder, entries), check_chunks(self._folder, entries)):
            raise problem
        return replace(sealed, format_version=sealed.written_version)

    def _remove_folder(self) -> None:
        with storing("removing", self._folder):
            remove_tree(self._folder)


def _row_shape(entry: ArrayEntry, indices: Sequence[int]) -> tuple[int, ...]:
    """A chunk's shape without the leading ones that `indices` stand for: rows, and what each holds."""
    leading = 0
    while leading < min(len(indices), len(entry.chunks) - 1) and entry.chunks[leading] == 1:
        leading += 1
    return entry.chunks[leading:]


def _trim(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without its leading ones."""
    sizes = list(shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    return tuple(sizes)
