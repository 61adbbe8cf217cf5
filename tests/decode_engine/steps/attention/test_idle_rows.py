"""Steps run with all rows idle before they are captured: their records hold no addresses, and no kernel may use any."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Compilation
from decode_engine.steps.attention.registry import step_attention_for
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.step_graph import StepGraph
from decode_engine.steps.step_model import step_model
from index_store.memory.placement import Placement
from index_store.methods.presets import get_method
from index_store.store.description.dtypes import AS_DTYPE, INT8
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
METHODS = ("full", "csattention+dropped", "csattention", "multipole", "pq", "refined")
CPU = torch.device("cpu")


@pytest.mark.usefixtures("few_programs", "watched")
@pytest.mark.parametrize(
    ("name", "placement", "rows"),
    [
        *itertools.product(METHODS, (Placement.DEVICE, Placement.HYBRID), [AS_DTYPE]),
        *itertools.product(("full", "csattention"), [Placement.DEVICE], [INT8]),
        ("refined", Placement.HYBRID, INT8),
    ],
)
def test_idle_rows_are_read_nowhere(name: str, placement: Placement, rows: str) -> None:
    method = replace(get_method(name, None if name == "full" else 0.1), partition_optional=False)
    context = made_up_context(WIDE, "float32", method, 300, rows=rows)
    steps = step_attention_for(method, context.manifest, placement)
    assert isinstance(steps, type)
    plan = StepPlan(WIDE, method, 2, 512, torch.float32, CPU, planes=rows == INT8)
    batch = StepBatch(plan, [steps])
    graph = StepGraph(step_model(make_model(WIDE), Compilation.OFF), batch, None)
    graph.compute()
    assert graph.logits_BV.isfinite().all()
    assert not batch.kept_B().any()
