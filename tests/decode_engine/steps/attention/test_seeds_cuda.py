"""Seeded requests on a GPU get the same tokens, and the same bits, alone and beside 15 others that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from tests.support.devices import ON_GPU

pytestmark = ON_GPU

PROMPTS, OTHERS, TOKENS = 30, 15, 100
LENGTHS = (4000, 2777, 5000)
"""Of the contexts: two that graphs of one length take, and a longer one."""


class Requests:
    """Thirty prompts on a few contexts, whose sessions can be started again and again."""

    def __init__(self, runner: ModelRunner, method: Method) -> None:
        self._runner, self._method = runner, method
        self._contexts: list[ResidentContext] = [
            made_up_context(
                runner.identity, runner.kv_dtype, method, length, distinct=2, device="cuda", seed=length
            )
            for length in LENGTHS
        ]

    def start(self, number: int) -> Session:
        context = self._contexts[number % len(LENGTHS)]
        session = self._runner.start(context, self._method.on(context.manifest))
        self._runner.read([session], [[5 + number, *range(1, 2 + number % 7)]])
        return session

    def step(self, sessions: list[Session], tokens: list[int], samplers: list[Sampler]) -> list[int]:
        results = self._runner.decode(sessions, tokens, samplers)
        found = [result for result in results if isinstance(result, int)]
        assert len(found) == len(results)
        return found

    def alone(self, number: int) -> tuple[list[int], Session]:
        session, sampler, said = self.start(number), sampler_of(number, 0), [3]
        for _ in range(TOKENS):
            said += self.step([session], said[-1:], [sampler])
        return said, session

    def beside(self, number: int) -> tuple[list[int], Session]:
        """One of three others has a seed, one is greedy, and one has no seed; each is away in every third ten steps."""
        numbers = [number, *((number + 1 + other) % PROMPTS for other in range(OTHERS))]
        sessions, said = [self.start(each) for each in numbers], [[3] for _ in numbers]
        samplers = [sampler_of(each, place) for place, each in enumerate(numbers)]
        for turn in range(TOKENS):
            here = [place for place in range(1, 1 + OTHERS) if (turn // 10 + place) % 3]
            here.insert(turn % (len(here) + 1), 0)
            found = self.step(
                [sessions[place] for place in here],
                [said[place][-1] for place in here],
                [samplers[place] for place in here],
            )
            for place, token in zip(here, found, strict=True):
                said[place].append(token)
        return said[0], sessions[0]


def sampler_of(number: int, place: int) -> Sampler:
    kinds = (
        SamplingParameters(temperature=1.0, seed=number),
        SamplingParameters(),
        SamplingParameters(temperature=1.0, top_p=0.9),
    )
    return Sampler(kinds[place % 3])


@pytest.mark.parametrize("name", ["full", "csattention", "multipole", "oracle"])
def test_tokens_are_the_same_alone_and_beside_others(runner: ModelRunner, name: str) -> None:
    """By captured steps, and for a method without kernels by the general path."""
    method = get_method(name, None if name == "full" else 0.1)
    requests = Requests(runner, replace(method, partition_optional=False))
    for number in range(PROMPTS if name != "oracle" else 2):
        expected, alone = requests.alone(number)
        said, session = requests.beside(number)
        assert said == expected
        # Keys and values of the last layer come from all that was computed before, in all layers and steps.
        assert torch.equal(session.layers[-1].tail.rows, alone.layers[-1].tail.rows)
