"""Steps run with all rows idle before they are captured: their records hold no addresses, and no kernel may use any."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.batch_kinds import step_attention_for
from decode_engine.steps.step_graph import StepGraph, step_model
from index_store.memory.placement import Placement
from index_store.methods.presets import get_method
from index_store.store.description.dtypes import AS_DTYPE, INT8
from tests.support.layers import presets_with_kernels
from tests.support.tiny_model import IDENTITY, make_model

MODELS = {
    head_dim: replace(IDENTITY, layers=1, query_heads=query_heads, kv_heads=1, head_dim=head_dim)
    for head_dim, query_heads in ((64, 2), (256, 8))
}
METHODS = ("full", "csattention+dropped", *presets_with_kernels(MODELS[64]))
CPU = torch.device("cpu")


@pytest.mark.usefixtures("few_programs", "watched")
@pytest.mark.parametrize(
    ("name", "placement", "rows", "head_dim"),
    [
        *itertools.product(METHODS, (Placement.DEVICE, Placement.HYBRID), [AS_DTYPE], [64]),
        *itertools.product(("full", "csattention"), [Placement.DEVICE], [INT8], [64]),
        ("refined", Placement.HYBRID, INT8, 64),
        *itertools.product(("full", "refined"), [Placement.HYBRID], (AS_DTYPE, INT8), [256]),
    ],
)
def test_idle_rows_are_read_nowhere(name: str, placement: Placement, rows: str, head_dim: int) -> None:
    method = replace(get_method(name, None if name == "full" else 0.1), partition_optional=False)
    model = MODELS[head_dim]
    context = made_up_context(model, "float32", method, 300, rows=rows)
    steps = step_attention_for(method, context.manifest, placement)
    assert isinstance(steps, type)
    plan = StepPlan(model, method, 2, 512, torch.float32, CPU, planes=rows == INT8)
    batch = StepBatch(plan, [steps])
    graph = StepGraph(step_model(make_model(model)), batch, None)
    graph.compute()
    assert graph.logits_BV.isfinite().all()
    assert not batch.kept_B().any()
