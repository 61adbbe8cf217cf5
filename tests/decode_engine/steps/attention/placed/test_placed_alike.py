"""Steps that threads search for equal steps that the device searches for.

Without a CUDA device the kernels run in Triton's interpreter, over shorter contexts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.host_search.mailbox import MailboxSizes, SearchThreads
from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.host_steps import HostSteps, HostTableSelection
from decode_engine.steps.attention.listed_steps import HybridSteps
from decode_engine.steps.attention.selections import TableSelection
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.batch_kinds import step_attention_for
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.support.models import write_model_folder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow]
if DEVICE == "cpu":
    pytestmark.append(pytest.mark.usefixtures("few_programs"))
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LENGTHS = (4000, 1500) if DEVICE == "cuda" else (230, 130)
STEPS = 3 if DEVICE == "cuda" else 1
EXPRESSIONS = ("csattention+dropped@group=pooled", "csattention")[: 2 if DEVICE == "cuda" else 1]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(
        tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192, dtype=DTYPE
    )
    return ModelRunner(resolve_model(str(folder)), DEVICE)


def make_stepper(runner: ModelRunner, threads: SearchThreads) -> Stepper:
    weights = next(runner.model.parameters())
    model = step_model(runner.model)
    return Stepper(model, runner.identity, weights.dtype, weights.device, searching=threads)


def small(expression: str) -> Method:
    return replace(get_method(expression, 0.05), recent=16, append_block=16, partition_optional=False)


def begin(runner: ModelRunner, method: Method, placement: Placement) -> list[Session]:
    """Two sessions of one context and one of another, with prompts read."""
    contexts = [
        made_up_context(
            runner.identity, runner.kv_dtype if DEVICE == "cuda" else "float32", method, length, device=DEVICE,
            seed=length, placement=placement,
        )
        for length in LENGTHS
    ]  # fmt: skip
    sessions = [
        Session(context, method.on(context.manifest)) for context in (contexts[0], contexts[0], contexts[1])
    ]
    for row, session in enumerate(sessions):
        runner.forward([session], [[5 + row, 9, 2]], exact=True)
    return sessions


def run_step(stepper: Stepper, sessions: list[Session], tokens: list[int]) -> list[int]:
    results = stepper.step(sessions, tokens, [Sampler(SamplingParameters()) for _ in sessions])
    found = [result for result in results if isinstance(result, int)]
    assert len(found) == len(sessions), results
    return found


def logits_of(stepper: Stepper, sessions: list[Session]) -> Tensor:
    return stepper.graph(sessions).logits_BV[: len(sessions)].float().clone()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_host_equals_hybrid_for_the_same_lists(
    runner: ModelRunner, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, layer by layer: the device is given what the threads have listed instead of searching itself."""
    listed: dict[int, KeyLists] = {}
    await_heads = HostTableSelection.await_heads

    def remember(self: HostTableSelection, layer: int, records_BF: Tensor, heads: range) -> None:
        await_heads(self, layer, records_BF, heads)
        lists = self.lists
        if layer not in listed:
            listed[layer] = KeyLists(lists.ids_RPW.clone(), lists.counts_RP.clone())
        listed[layer].ids_RPW.copy_(lists.ids_RPW)
        listed[layer].counts_RP.copy_(lists.counts_RP)

    def recall(self: TableSelection, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        # Before a graph is captured it runs with all rows idle, of which a search lists nothing.
        idle_R = (records_BF[:, records.KEYS] == 0).repeat_interleave(runner.identity.kv_heads)
        lists = listed[layer]
        return KeyLists(lists.ids_RPW, lists.counts_RP.masked_fill(idle_R[:, None], 0))

    made = TableSelection.__init__

    def make_for_the_same_lists(self: TableSelection, plan: StepPlan) -> None:
        made(self, plan)
        self.lists = next(
            iter(listed.values())
        )  # which says how attention is split, and so how it is rounded

    monkeypatch.setattr(TableSelection, "__init__", make_for_the_same_lists)
    monkeypatch.setattr(HostTableSelection, "await_heads", remember)
    monkeypatch.setattr(TableSelection, "select", recall)
    method = small(expression)
    monkeypatch.setattr(MailboxSizes, "waves", 1)  # all lists of a layer come at once
    threads = SearchThreads(2)
    try:
        stepper = make_stepper(runner, threads)
        searched, given = (begin(runner, method, each) for each in (Placement.HOST, Placement.HYBRID))
        for sessions, steps in ((searched, HostSteps), (given, HybridSteps)):
            context = sessions[0].context
            assert step_attention_for(method, context.manifest, context.placement) is steps
        for step in range(STEPS):
            tokens = [3 + step, 4, 5]
            run_step(stepper, searched, tokens)
            expected = logits_of(stepper, searched)
            assert all(int(lists.counts_RP.sum()) > 0 for lists in listed.values())
            run_step(stepper, given, tokens)
            assert torch.equal(logits_of(stepper, given), expected)
        assert len(listed) == runner.identity.layers
    finally:
        threads.close()
