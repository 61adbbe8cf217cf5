"""Captured steps over contexts that are searched on the host choose the tokens of the general path, whatever the lanes.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured; the threads are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.config import Compilation
from decode_engine.device.registry import step_attention_for
from decode_engine.device.step_model import step_model
from decode_engine.device.stepper import Stepper
from decode_engine.host.steps import HostSteps
from decode_engine.host.workers import SearchThreads
from decode_engine.runner import ModelRunner
from decode_engine.sampler import Sampler, SamplingParameters
from decode_engine.session import Session
from decode_engine.warm_up import made_up_context
from index_store.methods import Method, get_method
from index_store.models.folder import resolve_model
from index_store.placement import Placement
from tests.support_models import write_model_folder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
PROMPTS, LENGTHS, STEPS = [[5, 9, 2], [7, 3], [1, 2, 3, 4]], [230, 130, 200], 2


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of few programs, which the interpreter runs one by one."""
    monkeypatch.setattr("decode_engine.device.stepper._LEAST_KEYS", 256)
    monkeypatch.setattr("decode_engine.kernels.sparse_attention._PROGRAMS", 8)
    monkeypatch.setattr("decode_engine.kernels.slot_fetch._FIND_PROGRAMS", 8)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192)
    return ModelRunner(resolve_model(str(folder)), DEVICE)


@pytest.fixture
def threads() -> Iterator[SearchThreads]:
    made = SearchThreads(2, 2)
    yield made
    made.close()


def make_stepper(runner: ModelRunner, searching: SearchThreads) -> Stepper:
    model = step_model(runner.model, Compilation.OFF)
    weights = next(runner.model.parameters())
    return Stepper(model, runner.identity, weights.dtype, weights.device, searching=searching)


def small(expression: str) -> Method:
    """Its tables are as wide as the model's heads, and it keeps few keys."""
    method = get_method(expression, keep=0.05)
    return replace(method, recent=16, append_block=16)


def start(runner: ModelRunner, method: Method, placement: Placement) -> list[Session]:
    dtype = "float32" if DEVICE == "cpu" else runner.kv_dtype
    sessions = []
    for seed, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        context = made_up_context(
            runner.identity, dtype, method, length, device=DEVICE, seed=seed, placement=placement
        )
        sessions.append(Session(context, method))
        runner.forward(sessions[-1:], [prompt])
    return sessions


def decode(stepper: Stepper, sessions: list[Session]) -> list[list[int]]:
    samplers = [Sampler(SamplingParameters()) for _ in sessions]
    tokens = [3] * len(sessions)
    history = []
    for _ in range(STEPS):
        results = stepper.step(sessions, tokens, samplers)
        tokens = [result for result in results if isinstance(result, int)]
        assert len(tokens) == len(sessions), results
        history.append(tokens)
    return history


def by_forward(runner: ModelRunner, sessions: list[Session]) -> list[list[int]]:
    """What the general path decodes, session by session."""
    tokens = [3] * len(sessions)
    history = []
    for _ in range(STEPS):
        logits = [
            runner.forward([session], [[token]])[0][-1]
            for session, token in zip(sessions, tokens, strict=True)
        ]
        tokens = [int(row.argmax()) for row in logits]
        history.append(tokens)
    return history


def test_tokens_are_those_of_the_general_path(runner: ModelRunner, threads: SearchThreads) -> None:
    """In two lanes, the first with two sessions."""
    method = small("csattention")
    sessions = start(runner, method, Placement.HOST)
    assert step_attention_for(method, sessions[0].context.manifest, Placement.HOST) is HostSteps
    expected = by_forward(runner, sessions)
    sessions = start(runner, method, Placement.HOST)
    assert decode(make_stepper(runner, threads), sessions) == expected
    for session in sessions:
        assert session.figures.searches >= STEPS * runner.identity.layers
        assert DEVICE == "cpu" or session.figures.device_wait_for_host_ns > 0
