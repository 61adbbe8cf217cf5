"""A context at rest: its arrays, mapped or read with their checksums.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.errors import (
    ContextNotFoundError,
    InvalidArgumentError,
    MissingChunkError,
    UnexpectedFileError,
)
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.dtypes import STORED_DTYPES
from index_store.store.description.manifest import MANIFEST_NAME, Manifest
from index_store.store.files.leftovers import replaced_arrays
from index_store.store.files.reading import READ_LIMIT_S, read_bounded
from index_store.store.zarr_io import (
    METADATA_NAME,
    Pieces,
    chunk_path,
    map_chunk,
    read_chunk_into,
    read_chunk_pieces,
)


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


@dataclass(frozen=True, slots=True)
class QuerySample:
    """Queries of one layer kept for building indexes: a bounded, seeded sample of the context's own queries.

    queries_HPGD: [H, P, G, d] float32, after RoPE, not scaled by 1/sqrt(d).
    positions_P: [P] int64, the token position of each sampled row, ascending. Rows of calibration prompts have
        positions >= the context's token count.
    """

    queries_HPGD: Tensor
    positions_P: Tensor


class Context(ContextFiles):
    """A stored context, read-only. Nothing is held open between calls: chunks are mapped when asked for."""

    def __init__(self, folder: Path, manifest: Manifest, read_limit_s: float = READ_LIMIT_S) -> None:
        """read_limit_s: how long one step of reading may take; who calls `read_head` sees to that."""
        super().__init__(folder, manifest, read_limit_s)
        model = manifest.model
        full, windowed = (
            {layer: row for row, layer in enumerate(layers)}
            for layers in (model.full_layers, model.window_layers)
        )
        rows_of = ((manifest.kv, full or windowed), (manifest.window, windowed), (manifest.queries, full))
        self._rows: dict[str, dict[int, int]] = {
            entry.path: rows for entry, rows in rows_of if entry is not None
        }
        for index in manifest.indexes:
            rows = {layer: row for row, layer in enumerate(index.layers)}
            self._rows.update({array.path: rows for array in index.arrays})

    def tokens(self) -> Tensor:
        """The context's token ids, [N] int64. Their checksum is verified."""
        return torch.from_numpy(self.token_ids().astype(np.int64))

    def state(self) -> Tensor | None:
        """The packed states behind the last token, uint8 [bytes]; None without. Their checksum is verified."""
        entry = self._manifest.state
        return None if entry is None else torch.from_numpy(self._small(entry.path))

    def array(self, path: str, layer: int, head: int) -> Tensor:
        """One (layer, KV head) of an array, mapped without a copy and without reading its checksum.

        Those of keys and values yield [N, 2, d], of queries [P, G, d], of an index whatever that stores per head.
        `layer` is the model's layer.
        Raises InvalidArgumentError for an unknown array, layer or head.
        """
        entry, row = self._locate(path, layer)
        try:
            raw = map_chunk(self._folder, entry, (row, head))
        except MissingChunkError:
            self._check_present()
            raise
        return torch.from_numpy(raw).view(STORED_DTYPES[entry.dtype].torch_dtype).view(entry.chunks[2:])

    def read_head(self, path: str, layer: int, head: int, out: Tensor) -> None:
        """Reads one (layer, KV head) of an array into a contiguous tensor and verifies its checksum."""
        entry, row = self._locate(path, layer)
        self._read(entry, (row, head), raw_bytes(out))

    def read_head_pieces(self, path: str, layer: int, head: int, pieces: Pieces) -> None:
        """Reads one (layer, KV head) of an array piece by piece and verifies its checksum."""
        entry, row = self._locate(path, layer)
        self._read(entry, (row, head), pieces)

    def queries(self, layer: int) -> QuerySample:
        """The sample of the layer's queries; its checksums are verified.

        Raises InvalidArgumentError when the context has none, or for an unknown layer.
        """
        positions = self._manifest.query_positions
        if self._manifest.queries is None:
            raise InvalidArgumentError(
                f"context {self._manifest.id[:12]} has no sample of queries; prefill the document again"
            )
        path = self._manifest.queries.path
        stored = torch.empty(self._manifest.queries.shape[1:], device="cpu")

        def read() -> None:
            for head, out in enumerate(stored):
                self.read_head(path, layer, head, out)

        read_bounded(read, self.read_limit_s)
        return QuerySample(stored, torch.tensor(positions, device="cpu"))

    def _locate(self, path: str, layer: int) -> tuple[ArrayEntry, int]:
        entry = self._entry(path)
        rows = self._rows.get(path, {})
        if layer not in rows:
            raise InvalidArgumentError(f"array {path!r} covers layers {sorted(rows)}, not layer {layer}")
        return entry, rows[layer]


def raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's own memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
