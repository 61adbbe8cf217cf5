"""Steps of sessions that share contexts equal the general path, whoever shares, joins and leaves.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels.attention.online_softmax import merge_partials_reference
from decode_engine.kernels.attention.shared_attention import Seat
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention import listed_steps as dense_steps
from decode_engine.steps.attention.listed_steps import DenseSteps
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS
from index_store.models.resolve import resolve_model
from tests.support.models import write_model_folder

STEPS = 3
GREEDY = SamplingParameters()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(
        tmp_path_factory.mktemp("model"), kv_heads=1, query_heads=4, head_dim=64
    )
    return ModelRunner(resolve_model(str(folder)))


@pytest.fixture
def stepper(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Stepper:
    # The interpreter takes long for its many programs, which have tests of their own.
    monkeypatch.setattr(dense_steps, "merge_partials", merge_partials_reference)
    return Stepper(step_model(runner.model), runner.identity, torch.float32, torch.device("cpu"))


def make_contexts(runner: ModelRunner, lengths: Sequence[int]) -> list[ResidentContext]:
    """Every other one in host memory, where sessions on one context share it as they do in the device's."""
    places = (Placement.DEVICE, Placement.HYBRID)
    return [
        made_up_context(
            runner.identity,
            runner.kv_dtype,
            METHODS["full"],
            length,
            seed=number,
            placement=places[number % 2],
        )
        for number, length in enumerate(lengths)
    ]


def start(runner: ModelRunner, context: ResidentContext, prompt: list[int]) -> Session:
    session = runner.start(context, METHODS["full"].on(context.manifest))
    runner.forward([session], [prompt])
    return session


def by_forward(runner: ModelRunner, session: Session) -> list[int]:
    tokens = [3]
    for _ in range(STEPS):
        tokens.append(int(runner.forward([session], [[tokens[-1]]])[0][-1].argmax()))
    return tokens[1:]


def test_sessions_that_come_and_go_decode_as_one_by_one(runner: ModelRunner, stepper: Stepper) -> None:
    choose = random.Random(1)
    contexts = [*make_contexts(runner, [70, 17]), runner.no_context]
    places = [choose.choice(contexts) for _ in range(6)]
    prompts = [[choose.randrange(50) for _ in range(choose.randint(1, 4))] for _ in places]
    expected = [by_forward(runner, start(runner, *given)) for given in zip(places, prompts, strict=True)]
    sessions = [start(runner, *given) for given in zip(places, prompts, strict=True)]
    tokens: list[list[int]] = [[3] for _ in sessions]
    while left := [number for number, found in enumerate(tokens) if len(found) <= STEPS]:
        some = choose.sample(left, choose.randint((len(left) + 1) // 2, len(left)))
        samplers = [Sampler(GREEDY)] * len(some)
        results = stepper.step([sessions[i] for i in some], [tokens[i][-1] for i in some], samplers)
        for number, result in zip(some, results, strict=True):
            assert isinstance(result, int)
            tokens[number].append(result)
    assert [found[1:] for found in tokens] == expected


def test_groups_are_arranged_anew_where_they_changed(
    runner: ModelRunner, stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    arranged: list[tuple[list[Seat], bool]] = []
    monkeypatch.setattr(DenseSteps, "arrange", lambda _, seats, steady: arranged.append((seats, steady)))
    (context,) = make_contexts(runner, [70])
    sessions = [start(runner, context, prompt) for prompt in ([5, 9], [7, 8, 9, 10])]
    for _ in range(4):
        stepper.step(sessions, [3, 3], [Sampler(GREEDY)] * 2)
    tails = [[seat.tail for seat in seats] for seats, _ in arranged]
    assert tails == [[4, 8], [8, 8]]  # a power of two from the present length on, for several steps
    ((first, second), _), *_ = arranged
    assert (first.row, second.row) == (0, 1)
    assert first.context == second.context
    assert first.keys == second.keys == 70
    stepper.step(sessions[:1], [3], [Sampler(SamplingParameters(temperature=1.0, seed=3))])
    stepper.step(sessions[1:], [3], [Sampler(GREEDY)])
    assert [(len(seats), steady) for seats, steady in arranged[2:]] == [(1, True), (1, False)]


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("seed", [None, 3])
def test_sessions_without_a_context_attend_to_their_tails_alone(
    runner: ModelRunner, stepper: Stepper, seed: int | None
) -> None:
    """One that stands alone, several that share nothing, and with a seed, by which work is divided in another way."""
    sampling = GREEDY if seed is None else SamplingParameters(temperature=1e-4, seed=seed)
    prompts = [[5], list(range(3, 48)), [7, 8, 9]]
    expected = [by_forward(runner, start(runner, runner.no_context, prompt))[0] for prompt in prompts]
    for count in (1, 3):
        sessions = [start(runner, runner.no_context, prompt) for prompt in prompts[:count]]
        samplers = [Sampler(sampling) for _ in sessions]
        assert stepper.step(sessions, [3] * count, samplers) == expected[:count]


def test_a_step_follows_a_context_whose_last_token_was_read_again(
    runner: ModelRunner, stepper: Stepper
) -> None:
    """Its tail is empty until then."""
    (context,) = make_contexts(runner, [70])
    tokens = []
    for _ in range(2):
        session = runner.start(context, METHODS["full"].on(context.manifest), again=1)
        runner.forward([session], [[9]])
        assert (session.position, session.tail_keys) == (70, 0)
        tokens.append(session)
    (found,) = stepper.step(tokens[:1], [3], [Sampler(GREEDY)])
    assert found == by_forward(runner, tokens[1])[0]


def test_a_batch_takes_up_to_64_sessions(runner: ModelRunner, stepper: Stepper) -> None:
    (context,) = make_contexts(runner, [17])
    sessions = [start(runner, context, [5]) for _ in range(34)]
    results = stepper.step(sessions, [3] * 34, [Sampler(GREEDY)] * 34)
    assert len(set(map(str, results))) == 1
    assert results[0] == by_forward(runner, start(runner, context, [5]))[0]
    assert stepper.graph(sessions).batch.plan.size == 64
