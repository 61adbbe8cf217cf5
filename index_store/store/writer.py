"""Writing one context: into a temporary folder, made durable, then renamed into place."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.store.folders import lock_folder, remove_tree, storing, sync_path, sync_tree, unused_name
from index_store.store.manifest import ArrayEntry, Manifest, tokens_entry
from index_store.store.manifest_json import render_manifest
from index_store.store.zarr_io import ArrayWriter, check_chunks, read_chunk_pieces
from index_store.store.zarr_metadata import check_metadata

TEMPORARY_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"
MANIFEST_NAME = "manifest.json"


_READERS = 4
_PIECE_BYTES = 4 << 20


class _Pieces:
    """Takes pieces of a chunk into memory that stays in the processor's cache, and forgets them."""

    def __init__(self) -> None:
        self._raw = np.empty(_PIECE_BYTES, dtype=np.uint8)

    def buffer(self, start: int, left: int) -> NDArray[np.uint8]:
        return self._raw[:left]

    def filled(self, start: int, count: int) -> None:
        pass


class ContextWriter:
    """A context being written. Use as a context manager: leaving it without `publish` removes everything.

    Arrays are created from one thread; their chunks may be written from several. The temporary folder is locked
    while this object lives, so that a folder without a lock is known to be a dead writer's.
    """

    def __init__(self, contexts: Path, context_id: str, keep_existing: Callable[[], bool]) -> None:
        """`keep_existing` tells whether a context already published under this id is to stay."""
        self._contexts = contexts
        self._id = context_id
        self._keep_existing = keep_existing
        self._entries: dict[str, ArrayEntry] = {}
        self._lock: int | None = None

    def __enter__(self) -> Self:
        with storing("creating a temporary folder", self._contexts):
            while self._lock is None:
                self._folder = unused_name(self._contexts, f"{TEMPORARY_PREFIX}{self._id}")
                self._folder.mkdir()
                # A clean-up running between these two lines takes the folder away: make another.
                self._lock = lock_folder(self._folder)
        self._arrays = ArrayWriter(self._folder)
        try:
            with storing("writing", self._folder):
                self._arrays.open()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._discard()

    def create_array(self, path: str, shape: Sequence[int], chunks: Sequence[int], dtype: str) -> ArrayEntry:
        """Declares an array and returns its manifest entry, which gets its checksums when it is published.

        Raises ManifestError for a bad path, shape or dtype, StoreFullError when the disk is full.
        """
        entry = ArrayEntry(path, tuple(shape), tuple(chunks), dtype)
        if path in self._entries:
            raise InvalidArgumentError(f"array {path!r} was created before")
        with storing("writing", self._folder):
            self._arrays.create(entry)
        self._entries[path] = entry
        return entry

    def write_chunk(self, path: str, indices: Sequence[int], data: Tensor | NDArray[np.generic]) -> None:
        """Writes the chunk at `indices`, for example (layer, head); `data` has the chunk's shape and dtype.

        Leading sizes of 1 may be left out of the shape. Raises InvalidArgumentError when shape, dtype or indices do
        not fit the array, StoreFullError when the disk is full.
        """
        if path not in self._entries:
            raise InvalidArgumentError(f"array {path!r} was not created; create_array comes first")
        tensor = data if isinstance(data, Tensor) else torch.from_numpy(data)
        with storing("writing", self._folder):
            self._arrays.write_chunk(self._entries[path], indices, tensor)

    def write_tokens(self, token_ids: Sequence[int] | Tensor | NDArray[np.integer]) -> ArrayEntry:
        """Writes the array of token ids and returns its entry."""
        ids = np.asarray(token_ids).astype(np.uint32)
        entry = tokens_entry(len(ids))
        self.create_array(entry.path, entry.shape, entry.chunks, entry.dtype)
        self.write_chunk(entry.path, (0,), ids)
        return entry

    def verify(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Reads back every chunk of every array, several at a time; raises a ContextCorruptError that it came upon.

        A chunk that was never written is a MissingChunkError. `on_bytes` is called with the number of bytes read, for
        progress, by one thread at a time.
        """
        entries = [
            replace(entry, checksums=self._arrays.checksums(entry)) for entry in self._entries.values()
        ]
        reading = threading.Lock()
        stopped = threading.Event()

        def read(first: int) -> None:
            pieces = _Pieces()
            chunks = ((entry, indices) for entry in entries for indices in entry.chunk_indices())
            for entry, indices in islice(chunks, first, None, _READERS):
                if stopped.is_set():
                    return
                read_chunk_pieces(self._folder, entry, indices, pieces)
                with reading:
                    on_bytes(entry.chunk_bytes)

        with ThreadPoolExecutor(_READERS) as pool:
            try:
                for done in [pool.submit(read, first) for first in range(_READERS)]:
                    done.result()
            finally:
                stopped.set()

    def publish(self, manifest: Manifest) -> Manifest:
        """Makes the context durable and visible, all at once; returns the manifest with the chunks' checksums.

        `manifest` holds the entries as `create_array` returned them, without checksums. Where the same content is
        there already, that one stays and what was written here is dropped; an expired or broken one is replaced.
        Raises InvalidArgumentError when the manifest lists other arrays than were written, a ContextCorruptError when
        a chunk was never written, StoreFullError when the disk is full.
        """
        sealed = self._seal(manifest)
        with storing("publishing", self._folder):
            (self._folder / MANIFEST_NAME).write_bytes(render_manifest(sealed))
            sync_tree(self._folder)
            self._move_into_place(self._contexts / self._id)
        return sealed

    def _move_into_place(self, target: Path) -> None:
        while True:
            if target.exists():
                if self._keep_existing():
                    return
                discard(target)
            try:
                os.rename(self._folder, target)
            except OSError as error:
                # Another writer of the same content was faster: decide again.
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                continue
            sync_path(self._contexts)
            return

    def _seal(self, manifest: Manifest) -> Manifest:
        """The manifest with the checksums of what was written, which must be exactly what it lists."""
        if manifest.id != self._id:
            raise InvalidArgumentError(f"manifest of context {manifest.id}, expected {self._id}")
        promised = {entry.path: entry for entry in manifest.arrays}
        if promised != self._entries:
            raise InvalidArgumentError(
                f"the manifest lists arrays {sorted(promised)}, written were {sorted(self._entries)}; they must be "
                "the entries that create_array returned"
            )
        sealed = manifest.with_checksums(
            {path: self._arrays.checksums(entry) for path, entry in self._entries.items()}
        )
        for problem in chain(
            check_metadata(self._folder, sealed.arrays), check_chunks(self._folder, sealed.arrays)
        ):
            raise problem
        return sealed

    def _discard(self) -> None:
        if self._lock is None:
            return
        try:
            self._arrays.close()
            remove_tree(self._folder)
        finally:
            os.close(self._lock)
            self._lock = None


def discard(folder: Path) -> bool:
    """Makes a context's folder invisible in one step, then removes it; False when it was not there.

    Processes that have its files mapped or open keep what they have.
    """
    trash = unused_name(folder.parent, f"{TRASH_PREFIX}{folder.name}")
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return False
    sync_path(folder.parent)
    remove_tree(trash)
    return True
