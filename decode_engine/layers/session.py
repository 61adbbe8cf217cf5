"""One request's state: a shared context, a method, and the tail that it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import overload

import torch

from decode_engine.layers.dense_layer import DenseLayer, LayerAttention
from decode_engine.layers.figures import Figures
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer
from index_store.errors import MethodUnsupportedError
from index_store.indexes.interface.layer_index import LayerIndex
from index_store.indexes.registry import INDEX_KINDS
from index_store.memory.resident import ResidentContext
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import Method
from index_store.selection.budgets import Threshold
from index_store.selection.threshold_curve import ThresholdCurve
from index_store.store.json_fields import Scalar
from index_store.store.manifest import Manifest

NO_OPTIONS: Mapping[str, Scalar] = MappingProxyType({})
"""Search options of a partition, which is scored and not searched."""


class Layers(Sequence[LayerAttention]):
    """The layers of one session, each made when it is first asked for.

    So a session on a context that is still being loaded waits for no layer before it comes to it.
    """

    def __init__(self, count: int, make: Callable[[int], LayerAttention]) -> None:
        self._made: list[LayerAttention | None] = [None] * count
        self._make = make

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, layer: int) -> LayerAttention: ...
    @overload
    def __getitem__(self, layer: slice) -> list[LayerAttention]: ...

    def __getitem__(self, layer: int | slice) -> LayerAttention | list[LayerAttention]:
        if isinstance(layer, slice):
            return [self[number] for number in range(*layer.indices(len(self)))]
        found = self._made[layer]
        if found is None:
            number = range(len(self))[layer]
            with torch.inference_mode(False):  # what is made here is written to in any mode
                found = self._made[number] = self._make(number)
        return found

    def made(self) -> Iterator[LayerAttention]:
        """Those that there are already."""
        return (layer for layer in self._made if layer is not None)

    def clear(self) -> None:
        """Lets go of all layers; there are none from here on."""
        self._made.clear()


class Session:
    """Decoding state over a resident context. The context is shared and never written.

    position: tokens so far, context included; the next token gets this position. effective_method: `method` as it runs
    over this context, see `fit_method`. device: of queries, tails and indexes; keys and values of the context may be in
    host memory beside it.
    Raises MethodUnsupportedError when the context lacks the method's index.
    """

    def __init__(self, context: ResidentContext, method: Method) -> None:
        self.context = context
        self.method = method
        self.figures = Figures()
        self.position = context.manifest.token_count
        require_index(context.manifest, method)
        self.effective_method = fit_method(context.manifest, method)
        self.device = context.device
        make = partial(_make_layer, context, self.effective_method, self.figures)
        self._layers = Layers(context.manifest.model.layers, make)
        self._advanced_to: int | None = None  # tokens in the tails, where those do not know yet
        self._room_until = 0  # a position before which all tails have room

    @property
    def layers(self) -> Layers:
        """The layers; their tails know how many tokens they hold."""
        if self._advanced_to is not None:
            for layer in self._layers:
                layer.tail.count = self._advanced_to
            self._advanced_to = None
        return self._layers

    def close(self) -> None:
        """Drops the tail and the layers' references to the context's memory; the session cannot be used afterwards."""
        self._layers.clear()
        self._advanced_to, self._room_until = None, 0

    @property
    def nbytes(self) -> int:
        """Bytes that the session holds besides the shared context: its tail, and what was appended to the index."""
        return sum(layer.nbytes for layer in self._layers.made())

    def reserve_tail(self) -> None:
        """Makes room for the next token in the tails of all layers; they may move."""
        if self.position < self._room_until:
            return
        keys, last = self.context.manifest.token_count, self._layers[-1].tail
        needed = self.position + 1 - keys
        if needed > last.capacity:  # the last one that grows, should memory run out between
            for layer in self.layers:
                layer.tail.reserve(needed)
        self._room_until = keys + last.capacity

    def tail_capacities(self) -> tuple[int, int]:
        """Change whenever tails move: they grow layer by layer, the first one first and the last one last."""
        return self._layers[0].tail.capacity, self._layers[-1].tail.capacity

    def advance(self) -> None:
        """Notes that the next token's keys and values were written into the tails of all layers.

        The tails are told when somebody asks for the layers: steps that go through kernels do not, one after another.
        """
        self.position += 1
        self._advanced_to = self.position - self.context.manifest.token_count


def _make_layer(context: ResidentContext, method: Method, figures: Figures, layer: int) -> LayerAttention:
    """A layer of a session. Waits until the context has it in memory."""
    kv = context.kv(layer)
    beside = context.device if context.placement.kv_on_host else None
    if method.index is None or is_dense(context.manifest, method, layer):
        return DenseLayer(kv, figures, beside)
    partition = None if method.drops_remainder else method.partition
    search = LayerSearch(
        _index(context, method.index, layer),
        None if partition is None else _index(context, partition, layer),
        _thresholds(context.manifest, method.index),
    )
    return SparseLayer(kv, search, method, figures, beside)


def _index(context: ResidentContext, spec: IndexSpec, layer: int) -> LayerIndex:
    if spec.stored:
        return context.index(spec.name, layer)
    return INDEX_KINDS[spec.kind].from_arrays(spec.parameters, {}, context.kv(layer))


def is_dense(manifest: Manifest, method: Method, layer: int) -> bool:
    """Whether the method attends to every key in that layer."""
    return not method.sparse or (method.drops_remainder and layer in manifest.dense_layers)


def fit_method(manifest: Manifest, method: Method) -> Method:
    """The method as it runs over the context, with its indexes as they were built.

    Its remainder is dropped where that is allowed and its clusters lack. Raises MethodUnsupportedError or
    InvalidArgumentError where the method cannot work with how the indexes were built.
    """
    if method.partition_optional and not _has_partition(manifest, method):
        method = method.without_remainder()
    return replace(
        method, index=_as_built(manifest, method.index), partition=_as_built(manifest, method.partition)
    )


def require_index(manifest: Manifest, method: Method) -> None:
    """Raises MethodUnsupportedError unless the context holds what the method searches and approximates with.

    Raises InvalidArgumentError for a keep ratio that no threshold was calibrated for.
    """
    method = fit_method(manifest, method)
    for spec in method.index_specs():
        entry = manifest.index(spec.name)
        if entry is None:
            available = ", ".join(e.name for e in manifest.indexes) or "none"
            raise MethodUnsupportedError(
                f"method {method.name!r} needs index {spec.name!r}, context {manifest.id} has {available}; "
                f"prefill it again with --method {method.name}",
                method=method.name,
                context=manifest.id,
            )
        searched = method.index is not None and spec.name == method.index.name
        INDEX_KINDS[entry.kind].check_options(entry.parameters, method.search if searched else NO_OPTIONS)
        if searched:
            _require_thresholds(manifest, method)
        lacking = _layers_needed(manifest, method) - set(entry.layers)
        if lacking:
            raise MethodUnsupportedError(
                f"method {method.name!r} searches every layer, index {spec.name!r} of context {manifest.id} lacks "
                f"layers {sorted(lacking)}; prefill it again with --method {method.name}",
                method=method.name,
                context=manifest.id,
            )


def _require_thresholds(manifest: Manifest, method: Method) -> None:
    """Raises unless the index has a threshold for the keep ratio of the method's budget, if it needs one."""
    budget = method.budget
    if method.index is None or not isinstance(budget, Threshold) or budget.keep is None:
        return
    curve = _thresholds(manifest, method.index)
    if curve is None:
        raise MethodUnsupportedError(
            f"method {method.name!r} cuts at a calibrated threshold, index {method.index.name!r} of context "
            f"{manifest.id} has none; prefill it again with --method {method.name}",
            method=method.name,
            context=manifest.id,
        )
    curve(budget.keep)


def _layers_needed(manifest: Manifest, method: Method) -> set[int]:
    layers = set(range(manifest.model.layers))
    return layers - set(manifest.dense_layers) if method.drops_remainder else layers


def _as_built(manifest: Manifest, spec: IndexSpec | None) -> IndexSpec | None:
    entry = manifest.index(spec.name) if spec is not None and spec.stored else None
    return spec if spec is None or entry is None else IndexSpec(spec.name, entry.kind, entry.parameters)


def _has_partition(manifest: Manifest, method: Method) -> bool:
    """Whether the context has the clusters of the method's remainder, and the searched index, in every layer."""
    layers = set(range(manifest.model.layers))
    entries = [manifest.index(spec.name) for spec in method.index_specs()]
    return all(entry is not None and layers <= set(entry.layers) for entry in entries)


def _thresholds(manifest: Manifest, spec: IndexSpec) -> Callable[[float], float] | None:
    """The offline calibration of the index, when it has one."""
    entry = manifest.index(spec.name) if spec.stored else None
    return ThresholdCurve(entry.thresholds) if entry is not None and entry.thresholds else None
