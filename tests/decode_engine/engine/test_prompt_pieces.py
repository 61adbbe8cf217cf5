"""Where prompts are cut: pieces of bounded cost, and what methods are said to cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_engine.engine.prompt_pieces import PromptCost, cut_prompt, prompt_cost
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.settings.command_options import Prompts
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import resolve_model
from index_store.store.description.array_shapes import kv_entry, tokens_entry
from index_store.store.description.manifest import Manifest
from tests.support.models import write_model_folder

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
    assert (each.token == 1.0) == (name == "full")
    assert (each.move > 0) == (name != "full")


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
