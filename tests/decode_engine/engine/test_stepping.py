"""Steps in flight, and how prompts are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_engine.engine.prompt_pieces import PromptCost, cut_prompt, prompt_cost
from decode_engine.engine.sampler import Sampler, SamplingParameters, any_filters
from decode_engine.engine.stepping import choose_each, choose_together, decode_by_forward, forward_each
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from index_store.errors import SparseKVError
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from index_store.store.description.array_entry import kv_entry, tokens_entry
from index_store.store.description.manifest import Manifest
from tests.decode_engine.engine.fake_runner import FakeRunner, FakeSession
from tests.support.models import write_model_folder


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
    rules: Any = {
        "presence_penalty": 2.0,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 4.0, 8: -100.0},
        "min_tokens": 9,
    }
    options = [
        SamplingParameters(),
        SamplingParameters(1.0, seed=1, **rules),
        SamplingParameters(**rules, top_logprobs=3),
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


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def costs_one_by_one(cost: PromptCost, tokens: int) -> list[float]:
    """Of every token of a prompt, with the move that comes with it."""
    return [
        cost.token_after(token) + (0.0 if (cost.begin + token) % cost.block else cost.moves_after(token))
        for token in range(tokens)
    ]


@settings(max_examples=200, deadline=None)
@given(
    token=st.sampled_from([1.0, 1.7, 9.0, 70.0]),
    move=st.sampled_from([0.0, 2.5, 40.0]),
    clustering=st.sampled_from([0.0, 0.001]),
    block=st.sampled_from([1, 3, 16, 64, 10**9]),
    begin=st.integers(0, 70),
    tokens=st.integers(1, 900),
    most=st.sampled_from([0.5, 1.0, 8.0, 50.0, 128.0]),
    key=st.sampled_from([0.0, 0.01]),
)
def test_pieces_are_the_whole_prompt_and_no_longer_than_their_cost_allows(
    token: float, move: float, clustering: float, block: int, begin: int, tokens: int, most: float, key: float
) -> None:
    cost = PromptCost(token, move, clustering, 90, block, begin, key=key, free=50.0)
    pieces = cut_prompt(cost, tokens, most)
    assert sum(piece.tokens for piece in pieces) == tokens
    single, done = costs_one_by_one(cost, tokens), 0
    for piece in pieces:
        end = done + piece.tokens
        assert piece.cost == pytest.approx(sum(single[done:end]))
        assert piece.tokens == 1 or piece.cost <= most + 1e-9
        assert end == tokens or piece.cost + single[end] > most - 1e-9
        done = end


def test_ordinary_tokens_are_cut_by_number() -> None:
    assert [piece.tokens for piece in cut_prompt(PromptCost(), 300, 128)] == [128, 128, 44]
    assert len(cut_prompt(PromptCost(), 10**7, 128)) == 78125


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("pieces") / "model"
    return ModelRunner(
        resolve_model(str(write_model_folder(folder, layers=2, head_dim=32, max_positions=2**20)))
    )


@pytest.fixture(scope="module")
def manifest(runner: ModelRunner) -> Manifest:
    also = list(METHODS.values())
    return made_up_context(runner.identity, runner.kv_dtype, METHODS["full"], 200, also=also).manifest


def longer(manifest: Manifest, tokens: int) -> Manifest:
    kv = kv_entry(manifest.model, tokens, manifest.dtype)
    return replace(manifest, token_count=tokens, tokens=tokens_entry(tokens), kv=kv)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_full_attention_of_an_ordinary_context_costs_one(
    manifest: Manifest, name: str, device: torch.device
) -> None:
    exact = prompt_cost(METHODS[name].on(longer(manifest, 8192)), Prompts.EXACT, device)
    assert exact.token == 1.0
    each = prompt_cost(METHODS[name].on(longer(manifest, 8192)), Prompts.EACH, CPU)
    assert (each.token == 1.0) == (not METHODS[name].sparse)
    assert (each.move > 0) == METHODS[name].sparse


def test_what_costs_more_makes_shorter_pieces(manifest: Manifest) -> None:
    def pieces(expression: str, tokens: int = 8192, prompts: Prompts = Prompts.EACH, **budget: float) -> int:
        fitted = get_method(expression, **budget).on(longer(manifest, tokens))  # type: ignore[arg-type]
        return len(cut_prompt(prompt_cost(fitted, prompts, CPU), 3000, 128))

    ordinary = pieces("full")
    assert ordinary == 28  # of which 24 for tokens that see none of the prompt
    assert (
        ordinary < pieces("csattention") < pieces("csattention", keep=0.5) < pieces("csattention", keep=1.0)
    )
    assert pieces("csattention") < pieces("csattention@append_block=16")
    assert pieces("csattention") < pieces("csattention", 2**17)
    assert pieces("csattention", mass=0.9) > pieces("csattention")
    assert pieces("csattention", tokens=8192, prompts=Prompts.SPARSE) < pieces("csattention", keep=1.0)
    assert pieces("csattention", prompts=Prompts.EXACT) < pieces("csattention")


def test_a_token_far_into_a_prompt_costs_what_it_costs_behind_a_context(
    runner: ModelRunner, manifest: Manifest
) -> None:
    full = METHODS["full"]
    alone = prompt_cost(full.on(runner.no_context.manifest), Prompts.EACH, CPU)
    assert (alone.token, alone.token_after(4096)) == (1.0, 1.0)
    for count in (2**14, 2**17):
        stored = prompt_cost(full.on(longer(manifest, count)), Prompts.EACH, CPU)
        behind = prompt_cost(full.on(runner.no_context.manifest), Prompts.EACH, CPU, tail=count)
        assert alone.token_after(count) == pytest.approx(stored.token) == pytest.approx(behind.token)
        assert stored.token > 1.5


def test_keys_that_exact_prompts_leave_behind_are_appended_piece_by_piece(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all at once by the first decode step."""
    monkeypatch.setattr(runner, "prompts", Prompts.EXACT)
    method = replace(METHODS["multipole"], recent=8, append_block=4)
    context = made_up_context(runner.identity, runner.kv_dtype, method, 60)
    session, other = (runner.start(context, method.on(context.manifest)) for _ in range(2))
    runner.read([session], [[1] * 30])
    runner.forward([other], [[1] * 30], exact=True)
    layer = session.layers[0]
    assert isinstance(layer, SparseLayer)
    (appended,) = layer._appended.values()
    assert 60 + appended.count == method.searched_range(90, 60)[1]
    one, two = (runner.forward([each], [[2]])[0] for each in (session, other))
    assert torch.equal(one, two)
