"""A context at rest (memory-mapped, `Context`) and in memory (`ResidentContext`).

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from index_store.errors import (
    ContextNotFoundError,
    InvalidArgumentError,
    MethodUnsupportedError,
    MissingChunkError,
)
from index_store.indexes.base import LayerIndex, QuerySample
from index_store.layer_gate import LayerGate
from index_store.manifest import ArrayEntry, IndexEntry, Manifest
from index_store.placement import Placement
from index_store.zarr_io import Pieces, map_chunk, read_chunk_into, read_chunk_pieces

IndexKinds = Mapping[str, type[LayerIndex]]
Made = TypeVar("Made")


class Context:
    """A stored context, read-only. Nothing is held open between calls: chunks are mapped when asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._entries = {entry.path: entry for entry in manifest.arrays}
        every_layer = {layer: layer for layer in range(manifest.model.layers)}
        self._rows: dict[str, dict[int, int]] = {"kv": every_layer, "queries": every_layer}
        for index in manifest.indexes:
            rows = {layer: row for row, layer in enumerate(index.layers)}
            self._rows.update({array.path: rows for array in index.arrays})
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

    def tokens(self) -> Tensor:
        """The context's token ids, [N] int64. Their checksum is verified."""
        entry = self._entry("tokens")
        stored = torch.empty(entry.shape, dtype=torch.uint32, device="cpu")
        self._read(entry, (0,), stored)
        return stored.to(torch.int64)

    def array(self, path: str, layer: int, head: int) -> Tensor:
        """One (layer, KV head) of an array, mapped without a copy and without reading its checksum.

        `kv` yields [N, 2, d], `queries` [P, G, d], an index array whatever its index stores per head. `layer` is the
        model's layer.
        Raises InvalidArgumentError for an unknown array, layer or head.
        """
        entry, row = self._locate(path, layer)
        try:
            return map_chunk(self._folder, entry, (row, head))
        except MissingChunkError:
            self._check_present()
            raise

    def read_head(self, path: str, layer: int, head: int, out: Tensor) -> None:
        """Reads one (layer, KV head) of an array into a contiguous tensor and verifies its checksum."""
        entry, row = self._locate(path, layer)
        self._read(entry, (row, head), out)

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
        stored = torch.empty(self._manifest.queries.shape[1:], device="cpu")
        for head, out in enumerate(stored):
            self.read_head("queries", layer, head, out)
        return QuerySample(stored, torch.tensor(positions, device="cpu"))

    def close(self) -> None:
        """Ends the use of this object. Tensors handed out stay valid."""
        self._closed = True

    def _read(self, entry: ArrayEntry, indices: tuple[int, ...], out: Tensor | Pieces) -> None:
        try:
            if isinstance(out, Tensor):
                read_chunk_into(self._folder, entry, indices, out)
            else:
                read_chunk_pieces(self._folder, entry, indices, out)
        except MissingChunkError:
            self._check_present()
            raise

    def _locate(self, path: str, layer: int) -> tuple[ArrayEntry, int]:
        entry = self._entry(path)
        rows = self._rows.get(path, {})
        if layer not in rows:
            raise InvalidArgumentError(f"array {path!r} covers layers {sorted(rows)}, not layer {layer}")
        return entry, rows[layer]

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


class ResidentContext:
    """A context in memory, shared by every session that uses it. Its tensors must not be written to.

    On a GPU the rows of some index arrays are padded, see `device_memory`. While the context is loaded in the
    background, whoever asks for keys, values or an index waits for their layer, and gets the error that loading raised.

    Tensors stay usable while the arena's lease that handed out this object is held.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokens: Tensor,
        kv: Mapping[int, Tensor],
        arrays: Mapping[tuple[str, int], Mapping[str, Tensor]],
        kinds: IndexKinds | None = None,
        *,
        placement: Placement = Placement.DEVICE,
        device: torch.device | None = None,
        gate: LayerGate | None = None,
    ) -> None:
        """Over loaded tensors.

        tokens: [N] int64. kv: layer -> [H, N, 2, d]. arrays: (index name, layer) -> array name -> [H, ...].
        kinds: index classes by kind; all that this package knows by default. placement: which memory they are in.
        device: what computes, and holds the indexes; that of keys and values by default. gate: which layers are there;
        all without one.
        """
        self.manifest = manifest
        self.placement = placement
        self._device = device or next((layer.device for layer in kv.values()), tokens.device)
        self._gate = gate
        self._tokens: Tensor | None = tokens
        self._kv = dict(kv)
        self._arrays = {key: dict(value) for key, value in arrays.items()}
        self._kinds = kinds
        self._indexes: dict[tuple[str, int], LayerIndex] = {}
        self._building = threading.Lock()
        self._derived: dict[Hashable, Any] = {}
        self._deriving = threading.RLock()
        tensors = [
            tokens,
            *self._kv.values(),
            *(a for group in self._arrays.values() for a in group.values()),
        ]
        self._nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._nbytes

    @property
    def device(self) -> torch.device:
        """What computes with the context: its indexes are in its memory, keys and values too unless `placement` says
        otherwise."""
        return self._device

    @property
    def kv_device(self) -> torch.device:
        """Where keys and values are."""
        return self._device if self.placement is Placement.DEVICE else torch.device("cpu")

    @property
    def first_layer_ns(self) -> int:
        """Nanoseconds that loading took until the first layer was there; 0 before, and where nothing was loaded."""
        return 0 if self._gate is None else self._gate.first_layer_ns

    @property
    def all_layers_ns(self) -> int:
        """Nanoseconds that loading took until every layer was there; 0 before, and where nothing was loaded."""
        return 0 if self._gate is None else self._gate.all_layers_ns

    def wait_for_layers(self, check: Callable[[], None] = lambda: None) -> None:
        """Returns when every layer is in memory. Raises the error that loading raised.

        check: called every 50 ms while waiting; what it raises ends the wait.
        """
        if self._gate is not None:
            self._gate.wait_for_all(check)

    def tokens(self) -> Tensor:
        """The context's token ids, [N] int64."""
        if self._tokens is None:
            raise InvalidArgumentError(f"context {self.manifest.id[:12]} has been released")
        return self._tokens

    def kv(self, layer: int) -> Tensor:
        """Keys and values of one layer, [H, N, 2, d], contiguous. Waits for the layer."""
        self._check_layer(layer)
        if self._gate is not None:
            self._gate.wait(layer)
        return self._kv[layer]

    def keys(self, layer: int) -> Tensor:
        """View of the layer's keys, [H, N, d]; rows are 2d elements apart."""
        return self.kv(layer)[:, :, 0]

    def values(self, layer: int) -> Tensor:
        """View of the layer's values, [H, N, d]; rows are 2d elements apart."""
        return self.kv(layer)[:, :, 1]

    def index(self, name: str, layer: int) -> LayerIndex:
        """The layer's index of that name, made over the loaded arrays at first use and kept. Waits for the layer.

        Raises MethodUnsupportedError when the context has no such index, or this program cannot read its kind.
        """
        if self._gate is not None and layer in self._kv:
            self._gate.wait(layer)
        with self._building:
            found = self._indexes.get((name, layer))
            if found is None:
                found = self._indexes[name, layer] = self._make_index(name, layer)
            return found

    def derived(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once from the context's arrays and kept as long as the context is in memory.

        One thread makes at a time; `make` may ask for other derived objects and for indexes. What it holds counts into
        no memory budget. Raises InvalidArgumentError after the release.
        """
        with self._deriving:
            self.tokens()  # raises once the context has been released
            if key not in self._derived:
                self._derived[key] = make()
            made: Made = self._derived[key]
            return made

    def release(self) -> None:
        """Lets go of every tensor and of all that was derived; later calls raise InvalidArgumentError."""
        with self._deriving, self._building:
            self._derived.clear()
            self._tokens = None
            self._kv.clear()
            self._arrays.clear()
            self._indexes.clear()

    def _make_index(self, name: str, layer: int) -> LayerIndex:
        entry = self._index_entry(name)
        if layer not in entry.layers:
            raise MethodUnsupportedError(
                f"index {name!r} of context {self.manifest.id[:12]} covers layers {list(entry.layers)}, not layer "
                f"{layer}; dense layers {list(self.manifest.dense_layers)} are attended to fully",
                index=name,
                layer=layer,
            )
        self._check_layer(layer)
        kinds = self._kinds if self._kinds is not None else _known_kinds()
        if entry.kind not in kinds:
            raise MethodUnsupportedError(
                f"index {name!r} is of kind {entry.kind!r}, this program reads {', '.join(sorted(kinds))}; "
                "update sparsekv or prefill the document again",
                kind=entry.kind,
            )
        return kinds[entry.kind].from_arrays(
            entry.parameters, self._arrays.get((name, layer), {}), self.kv(layer)
        )

    def _index_entry(self, name: str) -> IndexEntry:
        entry = self.manifest.index(name)
        if entry is None:
            present = ", ".join(index.name for index in self.manifest.indexes) or "none"
            raise MethodUnsupportedError(
                f"context {self.manifest.id[:12]} has no index {name!r} (it has: {present}); "
                "prefill it with a method that builds one, or ask with another method",
                index=name,
            )
        return entry

    def _check_layer(self, layer: int) -> None:
        if layer not in self._kv:
            layers = self.manifest.model.layers
            state = f"layers 0..{layers - 1}" if self._kv else "been released"
            raise InvalidArgumentError(
                f"context {self.manifest.id[:12]} has {state}; asked for layer {layer}"
            )


def _known_kinds() -> IndexKinds:
    from index_store.indexes.registry import INDEX_KINDS

    return INDEX_KINDS
