"""Captured decode steps on a GPU equal the general path for models with states, in flight and one by one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Flight
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from index_store.models.resolve import resolve_model
from tests.decode_engine.steps.test_layer_kinds_cuda import LONG, check_batch, start
from tests.support.models import STATEFUL, write_model_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 12


@pytest.mark.parametrize(
    ("family", "name"), [*product(STATEFUL, ("full", "refined")), ("qwen3_next", "csattention+dropped")]
)
def test_a_captured_batch_equals_the_general_path(tmp_path: Path, family: str, name: str) -> None:
    check_batch(tmp_path, family, name, {"head_dim": 64}, LONG)


@pytest.mark.parametrize("family", STATEFUL)
def test_steps_in_flight_find_the_tokens_of_steps_one_by_one(tmp_path: Path, family: str) -> None:
    """Launched ahead of the tokens of the step before, until one session leaves, whose fork goes on behind it."""
    write_model_folder(
        tmp_path, family, layers=3, head_dim=64, max_positions=8192, dtype=torch.bfloat16, **STATEFUL[family]
    )
    runner = ModelRunner(resolve_model(str(tmp_path)), "cuda")
    found = [_answers(runner, follow) for follow in (False, True)]
    assert found[0] == found[1]
    assert len({token for answer in found[0] for token in answer}) > 4


def _answers(runner: ModelRunner, follow: bool) -> list[list[int]]:
    sessions = start(runner, "full", LONG)
    assert all(map(runner.has_graph, sessions))
    samplers = [Sampler(SamplingParameters()) for _ in sessions]
    flight: Flight[Session] = Flight(runner)
    answers: list[list[int]] = [[3], [4], [5]]
    for _ in range(TOKENS):
        results = flight.step(sessions, [answer[-1] for answer in answers], samplers, follow)
        for answer, token in zip(answers, results, strict=True):
            assert isinstance(token, int)
            answer.append(token)
    assert flight.flies is follow
    tokens = [answer[-1] for answer in answers]
    if follow:
        flight.leave(sessions[0])
    fork = sessions[0].fork()
    some = slice(1 if follow else 0, None)  # those that the next step is of, with or without who has left
    last = flight.step(sessions[some], tokens[some], samplers[some], False)[-2:]
    sessions[0].close()
    more = runner.launch([fork, *sessions[1:]], [tokens[0], 6, 7], samplers).tokens()
    assert all(isinstance(token, int) for token in [*last, *more])
    return [*answers, [int(str(token)) for token in last], [int(str(token)) for token in more]]
