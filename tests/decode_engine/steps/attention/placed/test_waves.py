"""Lists that are waited for in waves of KV heads give what they give when they are waited for together.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.host_search.mailbox import Mailbox, MailboxSizes, SearchThreads
from decode_engine.host_search.mailbox_triton import await_lists
from decode_engine.host_search.shared_search_numba import COUNT_BITS
from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.decode_engine.host_search.searches import HEADS, Layer, make_plan, searched
from tests.support.models import write_model_folder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
pytestmark.append(pytest.mark.usefixtures("few_programs"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192)
    return ModelRunner(resolve_model(str(folder)), DEVICE)


def test_heads_are_split_evenly_into_as_many_waves_as_pay() -> None:
    plan = replace(make_plan(2), heads=6)
    assert plan.wave_heads == [range(1), range(1, 3), range(3, 4), range(4, 6)]
    assert replace(plan, rows=1).wave_heads == [range(3), range(3, 6)]
    assert replace(plan, heads=2).wave_heads == [range(1), range(1, 2)]


def test_only_lists_of_the_wave_are_waited_for_and_copied() -> None:
    """The other head's lists are not there, and what the device has of them is left alone."""
    mailbox = Mailbox(make_plan(2), page_locked=DEVICE == "cuda")
    layers, layer = [Layer(100, seed) for seed in range(3)], 1
    step = mailbox.begin([searched(row, layers, 8, 90, 20) for row in range(2)], range(3))
    records_BF = torch.zeros(2, records.RECORD_FIELDS, dtype=torch.int64)
    records_BF[:, records.STEP] = step
    records_BF = records_BF.to(DEVICE)
    lists = KeyLists.allocate(2 * HEADS, 1, mailbox.sizes.width, DEVICE)
    lists.ids_RPW.fill_(7)
    lists.counts_RP.fill_(1)
    gave_up_1 = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for wave, heads in enumerate(mailbox.sizes.wave_heads):
        for row in range(2):
            for h in heads:
                mailbox.shared.ids_RW[row * HEADS + h, :2] = torch.tensor([20 + row, 40 + h])
                mailbox.shared.answers_RX[row * HEADS + h, 0] = (mailbox.number_of(layer) << COUNT_BITS) | 2
        await_lists(records_BF, mailbox.shared, lists, gave_up_1, layer, 2_000_000, heads)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for row in range(2):
            for h in range(HEADS):
                expected = [20 + row, 40 + h] if h <= wave else [7]
                assert lists.of_row(row * HEADS + h).tolist() == expected
    assert not mailbox.gave_up
    mailbox.shared.waits_LR2.zero_()
    mailbox.shared.waits_LR2[layer] = torch.tensor([[100, 103], [110, 120], [101, 105], [111, 131]])
    waits_LW2 = mailbox.waits().reshape(len(mailbox.order), 2, 2)
    assert waits_LW2[mailbox.order.index(layer)].tolist() == [[100, 105], [110, 131]]
    assert mailbox.waited_ns() == 5 + 21


def step_logits(runner: ModelRunner) -> tuple[Tensor, list[tuple[int, int]]]:
    """Logits of two steps of two sessions, and how many rows were read from host memory and found in slots."""
    threads = SearchThreads(2)
    method = replace(get_method("csattention+dropped@group=pooled", keep=0.05), recent=16, append_block=16)
    dtype = "float32" if DEVICE == "cpu" else runner.kv_dtype
    # Two sessions of one context share its slots, a third one has its own.
    contexts = [
        made_up_context(
            runner.identity, dtype, method, length, device=DEVICE, seed=length, placement=Placement.HOST
        )
        for length in (230, 130)
    ]
    sessions = [
        Session(context, method.on(context.manifest)) for context in (contexts[0], contexts[0], contexts[1])
    ]
    try:
        for row, session in enumerate(sessions):
            runner.forward([session], [[5 + row, 9]])
        weights = next(runner.model.parameters())
        stepper = Stepper(
            step_model(runner.model),
            runner.identity,
            weights.dtype,
            weights.device,
            searching=threads,
        )
        samplers = [Sampler(SamplingParameters()) for _ in sessions]
        results = stepper.step(sessions, [3, 4, 5], samplers)
        assert all(isinstance(result, int) for result in results), results
        graph = stepper.graph(sessions)
        steps = [each for each in graph.batch.attentions if isinstance(each, HostSteps)]
        fetched = [tuple(pair) for each in steps for pair in each.rows.found_B2()[: len(sessions)].tolist()]
        return graph.logits_BV[: len(sessions)].float().cpu().clone(), fetched
    finally:
        threads.close()


@pytest.mark.slow
def test_waves_change_no_bit_of_a_step(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, fetched_apart = step_logits(runner)
    monkeypatch.setattr(MailboxSizes, "waves", 1)
    together, fetched_together = step_logits(runner)
    assert torch.equal(together, apart)
    # Of two sessions that want one row, either one may be the first to read it.
    assert [sum(pair) for pair in fetched_together] == [sum(pair) for pair in fetched_apart]
    assert sum(read for read, _ in fetched_apart) > 0
