"""Steps of batches in which one session fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters, any_filters
from decode_engine.engine.sampling.logit_rules import LogitRules
from decode_engine.engine.stepping import choose_each, choose_together, decode_by_forward, forward_each
from index_store.errors import SparseKVError
from tests.decode_engine.engine.fake_runner import FakeRunner, FakeSession


def _greedy(count: int) -> list[Sampler]:
    return [Sampler(SamplingParameters()) for _ in range(count)]


def test_a_batch_that_works_is_fed_once() -> None:
    runner = FakeRunner()
    sessions = [FakeSession("a"), FakeSession("b")]
    assert decode_by_forward(runner.forward, sessions, [5, 7], _greedy(2)) == [6, 8]
    assert runner.calls == [(("a", "b"), 1)]


def test_sessions_with_seeds_step_alone() -> None:
    runner = FakeRunner()
    seeded, unseeded = SamplingParameters(0.1, seed=3), SamplingParameters(0.1)
    samplers = [Sampler(each) for each in (seeded, unseeded, seeded, SamplingParameters(seed=3))]
    sessions = [FakeSession(name) for name in "abcd"]
    assert decode_by_forward(runner.forward, sessions, [1, 2, 3, 4], samplers) == [2, 3, 4, 5]
    assert runner.calls == [(("b", "d"), 1), (("a",), 1), (("c",), 1)]


def test_the_fault_of_one_is_not_that_of_the_others() -> None:
    runner = FakeRunner()
    sessions = [FakeSession("a"), FakeSession("broken", fails_at=0), FakeSession("c")]
    results = decode_by_forward(runner.forward, sessions, [5, 6, 7], _greedy(3))
    assert results == [6, sessions[1].fails_with, 8]
    assert [session.fed for session in sessions] == [[5], [], [7]]
    [alone] = forward_each(runner.forward, [sessions[1]], [[1]])
    assert alone is sessions[1].fails_with


def test_a_repeated_step_draws_the_same_tokens() -> None:
    """Two runs with one seed, one of which is disturbed: a forward fails before every step."""

    def run(disturbed: bool) -> list[int | Exception]:
        fail = False

        def forward(sessions: Sequence[str], token_ids: Sequence[Sequence[int]]) -> list[Tensor]:
            nonlocal fail
            fail = disturbed and not fail
            if fail:
                raise OSError("try again")
            return [torch.linspace(0, 1, 50)[None] for _ in sessions]

        sampler = Sampler(SamplingParameters(temperature=1.0, seed=6))
        results = [decode_by_forward(forward, ["a"], [0], [sampler])[0] for _ in range(20)]
        return [result for result in results if isinstance(result, int)]

    calm, disturbed = run(False), run(True)
    assert len(disturbed) == 10
    assert disturbed == calm[:10]


def test_rows_that_are_not_finite_fail_alone() -> None:
    good, bad = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.0, torch.nan, 1.0])
    first, second = choose_each([bad, good], _greedy(2))
    assert isinstance(first, SparseKVError)
    assert second == 1


@pytest.mark.parametrize("vocabulary", [100, 6000])  # all rows at a time, and five
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}])
def test_rows_chosen_together_are_those_chosen_alone(options: dict[str, float], vocabulary: int) -> None:
    logits = torch.randn(12, vocabulary, generator=torch.Generator().manual_seed(2))
    logits[3, 7] = torch.inf

    def samplers() -> list[Sampler]:
        drawn = [Sampler(SamplingParameters(seed=seed, **options)) for seed in range(10)]  # type: ignore[arg-type]
        filtered = Sampler(SamplingParameters(temperature=2.0, top_k=50, seed=11))
        return [*drawn[:5], *_greedy(1), filtered, *drawn[5:]]

    together, each, alone = samplers(), samplers(), samplers()
    for _ in range(5):
        ways = [
            choose_together(logits, together),
            choose_each(list(logits), each),
            [choose_each([row], [sampler])[0] for row, sampler in zip(logits, alone, strict=True)],
        ]
        assert all(isinstance(tokens.pop(3), SparseKVError) for tokens in ways)
        assert ways[0] == ways[1] == ways[2]
        drawn = [[sampler.draw() for sampler in some] for some in (together, each, alone)]
        assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ([{}, {"top_p": 0.5}], False),  # greedy
        ([{"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}], False),
        ([{}, {"temperature": 1.0, "top_p": 0.5}], True),
        ([{"temperature": 1.0, "top_k": 9}], True),
    ],
)
def test_rows_are_sorted_only_where_something_filters(options: list[dict[str, float]], filters: bool) -> None:
    samplers = [Sampler(SamplingParameters(**given)) for given in options]  # type: ignore[arg-type]
    assert any_filters(samplers) is filters


def test_rows_that_are_edited_are_chosen_together_as_alone() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3)) * 3
    rules = LogitRules(
        presence_penalty=2.0, repetition_penalty=1.5, logit_bias={7: 4.0, 8: -100.0}, min_tokens=9
    )
    options = [
        SamplingParameters(),
        SamplingParameters(1.0, seed=1, rules=rules),
        SamplingParameters(rules=rules, top_logprobs=3),
        SamplingParameters(1.0, 0.9, 20, seed=2, top_logprobs=0),
    ]

    def samplers() -> list[Sampler]:
        return [Sampler(each, prompt=[1, 2, 3], end_ids=[5]) for each in options]

    one, all_ = samplers(), samplers()
    for _ in range(5):
        before = logits.clone()
        chosen = choose_each(list(logits), one)
        assert choose_together(logits, all_) == chosen
        assert torch.equal(logits, before)
        assert [sampler.logprob for sampler in one] == [sampler.logprob for sampler in all_]
        assert one[3].logprob is not None
        assert one[3].logprob.logprob == pytest.approx(float(logits[3].log_softmax(0)[chosen[3]]), abs=1e-5)
