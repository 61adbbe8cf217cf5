"""A context at rest: its arrays, mapped or read with their checksums.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.errors import InvalidArgumentError, MissingChunkError
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.dtypes import STORED_DTYPES
from index_store.store.description.manifest import Manifest
from index_store.store.files.reading import READ_LIMIT_S, read_bounded
from index_store.store.zarr_io import ContextFiles, Pieces, map_chunk


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
        self._rows = {
            path: {layer: row for row, layer in enumerate(layers)}
            for path, layers in manifest.layers_of.items()
        }

    def tokens(self) -> Tensor:
        """The context's token ids, [N] int64. Their checksum is verified."""
        return torch.from_numpy(self.token_ids().astype(np.int64))

    def state(self, tokens: int | None = None) -> Tensor | None:
        """The packed states behind the last token, uint8 [bytes]; None without. Their checksum is verified.

        tokens: behind so many first tokens instead, one of `Manifest.state_marks`.
        """
        entry, marks = self._manifest.state, self._manifest.state_marks
        if entry is None:
            return None
        at = len(marks) if tokens in (None, self._manifest.token_count) else marks.index(tokens)
        return torch.from_numpy(self._small(entry.path, at))

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

    def read_head(self, path: str, layer: int, head: int, out: Tensor | Pieces) -> None:
        """Reads one (layer, KV head) of an array into a contiguous tensor, or in pieces; verifies its checksum."""
        entry, row = self._locate(path, layer)
        self._read(entry, (row, head), raw_bytes(out) if isinstance(out, Tensor) else out)

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
