"""Which methods have kernels for decode steps on a GPU, and which class runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from decode_engine.kernels.attention.key_lists import HEAD_DIMS, MAX_GROUP
from decode_engine.steps.attention.cluster_steps import ClusterSteps
from decode_engine.steps.attention.dense_steps import DenseSteps
from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.attention.hybrid_steps import HybridSteps
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import StepAttention
from decode_engine.steps.attention.table_steps import TableSteps
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.selection.budgets import Ratio, TokenCount
from index_store.store.manifest import Manifest

_CLASSES: Mapping[Placement, tuple[type[StepAttention], ...]] = MappingProxyType(
    {
        Placement.DEVICE: (TableSteps, ClusterSteps, ListedSteps),
        Placement.HYBRID: (HybridSteps,),
        Placement.HOST: (HybridSteps,),
    }
)
"""Of methods that search an index in the device's memory, the one with fewer launches first. The last one knows most
methods, and why not others."""


def step_attention_for(
    method: Method, manifest: Manifest, placement: Placement = Placement.DEVICE
) -> type[StepAttention] | str:
    """The class that runs the method's searching layers, or why there is none, as a clause.

    placement: of the context. Where keys and values are in host memory, searches list keys whatever the remainder is.
    Layers that attend to everything read host memory as they read the device's.

    What decides besides the index and its search options:

    - remainder `dropped`: query tables run fused with attention; the keys of other searches are listed and attended;
    - `monopole` over the clusters that are searched: fused with their selection;
    - `monopole` and `centred` over another partition: beside any search that lists keys.
    """
    if not method.sparse:
        return DenseSteps
    reason = _refusal(method, manifest)
    if reason is not None:
        return reason
    searched_there = method.index is not None and placement.index_on_host(method.index.kind)
    for attention in (HostSteps,) if searched_there else _CLASSES[placement]:
        reason = attention.refusal(method, manifest)
        if reason is None:
            return attention
    return str(reason)


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
    for layer in range(context.manifest.model.layers):
        if not is_readable(context.kv(layer)):
            return f"keys and values of layer {layer} are in host memory that is not page-locked"
    return None


def _refusal(method: Method, manifest: Manifest) -> str | None:
    """What no kernel that searches can do."""
    budget, model = method.budget, manifest.model
    if not isinstance(budget, Ratio | TokenCount):
        return f"kernels keep a ratio or a number of keys, its budget is {budget.label if budget else 'none'}"
    if budget.group != "average":
        return f"kernels average the weights of a group's heads, its group rule is {budget.group}"
    if model.head_dim not in HEAD_DIMS or model.query_heads // model.kv_heads > MAX_GROUP:
        return (
            f"kernels exist for head dimensions {HEAD_DIMS} and groups of up to {MAX_GROUP}, the model has "
            f"{model.head_dim} and {model.query_heads // model.kv_heads}"
        )
    return None
