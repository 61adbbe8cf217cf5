"""Which methods have kernels for decode steps on a GPU, and which class runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from decode_engine.steps.attention.dense_steps import DenseSteps
from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.attention.hybrid_steps import HybridSteps
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import StepAttention
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.selection.budgets import Ratio, TokenCount
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
    context.wait_for_layers()
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
