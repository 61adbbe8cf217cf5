"""A context in memory, shared by all that use it, and which of its layers are there while it is loaded.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.indexes.interface.retired import why_retired
from index_store.memory.placement import SLOT_SHARE, Placement
from index_store.store.description.dtypes import INT8, stored_dtype
from index_store.store.description.manifest import HIGH_PLANE, IndexEntry, Manifest

_CHECK_INTERVAL_S = 0.01  # others may wait for the thread that waits here


class LayerGate:
    """Opens layer by layer, in order, or fails once and for all. Safe to use from several threads."""

    def __init__(self, layers: int, *, opened: bool = False) -> None:
        self._layers = layers
        self._ready = layers if opened else 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._begun_ns = perf_counter_ns()
        self.first_layer_ns = self.all_layers_ns = 0
        """Nanoseconds from the beginning until the first layer, and every one, was in memory; 0 before."""

    @property
    def complete(self) -> bool:
        """Whether every layer is in memory."""
        return self._ready == self._layers

    @property
    def loading(self) -> bool:
        """Whether layers are still on their way: neither are all in memory, nor has loading failed."""
        return not self.complete and self._error is None

    def open_next(self) -> None:
        """Notes that the next layer is in memory."""
        spent = perf_counter_ns() - self._begun_ns
        with self._changed:
            if self._ready == 0:
                self.first_layer_ns = spent
            self._ready += 1
            if self.complete:
                self.all_layers_ns = spent
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Tells all who wait, now and later, for a layer that is not in memory. The first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def wait(self, layer: int, check: Callable[[], None] | None = None) -> None:
        """Returns when the layer is in memory. Raises what `fail` was given where it will not come.

        check: called every 10 ms while waiting; what it raises ends the wait.
        """
        if self._ready > layer:
            return
        with self._changed:
            while self._ready <= layer and self._error is None:
                self._changed.wait(None if check is None else _CHECK_INTERVAL_S)
                if check is not None:
                    check()
            error = self._error
        if error is not None and self._ready <= layer:
            # A copy: every thread gets a traceback of its own.
            raise copy.copy(error) from error

    def wait_for_all(self) -> None:
        """Returns when every layer is in memory. Raises as `wait` does."""
        self.wait(self._layers - 1)


IndexKinds = Mapping[str, type[LayerIndex]]


Made = TypeVar("Made")


class ResidentContext:
    """A context in memory, shared by every session that uses it. Its tensors must not be written to.

    On a GPU the rows of some index arrays are padded, see `context_loading`. While the context is loaded in the
    background, whoever asks for keys, values or an index waits for their layer, and gets the error that loading raised.

    Tensors stay usable while the arena's lease that handed out this object is held. nbytes: of all of them. device:
    what computes with it; indexes are in its memory, keys and values too unless `placement` says otherwise. gate: which
    layers are there, to be waited for.
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
        slot_share: int = SLOT_SHARE,
        state: Tensor | None = None,
    ) -> None:
        """Over loaded tensors.

        tokens: [N] int64. kv: layer -> [H, N, 2, d]. arrays: (index name, layer) -> array name -> [H, ...].
        kinds: index classes by kind; all that this package knows by default. placement: which memory they are in.
        device: what computes, and holds the indexes; that of keys and values by default. gate: which layers are there;
        all without one. slot_share: see `slots_per_head`. state: packed, of a model with states.
        """
        self.manifest = manifest
        self.placement = placement
        self.slot_share = slot_share
        self.device = device or next((layer.device for layer in kv.values()), tokens.device)
        self.gate = gate or LayerGate(manifest.model.layers, opened=True)
        self._tokens: Tensor | None = tokens
        self._state = state
        self._kv = dict(kv)
        self._arrays = {key: dict(value) for key, value in arrays.items()}
        self._kinds = kinds
        self._indexes: dict[tuple[str, int], LayerIndex] = {}
        self._building = threading.Lock()
        self._derived: dict[Hashable, Any] = {}
        self._deriving = threading.RLock()
        tensors: list[Tensor] = [
            tokens,
            *self._kv.values(),
            *(a for group in self._arrays.values() for a in group.values()),
            *(() if state is None else (state,)),
        ]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def tokens(self) -> Tensor:
        """The context's token ids, [N] int64."""
        if self._tokens is None:
            raise InvalidArgumentError(f"context {self.manifest.id[:12]} has been released")
        return self._tokens

    def state(self) -> Tensor | None:
        """Packed states behind the last token (`TextStates.unpack`); None without."""
        self.tokens()  # raises once the context has been released
        return self._state

    def rows(self, layer: int) -> ContextRows:
        """Keys and values of one layer, [H, N, 2, d], as they are stored. Waits for the layer.

        A contiguous tensor, of a layer with a sliding window of the last ones; two planes where they have 8 bits.
        """
        stored = self.stored_rows(layer)
        if not self._in_planes(layer):
            return stored
        coarse = self.index(HIGH_PLANE, layer)
        if not isinstance(coarse, CoarseRows):
            raise TypeError(f"index {HIGH_PLANE} is a {type(coarse).__name__}")
        return TwoPlanes(coarse.rows, stored, stored_dtype(self.manifest.dtype).torch_dtype)

    def kv(self, layer: int) -> Tensor:
        """`rows` that are a tensor. Raises InvalidArgumentError for a layer whose rows are two planes."""
        if self._in_planes(layer):
            raise InvalidArgumentError(
                f"context {self.manifest.id[:12]} has rows in 8 bits, which are no tensor of layer {layer}"
            )
        return self.stored_rows(layer)

    def _in_planes(self, layer: int) -> bool:
        return self.manifest.rows == INT8 and layer in self.manifest.model.full_layers

    def stored_rows(self, layer: int) -> Tensor:
        """The tensor that holds one layer of `rows`: of two planes the low one, uint8 [H, N, 2, d/2]. Waits for it."""
        self._check_layer(layer)
        self.gate.wait(layer)
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
        if layer in self._kv:
            self.gate.wait(layer)
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
            self._tokens = self._state = None
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
        kinds = self._kinds if self._kinds is not None else INDEX_CLASSES
        retired = why_retired(entry.kind, entry.parameters)
        if retired is not None:
            raise InvalidArgumentError(f"index {name!r} of context {self.manifest.id[:12]}: {retired}")
        if entry.kind not in kinds:
            raise MethodUnsupportedError(
                f"index {name!r} is of kind {entry.kind!r}, this program reads {', '.join(sorted(kinds))}; "
                "update sparsekv or prefill the document again",
                kind=entry.kind,
            )
        stored = self.stored_rows(layer)
        if self._in_planes(layer):  # stored indexes ask for no more than the shape
            stored = torch.empty((*stored.shape[:3], 2 * stored.shape[3]), device="meta")
        return kinds[entry.kind].from_arrays(entry.parameters, self._arrays.get((name, layer), {}), stored)

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
