"""Verified tokens are those that come one by one, whatever is drafted, and are distributed as if nothing were."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import verify
from index_store.errors import SparseKVError

VOCABULARY, ROWS = 12, 4

PARAMETERS = [
    SamplingParameters(),
    SamplingParameters(temperature=0.8, seed=5),
    SamplingParameters(temperature=1.3, top_p=0.7, seed=6),
    SamplingParameters(temperature=1.0, top_k=4, seed=7),
    SamplingParameters(presence_penalty=1.5, frequency_penalty=0.5, min_tokens=3, top_logprobs=2),
    SamplingParameters(temperature=1.0, seed=8, repetition_penalty=1.5, logit_bias={3: 2.0}),
]


def logits_after(tokens: list[int]) -> Tensor:
    """Of a made-up model, whose logits depend on all that was said."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return 2 * torch.randn(VOCABULARY, generator=generator)


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_tokens_are_those_that_come_one_by_one(parameters: SamplingParameters, wrong: int) -> None:
    alone, drafting = (Sampler(parameters, [1, 2], [0]) for _ in range(2))
    expected: list[int] = []
    while len(expected) < 30:
        expected.append(alone.sample(logits_after(expected)))
    said: list[int] = []
    while len(said) < 30 - ROWS:
        drafts = expected[len(said) : len(said) + ROWS - 1]
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % VOCABULARY
        logits = torch.stack([logits_after([*said, *drafts[:count]]) for count in range(len(drafts) + 1)])
        found = verify(logits, drafting, drafts)
        assert isinstance(found, tuple)
        assert len(found) == min(wrong, ROWS - 1) + 1
        said += found
    assert said == expected[: len(said)]
    assert list(drafting.logprobs) == list(alone.logprobs)[: len(drafting.logprobs)]
    assert len(drafting.logprobs) == (len(said) if parameters.top_logprobs else 0)


@pytest.mark.parametrize("draws", [4_000, pytest.param(100_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("guessing", ["alike", "copied"])
def test_the_distribution_is_that_without_drafts(guessing: str, draws: int) -> None:
    """Chi-square over the first and the second token, of drafts of logits like the model's, and of fixed ones."""
    own = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    others = [own.roll(1), own.roll(2), own.flip(0), own * 0.3, own * 2]  # behind each token
    sampler = Sampler(SamplingParameters(temperature=1.0, seed=3))
    counts: Counter[tuple[int, int]] = Counter()
    firsts: Counter[int] = Counter()
    right = 0
    for _ in range(draws):
        draft = (
            0 if guessing == "copied" else sampler.guess(own + torch.tensor([0.3, -0.2, 0.1, 0.0, 0.2]), 0)
        )
        found = verify(torch.stack([own, others[draft]]), sampler, [draft])
        assert isinstance(found, tuple)
        firsts[found[0]] += 1
        if len(found) == 2:
            right += 1
            counts[found[0], found[1]] += 1
    assert chi_square(firsts, own.softmax(0)) < 23.5  # 4 degrees of freedom: once in 10,000
    for token in range(5):
        seconds = Counter({second: count for (first, second), count in counts.items() if first == token})
        if seconds.total() > 400:
            assert chi_square(seconds, others[token].softmax(0)) < 23.5
    assert right / draws == pytest.approx(
        float(own.softmax(0)[0]) if guessing == "copied" else 0.89, abs=0.04
    )


def chi_square(counts: Counter[int], chances: Tensor) -> float:
    expected = chances.double().numpy() * counts.total()
    found = np.array([counts[token] for token in range(len(expected))])
    return float(((found - expected) ** 2 / expected).sum())


def test_what_goes_wrong_comes_behind_the_tokens_before_it() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 4] = 1.0
    logits[1, :] = torch.nan
    for parameters in (SamplingParameters(), replace(PARAMETERS[1], seed=1)):
        sampler = Sampler(parameters)
        assert verify(logits[1:], sampler, [5]).args == ("the model's logits are not finite",)  # type: ignore[union-attr]
        assert isinstance(verify(logits[1:], sampler, [5]), SparseKVError)
    assert verify(logits, Sampler(SamplingParameters()), [4, 4]) == (4,)
