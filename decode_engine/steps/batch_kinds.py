"""Which methods have kernels for decode steps, which sessions can step together in one graph, and why some cannot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.attention.listed_steps import DenseSteps, HybridSteps, ListedSteps, WindowSteps
from decode_engine.steps.attention.step_attention import StepAttention
from index_store.indexes.registry import INDEX_KINDS
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod, IndexSpec, Method
from index_store.selection.budgets import Ratio, TokenCount
from index_store.store.description.dtypes import INT8, stored_dtype
from index_store.store.description.manifest import Manifest

_CLASSES: Mapping[tuple[bool, bool], type[StepAttention]] = MappingProxyType(
    {(False, False): ListedSteps, (True, False): HybridSteps, (True, True): HostSteps}
)
"""What runs searching layers, by whether keys and values are in host memory, and whether the index is."""


def step_attention_for(
    method: Method, manifest: Manifest, placement: Placement = Placement.DEVICE
) -> type[StepAttention] | str:
    """The class that runs the method's searching layers, or why there is none, as a clause.

    placement: of the context. Layers that attend to everything are run by `DenseSteps`, which read host memory as they
    read the device's.
    """
    if not method.sparse:
        return DenseSteps
    reason = _refusal(method, manifest)
    if reason is not None:
        return reason
    index_on_host = method.index is not None and placement.index_on_host(method.index.kind)
    attention = _CLASSES[placement.kv_on_host, index_on_host]
    return attention.refusal(method, manifest) or attention


def unreadable(context: ResidentContext, device: torch.device) -> str | None:
    """Why kernels on the device cannot read the context, as a clause; None when they can.

    Waits until all layers are in memory, and raises the error that loading raised.
    """
    own = context.device
    if own.type != device.type or (None not in (own.index, device.index) and own.index != device.index):
        return f"its context is for {own}, the model on {device}"
    context.gate.wait_for_all()
    if device.type != "cuda" or context.placement is Placement.DEVICE:
        return None
    for layer in context.manifest.model.full_layers:
        if not is_readable(context.stored_rows(layer)):
            return f"keys and values of layer {layer} are in host memory that is not page-locked"
    return None


def _refusal(method: Method, manifest: Manifest) -> str | None:
    """What no kernel that searches can do."""
    budget = method.budget
    if not isinstance(budget, Ratio | TokenCount):
        return f"kernels keep a ratio or a number of keys, its budget is a {type(budget).__name__.lower()}"
    return DenseSteps.refusal(method, manifest)


_LEAST_KEYS = 2**12

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchKind:
    """What kind of batch a session runs in.

    key: equal for sessions that share one: whatever kernels depend on but the contexts' lengths. searching: layers that
    do not attend to everything. row_bytes: of a key and its value in host memory, 0 where they are on the device.
    planes: whether contexts have their rows in two planes.
    max_keys: of a batch for this session alone; one for several is as long as the longest needs.
    """

    key: int
    layers: tuple[type[StepAttention], ...]
    searching: int
    row_bytes: int
    planes: bool
    max_keys: int

    @property
    def flies(self) -> bool:
        """Whether all layers do (`StepAttention.flies`)."""
        return all(layer.flies for layer in self.layers)


class BatchKinds:
    """Sorts sessions by the kind of batch that they can step in. Thread-safe."""

    def __init__(self, dtype: torch.dtype, caps: bool = False) -> None:
        """dtype: in which the model computes. caps: whether it caps its logits."""
        self._caps = caps
        self._dtype = dtype
        self._keys: dict[Hashable, int] = {}
        self._lock = threading.Lock()
        self._refused: set[tuple[str, str]] = set()

    def sort(self, fitted: FittedMethod, placement: Placement) -> BatchKind | str:
        """The kind of batch that sessions go into, or why they cannot run in any."""
        method, manifest = fitted.method, fitted.manifest
        windows = manifest.model.window_layers
        reason: str | None = None
        searching: type[StepAttention] | str = DenseSteps
        if self._caps:
            reason = "the model caps its logits"
        elif manifest.model.index_keys:
            reason = "the model selects keys by an index of its own"
        elif stored_dtype(manifest.dtype).torch_dtype != self._dtype:
            reason = f"keys and values are {manifest.dtype}, the model computes in {self._dtype}"
        elif fitted.searching and method.period > 1:
            reason = "its period uses selections of other steps"
        else:
            reason = DenseSteps.refusal(method, manifest) or WindowSteps.refusal(method, manifest)
        if reason is None and fitted.searching:
            searching = step_attention_for(method, manifest, placement)
            reason = searching if isinstance(searching, str) else None
        if reason is not None or isinstance(searching, str):
            self.log_refusal(method.name, str(reason))
            return str(reason)
        layers = tuple(
            searching if layer in fitted.searching else WindowSteps if layer in windows else DenseSteps
            for layer in range(manifest.model.layers)
        )
        max_keys = max(_LEAST_KEYS, 1 << (manifest.token_count - 1).bit_length())
        search = _search_key(method) if fitted.searching else None
        planes = manifest.rows == INT8
        with self._lock:
            number = self._keys.setdefault((placement, layers, search, planes), len(self._keys))
        row_bytes = manifest.row_bytes if placement.kv_on_host else 0
        return BatchKind(number, layers, len(fitted.searching), row_bytes, planes, max_keys)

    def log_refusal(self, method: str, reason: str) -> None:
        """Says once why methods like this one take the general path."""
        kind = method.partition("@")[0]  # options are the clients', and without number
        if (kind, reason) not in self._refused:
            self._refused.add((kind, reason))
            logger.info("method %s decodes step by step without a graph: %s", kind, reason)


def _search_key(method: Method) -> Hashable:
    """What kernels that search depend on; equal for options that say the same in other words."""
    search = None if method.index is None else INDEX_KINDS[method.index.kind].parse_search(method.search)
    return _spec_key(method.index), _spec_key(method.partition), method.remainder.name, search


def _spec_key(spec: IndexSpec | None) -> Hashable:
    return None if spec is None else (spec.name, spec.kind, tuple(sorted(spec.parameters.items())))
