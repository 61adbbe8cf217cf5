"""Which methods have kernels for decode steps on a GPU, and which class runs them."""

from __future__ import annotations

from decode_engine.device.step_attention import StepAttention
from decode_engine.device.table_steps import TableSteps
from index_store.manifest import Manifest
from index_store.methods import Method

STEP_ATTENTIONS: tuple[type[StepAttention], ...] = (TableSteps,)
"""Of searching layers; the first that takes a method runs it."""


def step_attention_for(method: Method, manifest: Manifest) -> type[StepAttention] | str:
    """The class that runs the method's searching layers, or why there is none, as a clause."""
    refusals = []
    for kind in STEP_ATTENTIONS:
        refusal = kind.refusal(method, manifest)
        if refusal is None:
            return kind
        refusals.append(refusal)
    return "; ".join(dict.fromkeys(refusals))
