"""Tokens chosen after a captured step, from its logits, are those that are chosen inside of it; forks go on alike."""

from __future__ import annotations

import pytest

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from index_store.methods.presets import get_method
from tests.support.devices import ON_GPU

pytestmark = ON_GPU


def start(runner: ModelRunner, name: str) -> Session:
    method = get_method(name)
    context = made_up_context(runner.identity, runner.kv_dtype, method, 2777, device="cuda")
    session = runner.start(context, method.on(context.manifest))
    runner.read([session], [list(range(1, 40))])
    return session


def decode(
    runner: ModelRunner, sessions: list[Session], samplings: list[SamplingParameters]
) -> list[list[int]]:
    samplers, said = [Sampler(each) for each in samplings], [[3] for _ in sessions]
    for _ in range(30):
        found = runner.decode(sessions, [own[-1] for own in said], samplers)
        for own, token in zip(said, found, strict=True):
            assert isinstance(token, int)
            own.append(token)
    for sampler in samplers:
        assert (sampler.logprob is not None) == (sampler.parameters.top_logprobs is not None)
    return said


@pytest.mark.parametrize("name", ["full", "csattention", "quest"])
def test_tokens_chosen_by_hand_are_those_of_the_graph_and_forks_say_the_same(
    runner: ModelRunner, name: str
) -> None:
    inside = [SamplingParameters(), SamplingParameters(1.0, 0.9, 50, seed=5), SamplingParameters(1.2, seed=6)]
    outside = [
        SamplingParameters(top_logprobs=3),
        SamplingParameters(1.0, 0.9, 50, seed=5, logit_bias={7: 0.0}),
        SamplingParameters(1.2, seed=6, top_logprobs=0),
    ]
    session = start(runner, name)
    forks = [[session.fork() for _ in inside] for _ in range(2)]
    expected = decode(runner, [start(runner, name) for _ in inside], inside)
    assert decode(runner, forks[0], inside) == expected
    assert decode(runner, forks[1], outside) == expected
