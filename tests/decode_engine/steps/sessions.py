"""Sessions on made-up contexts, and their decode steps: on the general path and in batches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS

GREEDY = SamplingParameters()


def start(
    runner: ModelRunner,
    prompt: list[int],
    length: int = 512,
    *,
    name: str = "full",
    placement: Placement = Placement.DEVICE,
) -> Session:
    """A session on a made-up context that has read a prompt."""
    method = METHODS[name]
    context = made_up_context(runner.identity, runner.kv_dtype, method, length, placement=placement)
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [prompt])
    return session


def by_forward(runner: ModelRunner, session: Session, token: int, sampler: Sampler, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = sampler.sample(runner.forward([session], [[token]])[0][-1])
        tokens.append(token)
    return tokens


def by_steps(
    stepper: Stepper, sessions: list[Session], tokens: list[int], samplers: list[Sampler], count: int
) -> list[list[int]]:
    histories: list[list[int]] = [[] for _ in sessions]
    for _ in range(count):
        results = stepper.step(sessions, tokens, samplers)
        tokens = [token for token in results if isinstance(token, int)]
        assert len(tokens) == len(results)
        for history, token in zip(histories, tokens, strict=True):
            history.append(token)
    return histories


def successor(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """A model that attends to nothing: after token t comes t + 1."""
    return torch.nn.functional.one_hot(tokens[:, 0] + 1, 64).float() * 100


def seeded(seed: int) -> Sampler:
    return Sampler(SamplingParameters(temperature=1.0, seed=seed))


class OnlyEven:
    """A grammar of even tokens, of which it counts those that were taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.ended = False

    def start(self) -> OnlyEven:
        return self

    def allowed(self) -> NDArray[np.int32]:
        return np.full(9, 0x55555555, dtype=np.int32)  # 288 tokens

    def take(self, token: int) -> None:
        self.taken.append(token)
