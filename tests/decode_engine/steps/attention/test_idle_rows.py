"""Steps run with all rows idle before they are captured: their records hold no addresses, and no kernel may use any."""

from __future__ import annotations

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
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
METHODS = ("full", "csattention+dropped", "csattention", "multipole", "pq", "refined")
CPU = torch.device("cpu")


@pytest.mark.usefixtures("few_programs", "watched")
@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HYBRID])
@pytest.mark.parametrize("name", METHODS)
def test_idle_rows_are_read_nowhere(name: str, placement: Placement) -> None:
    method = replace(get_method(name, None if name == "full" else 0.1), partition_optional=False)
    context = made_up_context(WIDE, "float32", method, 300)
    steps = step_attention_for(method, context.manifest, placement)
    assert isinstance(steps, type)
    batch = StepBatch(StepPlan(WIDE, method, 2, 512, torch.float32, CPU), [steps])
    graph = StepGraph(step_model(make_model(WIDE), Compilation.OFF), batch, None)
    graph.compute()
    assert graph.logits_BV.isfinite().all()
    assert not batch.kept_B().any()
