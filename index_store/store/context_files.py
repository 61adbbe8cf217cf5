"""The files of a context at rest: which there are, and those few that doors and lists read. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from index_store.errors import (
    ContextNotFoundError,
    InvalidArgumentError,
    MissingChunkError,
    UnexpectedFileError,
)
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import MANIFEST_NAME, Manifest
from index_store.store.files.additions import replaced_arrays
from index_store.store.files.reading import READ_LIMIT_S, read_bounded
from index_store.store.zarr_io import METADATA_NAME, Pieces, chunk_path, read_chunk_into, read_chunk_pieces


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

    def _small(self, path: str) -> NDArray[np.uint8]:
        """The bytes of an array of one chunk."""
        entry = self._entry(path)
        raw = np.empty(entry.chunk_bytes, np.uint8)
        read_bounded(lambda: self._read(entry, (0,), raw), self.read_limit_s)
        return raw

    def close(self) -> None:
        """Ends the use of this object. What was handed out stays valid."""
        self._closed = True

    def _read(self, entry: ArrayEntry, indices: tuple[int, ...], out: NDArray[np.uint8] | Pieces) -> None:
        try:
            if isinstance(out, np.ndarray):
                read_chunk_into(self._folder, entry, indices, out)
            else:
                read_chunk_pieces(self._folder, entry, indices, out)
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
