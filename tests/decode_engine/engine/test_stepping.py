"""Steps in flight, verified drafts, how prompts are cut into pieces, and the memory that a request is said to need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from decode_engine.engine.prompt_pieces import PromptCost, cut_prompt, prompt_cost
from decode_engine.engine.sampler import Sampler, SamplingParameters, any_filters
from decode_engine.engine.session_memory import fitting_tokens, session_bytes
from decode_engine.engine.stepping import (
    choose_each,
    choose_together,
    decode_by_forward,
    verify,
)
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from index_store.errors import SparseKVError
from index_store.indexes.interface.index_kind import Growth
from index_store.indexes.key_clusters.index import OnlineClusters
from index_store.indexes.key_clusters.parameters import online_bytes
from index_store.indexes.query_tables.index import QueryTables
from index_store.memory.resident import ResidentContext
from index_store.methods.method import INDEX_SPECS
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from index_store.store.description.array_entry import kv_entry, tokens_entry
from index_store.store.description.manifest import Manifest
from tests.decode_engine.engine.fake_runner import FakeRunner, FakeSession
from tests.support.models import write_model_folder


def _greedy(count: int) -> list[Sampler]:
    return [Sampler(SamplingParameters()) for _ in range(count)]


def test_sessions_with_seeds_step_alone() -> None:
    runner = FakeRunner()
    seeded, unseeded = SamplingParameters(0.1, seed=3), SamplingParameters(0.1)
    samplers = [Sampler(each) for each in (seeded, unseeded, seeded, SamplingParameters(seed=3))]
    sessions = [FakeSession(name) for name in "abcd"]
    assert decode_by_forward(runner.forward, sessions, [1, 2, 3, 4], samplers) == [2, 3, 4, 5]
    assert runner.calls == [(("b", "d"), 1), (("a",), 1), (("c",), 1)]


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
        assert one[3].logprob.logprob == pytest.approx(float(logits[3].log_softmax(0)[chosen[3]]), abs=1e-5)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def costs_one_by_one(cost: PromptCost, tokens: int) -> list[float]:
    """Of every token of a prompt, with the move that comes with it."""
    return [
        cost.token_after(token) + (0.0 if (cost.begin + token) % cost.block else cost.moves_after(token))
        for token in range(tokens)
    ]


@settings(max_examples=80, deadline=None)
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
    for parameters in (SamplingParameters(), structs.replace(PARAMETERS[1], seed=1)):
        sampler = Sampler(parameters)
        assert verify(logits[1:], sampler, [5]).args == ("the model's logits are not finite",)  # type: ignore[union-attr]
        assert isinstance(verify(logits[1:], sampler, [5]), SparseKVError)
    assert verify(logits, Sampler(SamplingParameters()), [4, 4]) == (4,)


EXPRESSIONS = (*METHODS, "csattention+dropped", "oracle+centred", "multipole+centred", "csattention+coarse")


@pytest.fixture(scope="module")
def memory_runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("memory") / "model"
    return ModelRunner(resolve_model(str(write_model_folder(folder, "llama", layers=2, head_dim=32))))


@pytest.fixture(scope="module")
def context(memory_runner: ModelRunner) -> ResidentContext:
    also = [get_method(name) for name in EXPRESSIONS]
    return made_up_context(memory_runner.identity, memory_runner.kv_dtype, METHODS["full"], 300, also=also)


@pytest.mark.parametrize("block", [None, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_sessions_hold_what_was_estimated(
    memory_runner: ModelRunner, context: ResidentContext, name: str, block: int | None
) -> None:
    """At every length of a tail, whatever pieces it was read in: all of it, and never more."""
    method = get_method(name)
    if block is not None and method.sparse:
        method = replace(method, append_block=block)
    fitted = method.on(context.manifest)
    session = memory_runner.start(context, fitted)
    for piece in (1, 1, 31, 32, 33, 100, 2, 150, 163, 20, 200):
        memory_runner.forward([session], [[session.position % 50] * piece])
        held, estimate = session.nbytes, session_bytes(fitted, session.tail_keys)
        assert held <= estimate
        # Lists take up fewer keys where these score low; clusters that are not searched never list their members; what
        # drafts search is appended when something is drafted.
        least = 0.5 if name in ("csattention-paper", "exact") else 0.95 if fitted.partition else 1.0
        assert held >= least * estimate


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_as_many_tokens_fit_as_there_is_room_for(context: ResidentContext, name: str) -> None:
    fitted = get_method(name).on(context.manifest)
    needed = [session_bytes(fitted, 40 + tokens) for tokens in range(301)]
    assert fitting_tokens(fitted, 40, 1, 300, None) == (300, needed[300])
    for room in (needed[300], needed[300] - 1, needed[77], needed[2], needed[1], needed[1] - 1):
        tokens, held = fitting_tokens(fitted, 40, 1, 300, room)
        assert held == needed[tokens] <= max(room, needed[1])
        assert tokens == 300 or needed[tokens + 1] > room
    assert fitting_tokens(fitted, 40, 90, 300, needed[10])[0] in range(90, 301)


@pytest.mark.parametrize("moments", ["none", "diagonal"])
@pytest.mark.parametrize(("block", "per_cluster"), [(0, 16), (64, 16), (100, 7), (9, 4), (1, 1)])
def test_clusters_hold_what_was_estimated_over_many_blocks(
    moments: str, block: int, per_cluster: int
) -> None:
    clusters = OnlineClusters(2, 8, 0, per_cluster, "cosine", block, moments, None, seed=0)
    generator = torch.Generator().manual_seed(1)
    for piece in (1, 7, 64, 64, 1, 100, 30, 64, 5):
        clusters.append(torch.randn(2, piece, 2, 8, generator=generator))
        assert clusters.members.keys_HX.shape[1] == clusters.count
        assert clusters.nbytes == 2 * online_bytes(8, per_cluster, block, moments, clusters.count)


def test_lists_that_take_every_key_hold_what_was_estimated(context: ResidentContext) -> None:
    parameters = INDEX_SPECS["paper_tables"].parameters
    arrays = context.index("paper_tables", 0).arrays()
    lowest = {**arrays, "scores": torch.full_like(arrays["scores"], -(2**15))}
    appended = QueryTables.from_arrays(parameters, lowest, context.kv(0)).start_appending()
    for number in range(1, 9):
        appended.append(torch.randn(2, 20, 2, 32))
        growth = Growth(300, 20 * number, 20)
        assert appended.nbytes == 2 * INDEX_SPECS["paper_tables"].built.appended_bytes(32, growth)


def test_layers_that_attend_to_everything_append_nothing(memory_runner: ModelRunner) -> None:
    method = get_method("csattention+dropped")
    manifest = made_up_context(memory_runner.identity, memory_runner.kv_dtype, method).manifest
    one, two, full = (
        session_bytes(method.on(replace(manifest, dense_layers=layers)), 1000)
        for layers in ((), (0,), (0, 1))
    )
    assert one - two == two - full > 0
    assert full == session_bytes(get_method("full").on(manifest), 1000)


@pytest.mark.parametrize("piece", [1, 100, 500])
def test_tails_hold_what_was_estimated_whatever_the_pieces(memory_runner: ModelRunner, piece: int) -> None:
    method = get_method("full")
    context = made_up_context(memory_runner.identity, memory_runner.kv_dtype, method)
    session = memory_runner.start(context, method.on(context.manifest))
    tail = session.layers[0].tail
    while tail.count < 4050:
        tail.reserve(min(tail.count + piece, 4050))
        tail.count = min(tail.count + piece, 4050)
    assert tail.nbytes * len(session.layers) <= session_bytes(method.on(context.manifest), 4050)


def test_the_estimate_grows_by_doubling(memory_runner: ModelRunner) -> None:
    method = get_method("full")
    manifest = made_up_context(memory_runner.identity, memory_runner.kv_dtype, method).manifest
    row = 2 * manifest.model.kv_heads * 32 * 4 * manifest.model.layers
    sizes = [session_bytes(method.on(manifest), tokens) for tokens in (1, 128, 129, 256, 257, 32768)]
    assert sizes == [rows * row for rows in (128, 128, 256, 256, 512, 32768)]


def test_a_session_that_drafts_may_hold_what_its_drafts_append(context: ResidentContext) -> None:
    exact, refined, full = (
        session_bytes(get_method(name).on(context.manifest), 4000) for name in ("exact", "refined", "full")
    )
    assert exact == refined > full
