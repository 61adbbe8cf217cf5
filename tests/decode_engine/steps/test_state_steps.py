"""Batches of decode steps of models with states: what is in flight, fails or forks leaves them as it has to.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_engine.engine.sampler import Sampler
from decode_engine.engine.stepping import Flight
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.steps.stepper import Stepper
from index_store.errors import SparseKVError
from tests.decode_engine.steps.sessions import (
    GREEDY,
    PAST_A_WINDOW,
    Case,
    begin,
    general_logits,
    make_contexts,
    make_runner,
    make_stepper,
    method_of,
    step_logits,
)
from tests.decode_engine.steps.test_equal_paths import check_states
from tests.support.devices import DEVICE, ON_GPU
from tests.support.models import STATEFUL

pytestmark = pytest.mark.usefixtures("few_programs")
SAMPLERS = [Sampler(GREEDY)] * 4
TOKENS = 12


def make(folder: Path, family: str) -> tuple[ModelRunner, Stepper]:
    runner = make_runner(folder, family)
    return runner, make_stepper(runner)


def start(runner: ModelRunner) -> list[Session]:
    """Sessions on contexts of several lengths, one on none, each behind a prompt."""
    lengths = (90, 0, 30) if DEVICE == "cpu" else (4000, 150, 2777)
    return begin(runner, make_contexts(runner, Case(lengths=lengths)), method_of("full"), PAST_A_WINDOW)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_forks_go_on_behind_steps_on_either_path(tmp_path: Path, family: str) -> None:
    runner, stepper = make(tmp_path, family)
    sessions, twins = start(runner), start(runner)
    for tokens in ([3, 4, 5], [6, 7, 8, 9]):
        step_logits(stepper, sessions, tokens)
        general_logits(runner, twins, tokens)
        check_states(sessions, twins)
        sessions.append(sessions[1].fork())
        twins.append(twins[1].fork())
    for group in (sessions, twins):
        runner.forward(group[:1], [[9]])
    check_states(sessions, twins)


def test_a_step_in_flight_leaves_the_states_of_who_has_ended(tmp_path: Path) -> None:
    """It was computed one token too far; what is kept of the session, and other answers of it, know nothing of it."""
    runner, stepper = make(tmp_path, "qwen3_5_text")
    sessions, twins = start(runner), start(runner)
    first = stepper.launch(sessions, [3, 4, 5], SAMPLERS[:3])
    second = first.follow()
    tokens = [int(token) for token in first.tokens() if isinstance(token, int)]
    second.leave(0)
    runner.forward(twins, [[3], [4], [5]])
    check_states(sessions, twins)
    second.tokens()
    check_states(sessions[:1], twins[:1])
    runner.forward(twins[1:], [[token] for token in tokens[1:]])
    check_states(sessions, twins)
    third = stepper.step([sessions[1], sessions[0].fork()], [6, 7], SAMPLERS[:2])
    assert all(isinstance(token, int) for token in third)
    runner.forward([twins[1]], [[6]])
    check_states(sessions, twins)


def test_a_step_that_fails_may_be_made_again(tmp_path: Path) -> None:
    runner, stepper = make(tmp_path, "lfm2")
    sessions, twins = start(runner), start(runner)
    failing = runner.model.get_output_embeddings().register_forward_hook(_fail)
    assert all(isinstance(found, RuntimeError) for found in stepper.step(sessions, [3, 4, 5], SAMPLERS[:3]))
    failing.remove()
    check_states(sessions, twins)
    stepper.step(sessions, [3, 4, 5], SAMPLERS[:3])
    runner.forward(twins, [[3], [4], [5]])
    check_states(sessions, twins)


def _fail(*_: object) -> None:
    raise RuntimeError("half way")


def test_a_session_without_a_token_has_nothing_to_step_behind(tmp_path: Path) -> None:
    """It does not harm the one beside it."""
    runner, stepper = make(tmp_path, "lfm2")
    session, *_ = start(runner)
    empty = runner.start(runner.no_context, method_of("full").on(runner.no_context.manifest))
    found = stepper.step([session, empty], [3, 4], SAMPLERS[:2])
    assert isinstance(found[0], int)
    assert isinstance(found[1], SparseKVError)
    assert "without a token" in str(found[1])


@pytest.mark.parametrize("family", [pytest.param(each, marks=ON_GPU) for each in STATEFUL])
def test_steps_in_flight_find_the_tokens_of_steps_one_by_one(tmp_path: Path, family: str) -> None:
    """Launched ahead of the tokens of the step before, until one session leaves, whose fork goes on behind it."""
    runner = make_runner(tmp_path, family)
    found = [_answers(runner, follow) for follow in (False, True)]
    assert found[0] == found[1]
    assert len({token for answer in found[0] for token in answer}) > 4


def _answers(runner: ModelRunner, follow: bool) -> list[list[int]]:
    sessions = start(runner)
    assert all(map(runner.has_graph, sessions))
    samplers = SAMPLERS[:3]
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
