"""Which methods have kernels for decode steps on a GPU, and which class runs them."""

from __future__ import annotations

from decode_engine.device.dense_steps import DenseSteps
from decode_engine.device.step_attention import StepAttention
from index_store.manifest import Manifest
from index_store.methods import Method


def step_attention_for(method: Method, manifest: Manifest) -> type[StepAttention] | str:
    """The class that runs the method's searching layers, or why there is none, as a clause."""
    if not method.sparse:
        return DenseSteps
    return "there are no kernels for its index"
