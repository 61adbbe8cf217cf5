"""Sampling: distributions, determinism and the ranges of arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from decode_engine.engine.sampler import (
    Draws,
    Sampler,
    SamplingParameters,
    choose_greedy,
    choose_tokens,
)
from decode_engine.settings.request_bounds import MAX_SEED
from index_store.errors import InvalidArgumentError, SparseKVError

LOGITS = torch.tensor([0.5, 3.0, 2.0, -1.0, 2.9])


def draw(parameters: SamplingParameters, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(parameters)
    return [sampler.sample(logits) for _ in range(count)]


def test_temperature_gives_the_softmax_distribution() -> None:
    counts = torch.bincount(
        torch.tensor(draw(SamplingParameters(temperature=2.0, seed=3), 4000)), minlength=5
    )
    expected = torch.softmax(LOGITS / 2.0, 0)
    torch.testing.assert_close(counts / 4000, expected, atol=0.03, rtol=0)


FIVE = torch.tensor([0.033, 0.412, 0.148, 0.007, 0.400]).log()
FOUR = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


@pytest.mark.parametrize(
    ("options", "logits", "kept"),
    [
        ({}, LOGITS, {1}),
        ({"temperature": 5.0, "top_k": 1}, LOGITS, {1}),
        ({"temperature": 1e-30, "seed": 1}, LOGITS, {1}),
        ({"temperature": 100.0, "top_k": 3, "seed": 1}, LOGITS, {1, 2, 4}),
        ({"temperature": 100.0, "top_k": 50, "seed": 1}, LOGITS, {0, 1, 2, 3, 4}),
        *(
            ({"temperature": 1.0, "top_p": top_p, "seed": 5}, FIVE, kept)
            for top_p, kept in ((0.05, {1}), (0.42, {1, 4}), (0.75, {1, 4}), (0.95, {1, 2, 4}))
        ),
        # top_p applies after top_k: among the two likeliest the first has 4/7 = .571
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.57, "seed": 1}, FOUR, {0}),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.58, "seed": 1}, FOUR, {0, 1}),
        ({"temperature": 10.0, "seed": 1}, torch.tensor([-torch.inf, 1.0, -torch.inf]).bfloat16(), {1}),
    ],
)
def test_all_that_is_kept_is_drawn_and_nothing_else(
    options: dict[str, Any], logits: torch.Tensor, kept: set[int]
) -> None:
    assert set(draw(SamplingParameters(**options), 500, logits)) == kept


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_logits_that_are_not_finite_are_refused(bad: float, options: dict[str, Any]) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    sampler = Sampler(SamplingParameters(**options))
    number = sampler.draw()
    for refused in (logits, torch.full((5,), -torch.inf)):
        with pytest.raises(SparseKVError, match="not finite"):
            sampler.sample(refused)
    assert sampler.draw() == number, "nothing was drawn"


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


def test_the_number_of_a_token_stays_until_the_token_is_taken() -> None:
    sampler, other = (Sampler(SamplingParameters(temperature=1.0, seed=9)) for _ in range(2))
    numbers = []
    for _ in range(20):
        numbers.append(sampler.draw())
        assert sampler.draw() == numbers[-1]
        assert other.draw() == numbers[-1]
        sampler.take(0)
        other.sample(LOGITS)
    assert len(set(numbers)) == 20
    assert all(0.0 <= number < 1.0 for number in numbers)
    unread = Sampler(SamplingParameters(temperature=1.0, seed=9))
    unread.take(0)
    assert unread.draw() == numbers[1], "advancing without looking skips one number"


def _draws(rows: Sequence[tuple[float, float, int, float]]) -> Draws:
    """From rows of temperature, top_p, top_k and the uniform number."""
    temperature, top_p, top_k, uniform = zip(*rows, strict=True)
    return Draws(torch.tensor(temperature), torch.tensor(top_p), torch.tensor(top_k), torch.tensor(uniform))


def test_tokens_share_the_unit_interval_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    numbers = [0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 1.0 - 2**-24]
    draws = _draws([(1.0, 1.0, 0, number) for number in numbers])
    assert choose_tokens(logits.expand(8, 4), draws).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # of three tokens: .4, .2 and .3 out of .9
    draws = _draws([(1.0, 1.0, 3, number) for number in (0.0, 0.44, 0.45, 0.66, 0.67)])
    assert choose_tokens(logits.expand(5, 4), draws).tolist() == [1, 1, 2, 2, 3]


def test_equal_logits_are_kept_by_id() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0])
    numbers = torch.linspace(0, 0.999, 40).tolist()
    for top_k, kept in ((2, {1, 4}), (3, {0, 1, 4}), (5, {0, 1, 2, 3, 4})):
        chosen = choose_tokens(logits.expand(40, 6), _draws([(1.0, 1.0, top_k, u) for u in numbers]))
        assert set(chosen.tolist()) == kept
        assert set(draw(SamplingParameters(temperature=1.0, top_k=top_k, seed=2), 200, logits)) == kept
    # equal weights: the first of four hold .5, the third is there because .5 had not reached .6
    draws = _draws([(1.0, 0.6, 0, u) for u in numbers])
    assert set(choose_tokens(torch.zeros(40, 4), draws).tolist()) == {0, 1, 2}


def test_every_row_of_a_batch_has_rules_of_its_own() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().repeat(7, 1)
    logits[5, 2], logits[6] = torch.nan, -torch.inf
    rows = [
        (0.0, 0.1, 3, 0.9),  # greedy
        (3.0, 1.0, 1, 0.9),  # greedy by top_k
        (1.0, 0.5, 0, 0.9),  # of ids 1 and 3
        (1.0, 0.5, 0, 0.5),
        (1.0, 1.0, 9, 0.6),  # top_k beyond the vocabulary
        (1.0, 1.0, 0, 0.5),  # not finite
        (0.0, 1.0, 0, 0.0),  # nothing can come
    ]
    assert choose_tokens(logits, _draws(rows)).tolist() == [1, 1, 3, 1, 2, -1, -1]
    assert choose_greedy(logits).tolist() == [1, 1, 1, 1, 1, -1, -1]
    unfiltered = choose_tokens(logits, _draws([(1.0, 1.0, 0, 0.6)] * 7), filtered=False)
    assert unfiltered.tolist() == [2] * 5 + [-1] * 2


@pytest.mark.parametrize("vocabulary", [1, 7, 511, 512, 513, 1024, 1025, 5000])
def test_one_row_at_a_time_chooses_the_tokens_of_the_batch(vocabulary: int) -> None:
    """Coarse logits, so that many are equal; the shorter ways of a single row find the same tokens."""
    generator = torch.Generator().manual_seed(vocabulary)
    top_ks, top_ps = (0, 1, 2, 5, 50, vocabulary, vocabulary - 1, vocabulary + 3), (1.0, 0.9, 0.3)
    samplers = [
        Sampler(SamplingParameters(temperature=(0.3, 1.0, 4.0)[n % 3], top_p=top_p, top_k=top_k, seed=n))
        for n, (top_k, top_p) in enumerate(itertools.product(top_ks, top_ps))
    ]
    logits = (torch.randn(len(samplers), vocabulary, generator=generator) * 3).to(torch.bfloat16)
    together = choose_tokens(logits, Draws.of(samplers)).tolist()
    assert together == [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]
    assert vocabulary < 7 or len(set(together)) > 3


def test_a_batch_has_the_softmax_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1100, generator=generator) * 2
    rows = 20000
    one = torch.ones(rows)
    draws = Draws(one * 1.5, one, torch.zeros(rows).long(), torch.rand(rows, generator=generator))
    chosen = torch.cat(
        [
            choose_tokens(
                logits.expand(500, -1),
                Draws(one[part] * 1.5, one[part], draws.top_k_B[part], draws.uniform_B[part]),
                filtered=False,
            )
            for part in (slice(low, low + 500) for low in range(0, rows, 500))
        ]
    )
    found = torch.bincount(chosen, minlength=1100)
    expected = torch.softmax(logits / 1.5, 0) * rows
    # of many independent counts the squared deviations sum up to about their number (1099 +- 47)
    assert float(((found - expected) ** 2 / expected).sum()) == pytest.approx(1099, abs=300)


def test_nothing_is_put_on_another_device() -> None:
    """Tensors made without a device would be made on "meta" here and could not be read."""
    sampler = Sampler(SamplingParameters(temperature=1.0, top_p=0.9, top_k=3, seed=1))
    logits = torch.stack([LOGITS, LOGITS])
    expected = choose_tokens(logits, Draws.of([sampler] * 2)).tolist()
    with torch.device("meta"):
        draws = Draws.of([sampler] * 2)
        assert choose_tokens(logits, draws).tolist() == expected
        assert choose_greedy(logits).tolist() == [1, 1]
        assert sampler.sample(LOGITS) == expected[0]


@pytest.mark.gpu
def test_a_cuda_graph_chooses_the_tokens_of_the_cpu() -> None:
    rows, vocabulary = 16, 131072
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    samplers = [
        Sampler(
            SamplingParameters(temperature=n / 5, top_p=(1.0, 0.9)[n % 2], top_k=(0, 40)[n // 2 % 2], seed=n)
        )
        for n in range(rows)
    ]
    draws, held = Draws.of(samplers, "cuda"), logits.cuda()
    choose_tokens(held, draws)  # what is loaded on first use cannot be loaded while a graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = choose_tokens(held, draws)
    for shift in range(3):
        held.copy_(logits.roll(shift, dims=1))
        graph.replay()
        assert chosen.tolist() == choose_tokens(logits.roll(shift, dims=1), Draws.of(samplers)).tolist()
