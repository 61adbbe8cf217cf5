"""Sampling: distributions, determinism and the ranges of arguments."""

from __future__ import annotations

import pytest
import torch

from decode_engine.sampler import MAX_SEED, Sampler, SamplingParameters
from index_store.errors import InvalidArgumentError, SparseKVError

LOGITS = torch.tensor([0.5, 3.0, 2.0, -1.0, 2.9])


def draw(parameters: SamplingParameters, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(parameters)
    return [sampler.sample(logits) for _ in range(count)]


def test_greedy_takes_the_likeliest() -> None:
    assert draw(SamplingParameters(), 3) == [1, 1, 1]
    assert draw(SamplingParameters(temperature=5.0, top_k=1), 3) == [1, 1, 1]


def test_temperature_gives_the_softmax_distribution() -> None:
    counts = torch.bincount(
        torch.tensor(draw(SamplingParameters(temperature=2.0, seed=3), 4000)), minlength=5
    )
    expected = torch.softmax(LOGITS / 2.0, 0)
    torch.testing.assert_close(counts / 4000, expected, atol=0.03, rtol=0)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draw(SamplingParameters(temperature=100.0, top_k=3, seed=1), 300)) == {1, 2, 4}
    assert set(draw(SamplingParameters(temperature=100.0, top_k=50, seed=1), 300)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("top_p", "kept"), [(0.05, {1}), (0.42, {1, 4}), (0.75, {1, 4}), (0.95, {1, 2, 4})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    # probabilities in descending order: .412 .400 .148 .033 .007
    logits = torch.tensor([0.033, 0.412, 0.148, 0.007, 0.400]).log()
    assert set(draw(SamplingParameters(temperature=1.0, top_p=top_p, seed=5), 500, logits)) == kept


def test_top_p_applies_after_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # among the two likeliest the first has 4/7 = .571
    assert set(draw(SamplingParameters(temperature=1.0, top_k=2, top_p=0.57, seed=1), 200, logits)) == {0}
    assert set(draw(SamplingParameters(temperature=1.0, top_k=2, top_p=0.58, seed=1), 200, logits)) == {0, 1}


@pytest.mark.parametrize("seed", [0, 17, 2**63, MAX_SEED])
def test_same_seed_same_tokens(seed: int) -> None:
    parameters = SamplingParameters(temperature=3.0, seed=seed)
    assert draw(parameters, 50) == draw(parameters, 50)
    assert Sampler(parameters).seed == seed


def test_without_a_seed_every_sampler_draws_its_own() -> None:
    parameters = SamplingParameters(temperature=3.0)
    assert draw(parameters, 50) != draw(parameters, 50)
    sampler = Sampler(parameters)
    drawn = [sampler.sample(LOGITS) for _ in range(50)]
    assert drawn == draw(SamplingParameters(temperature=3.0, seed=sampler.seed), 50)


def test_extremely_low_temperature_is_greedy() -> None:
    assert draw(SamplingParameters(temperature=1e-30, seed=1), 20) == [1] * 20


def test_half_precision_and_masked_logits() -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf], dtype=torch.bfloat16)
    assert draw(SamplingParameters(temperature=10.0, seed=1), 20, logits) == [1] * 20


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    with pytest.raises(SparseKVError, match="not finite"):
        Sampler(SamplingParameters()).sample(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_arguments_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=field) as caught:
        SamplingParameters(**{field: value})  # type: ignore[arg-type]
    assert caught.value.metadata == {"field": field}
