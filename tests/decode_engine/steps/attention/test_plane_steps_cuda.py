"""Captured steps over contexts with rows in 8 bits on a GPU: as the general path, and in every placement the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from index_store.store.description.dtypes import INT8
from tests.support.models import HEAD_SHAPES, write_model_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHODS = ("full", "refined", "csattention", "csattention+dropped", "multipole")
LENGTHS = (4000, 1500)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(tmp_path_factory.mktemp("model"), {"head_dim": 64})


def make_runner(folder: Path, heads: Mapping[str, int]) -> ModelRunner:
    write_model_folder(folder, max_positions=8192, dtype=torch.bfloat16, **heads)
    return ModelRunner(resolve_model(str(folder)), "cuda")


def make_contexts(runner: ModelRunner, method: Method, placement: Placement) -> list[ResidentContext]:
    return [
        made_up_context(
            runner.identity, runner.kv_dtype, method, length, distinct=2, device="cuda", seed=length,
            placement=placement, rows=INT8,
        )
        for length in LENGTHS
    ]  # fmt: skip


def begin(runner: ModelRunner, contexts: list[ResidentContext], method: Method) -> list[Session]:
    """Two sessions of one context and one of another, with prompts read."""
    sessions = [
        runner.start(context, method.on(context.manifest))
        for context in (contexts[0], contexts[0], contexts[1])
    ]
    for row, session in enumerate(sessions):
        runner.forward([session], [[5 + row, 9, 2]], exact=True)
    return sessions


def make_stepper(runner: ModelRunner) -> Stepper:
    weights = next(runner.model.parameters())
    model = step_model(runner.model)
    return Stepper(model, runner.identity, weights.dtype, weights.device)


def logits_of(stepper: Stepper, sessions: list[Session], tokens: list[int]) -> torch.Tensor:
    samplers = [Sampler(SamplingParameters())] * len(sessions)
    assert all(isinstance(token, int) for token in stepper.step(sessions, tokens, samplers))
    graph = stepper.graph(sessions)
    assert graph.captured
    return graph.logits_BV[: len(sessions)].float().clone()


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HYBRID])
@pytest.mark.parametrize("dense", [(), (1,)])
@pytest.mark.parametrize("name", METHODS)
def test_captured_steps_equal_the_general_path(
    runner: ModelRunner, name: str, dense: tuple[int, ...], placement: Placement
) -> None:
    check_steps(runner, name, dense, placement)


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HYBRID])
@pytest.mark.parametrize("heads", HEAD_SHAPES)
@pytest.mark.parametrize("name", ["full", "refined"])
def test_other_heads_step_as_on_the_general_path(
    tmp_path: Path, heads: str, name: str, placement: Placement
) -> None:
    check_steps(make_runner(tmp_path, HEAD_SHAPES[heads]), name, (), placement)


def check_steps(runner: ModelRunner, name: str, dense: tuple[int, ...], placement: Placement) -> None:
    """With a budget of all keys."""
    method = replace(get_method(name, None if name == "full" else 1.0), partition_optional=False)
    contexts = make_contexts(runner, method, placement)
    for context in contexts:
        context.manifest = replace(context.manifest, dense_layers=dense)
    stepper = make_stepper(runner)
    sessions, twins = (begin(runner, contexts, method) for _ in range(2))
    assert all(stepper.takes(session) for session in sessions)
    for step in range(3):
        tokens = [3 + step, 4, 5]
        got = logits_of(stepper, sessions, tokens)
        expected = torch.stack([logits[-1] for logits in runner.forward(twins, [[t] for t in tokens])])
        assert float((got - expected).abs().amax() / expected.std()) < 0.1


@pytest.mark.parametrize("name", ["refined", "csattention+dropped"])
def test_where_low_rows_lie_changes_no_bit(runner: ModelRunner, name: str) -> None:
    """In device memory, in slots, or in host memory alone."""
    method, found = replace(get_method(name, 0.05), partition_optional=False), []
    for placement, slots in ((Placement.DEVICE, True), (Placement.HYBRID, True), (Placement.HYBRID, False)):
        contexts = make_contexts(runner, method, placement)
        with pytest.MonkeyPatch.context() as patched:
            if not slots:
                patched.setattr(SlotCache, "fields", lambda self, layer: {})
            stepper, sessions = make_stepper(runner), begin(runner, contexts, method)
            found.append(torch.stack([logits_of(stepper, sessions, [3 + step, 4, 5]) for step in range(3)]))
        assert (sum(session.figures.rows_reused for session in sessions) > 0) == (
            placement is Placement.HYBRID and slots
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
