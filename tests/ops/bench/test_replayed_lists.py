"""Steps that replay lists attend to these, and idle rows to nothing, wherever keys and values are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.steps.recorded_lists import RecordedLists
from harness.steps.replayed_lists import replayed, rows_of_layers

from decode_engine.settings.command_options import Compilation
from decode_engine.steps.attention.hybrid_steps import HybridSteps
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.step_graph import StepGraph
from decode_engine.steps.step_model import step_model
from index_store.methods.presets import get_method
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=3, query_heads=4, kv_heads=2, head_dim=64)


def make_plan(size: int) -> StepPlan:
    return StepPlan(WIDE, get_method("pq+dropped", 0.05), size, 512, torch.float32, torch.device("cpu"))


def make_lists(steps: int, sessions: int, rows: int, width: int = 20) -> RecordedLists:
    count = steps * sessions * rows * width
    return RecordedLists(np.arange(count, dtype=np.int32).reshape(steps, sessions, rows, width), count)


@pytest.mark.usefixtures("few_programs", "watched")
@pytest.mark.parametrize("kind", [ListedSteps, HybridSteps])
def test_idle_rows_list_nothing(kind: type[ListedSteps]) -> None:
    """All are before a graph is captured; their records hold no addresses, which kernels would follow."""
    model, plan = replace(WIDE, layers=1), make_plan(2)
    with replayed(make_lists(2, 2, 1)):
        batch = StepBatch(replace(plan, model=model), [kind])
    StepGraph(step_model(make_model(model), Compilation.OFF), batch, None).compute()
    (attention,) = batch.attentions
    assert isinstance(attention, kind)
    assert not attention.selection.lists.counts_RP.any()
    assert not batch.kept_B().any()


def test_sessions_and_heads_take_recorded_rows_in_turns() -> None:
    """More sessions, layers and heads than were recorded, and fewer."""
    for sessions, rows in ((2, 3), (5, 9)):
        recorded = make_lists(4, sessions, rows)
        ids_LSRW = rows_of_layers(recorded, make_plan(4))
        assert ids_LSRW.shape == (3, 4, 4 * 2, 20)
        for layer in range(3):
            for row in range(8):
                session, head = divmod(row, 2)
                expected = recorded.ids_SBRW[:, session % sessions, (2 * layer + head) % rows]
                assert np.array_equal(ids_LSRW[layer, :, row].numpy(), expected)
