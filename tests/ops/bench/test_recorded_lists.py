"""Lists that are recorded, and replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from harness.steps.recorded_lists import Fetched, RecordedLists, SlotsOfRow, count_rows, record_lists
from harness.steps.replayed_lists import replayed, rows_of_layers

from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.step_graph import StepGraph, step_model
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.support.tiny_model import IDENTITY, make_model


def lists(*keys: list[int]) -> list[np.ndarray]:
    return [np.array(each, dtype=np.int32) for each in keys]


def test_a_row_that_sessions_miss_together() -> None:
    """Each reads it for itself, into a slot that only one of them finds again, or one does for all."""
    each, once = (SlotsOfRow(3, 100, once=once) for once in (False, True))
    of_each, of_once = Fetched(), Fetched()
    for slots, counts in ((each, of_each), (once, of_once)):
        slots.take(lists([7, 8], [7]), counts)
        slots.take(lists([9], []), counts)  # takes the place of the double, or is the third
        slots.take(lists([7, 8, 9], []), counts)
    assert (of_each.wanted, of_each.union, of_once.wanted, of_once.union) == (7, 6, 7, 6)
    assert (of_each.bypassed, of_once.bypassed) == (0, 0)
    assert of_once.read == 3
    assert of_each.read in (4, 5)  # which of two slots used equally long ago goes is left open


def test_rows_without_a_slot_are_read_by_every_session() -> None:
    slots, counts = SlotsOfRow(2, 100, once=True), Fetched()
    slots.take(lists([1, 2, 3], [3]), counts)
    assert (counts.read, counts.bypassed) == (4, 2)


def test_steps_of_some_sessions_are_counted() -> None:
    ids_SBRW = np.array([[[[1, 2]], [[2, -1]]]] * 3, dtype=np.int32)
    recorded = RecordedLists(ids_SBRW, 100)
    assert count_rows(recorded, [0, 1], 16, 0, once=True) == Fetched(wanted=9, union=6, read=2)
    assert count_rows(recorded, [0, 1], 16, 1, once=True) == Fetched(wanted=6, union=4, read=0)


def test_lists_are_those_of_the_searches() -> None:
    runner = ModelRunner(resolve_model("reader"))
    try:
        method = replace(get_method("pq+dropped", 0.1), recent=16, append_block=16)
        context = made_up_context(runner.identity, runner.kv_dtype, method, 300)
        recorded = record_lists(runner, context, method, [[5, 6], [7]], steps=2, warm_up=1)
    finally:
        runner.close()
    model = context.manifest.model
    searching = method.on(context.manifest).searching
    assert recorded.ids_SBRW.shape[:3] == (2, 2, len(searching) * model.kv_heads)
    listed = recorded.ids_SBRW
    assert ((listed == -1) | ((listed >= method.sinks) & (listed < 300))).all()
    assert ((np.diff(listed, axis=-1) > 0) | (listed[..., 1:] == -1)).all()
    assert (listed[0, 0] != listed[0, 1]).any()


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
    StepGraph(step_model(make_model(model)), batch, None).compute()
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
