"""Prompts whose tokens share one selection: made from the average of what each token's search estimates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.searchers import PromptWeights
from decode_engine.layers.selected_attention import KeyRows, Observation
from decode_engine.layers.sparse_layer import SparseLayer
from index_store.methods.presets import get_method
from index_store.selection.budgets import Ratio
from index_store.selection.cutting import cut
from index_store.selection.ranking import Items, Ranking, Step
from tests.decode_engine.layers.test_host_rows import (
    CPU,
    DIM,
    GROUP,
    HEADS,
    host_only,
    make_kv,
    small_windows,
)
from tests.support.layers import (
    ALL_METHODS,
    build_index,
    build_search,
    moved,
    with_budget,
    with_everything,
)

COUNT, PROMPT = 300, 37


def tokens(count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, count, GROUP, DIM, generator=generator)
    return q, *torch.randn(2, HEADS, count, DIM, generator=generator)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_all_keys_selected_are_all_keys_attended(name: str) -> None:
    method, kv = with_everything(ALL_METHODS[name]), make_kv()
    layer = SparseLayer(kv, build_search(method, kv, GROUP), method, Figures())
    exact = SparseLayer(kv, build_search(method, kv, GROUP), method, Figures()).exact
    for position, count in ((COUNT, PROMPT), (COUNT + PROMPT, 90)):
        new = tokens(count, position)
        torch.testing.assert_close(
            layer.attend(*new, position, shared=True), exact.attend(*new, position), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("name", ALL_METHODS)
def test_equal_tokens_select_what_one_of_them_selects(name: str) -> None:
    method, kv = with_budget(ALL_METHODS[name], 0.2), make_kv()
    q = tokens(1)[0]
    ranking = build_index(method.index, kv, GROUP).rank(q, 4, 250, None, method.search, 250)
    rows = KeyRows(kv, kv[:, :0])
    lse = torch.randn(HEADS, 1, GROUP, generator=torch.Generator().manual_seed(3)) + 2.0
    step = Step(300, lambda keep: 0.01, lambda ids: rows.read_logits(q, ids), lse)
    expected = cut(method.budget, ranking, step)
    weights = PromptWeights()
    for _ in range(3):
        weights.add(ranking)
    repeated, average = q.expand(-1, 3, -1, -1), weights.average(lse.expand(-1, 3, -1))
    together = Step(300, lambda keep: 0.01, lambda ids: weights.average_logits(repeated, rows, ids), average)
    found = cut(method.budget, weights.ranking(), together)
    for head in range(HEADS):
        kept = [
            set(each.ids_HTK[head, 0, : int(each.counts_HT[head, 0])].tolist()) for each in (found, expected)
        ]
        # Weights that rounding makes equal may change places at the end of the list.
        assert len(kept[0] ^ kept[1]) <= max(2, len(kept[1]) // 20)


def test_the_best_keys_are_those_with_the_largest_average_weight() -> None:
    method, kv = small_windows(get_method("oracle")), make_kv()
    layer = SparseLayer(kv, build_search(method, kv, GROUP), method, Figures())
    seen: list[Observation] = []
    layer.observer = seen.append
    new = tokens(PROMPT)
    out = layer.attend(*new, COUNT, shared=True)
    q, end = new[0], seen[0].search_end
    assert end <= COUNT - 16  # what the first token searches
    logits = torch.einsum("htgd,hnd->htgn", q, kv[:, method.sinks : end, 0])
    average = logits.softmax(-1).mean((1, 2))
    keep = math.ceil(0.2 * (end + 16))
    for head in range(HEADS):
        best = set((average[head].topk(keep).indices + method.sinks).tolist())
        assert set(seen[0].selection.ids_HTK[head, 0, :keep].tolist()) == best
    assert seen[0].selection.ids_HTK.shape[1] == 1
    # All tokens attend to that set, to sinks, and causally to everything from the end of the searched range on.
    keys = torch.cat([kv, torch.stack(new[1:], dim=2)], dim=1)
    positions = torch.arange(COUNT, COUNT + PROMPT)
    for head in range(HEADS):
        seen_T = torch.arange(COUNT + PROMPT) <= positions[:, None]
        kept = torch.zeros(COUNT + PROMPT, dtype=torch.bool)
        kept[: method.sinks] = kept[end:] = True
        kept[seen[0].selection.ids_HTK[head, 0, :keep].long()] = True
        scores = torch.einsum("tgd,nd->tgn", q[head], keys[head, :, 0])
        weights = scores.masked_fill(~(seen_T & kept)[:, None], -torch.inf).softmax(-1)
        torch.testing.assert_close(out[head], weights @ keys[head, :, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["csattention", "multipole-tree", "tactic", "oracle"])
def test_in_host_memory_and_in_small_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows are gathered in both, as on a device.
    monkeypatch.setattr("decode_engine.layers.selected_attention.readable", lambda *rows: False)
    method, kv = small_windows(ALL_METHODS[name]), make_kv()
    search = build_search(method, kv, GROUP)
    expected = SparseLayer(kv, search, method, Figures())
    beside = SparseLayer(host_only(kv, CPU), search, method, Figures(), CPU)
    new = tokens(PROMPT)
    whole = expected.attend(*new, COUNT, shared=True)
    assert torch.equal(beside.attend(*new, COUNT, shared=True), whole)
    for name_ in (
        "sparse_layer._SCORE_BYTES",
        "selected_attention.GATHER_BYTES",
        "searchers._LOGIT_BYTES",
    ):
        monkeypatch.setattr(f"decode_engine.layers.{name_}", 4096)
    pieces = SparseLayer(kv, search, method, Figures())
    torch.testing.assert_close(pieces.attend(*new, COUNT, shared=True), whole, rtol=1e-4, atol=1e-5)
    # A step after the prompt searches for itself; one token is a step.
    step = tokens(1, seed=9)
    position = COUNT + PROMPT
    shared, alone = (
        layer.attend(*step, position, shared=each) for layer, each in ((expected, True), (beside, False))
    )
    assert torch.equal(shared, alone)


def test_a_short_context_is_not_searched() -> None:
    method, kv = get_method("csattention"), make_kv(40)
    layer = SparseLayer(kv, build_search(method, kv, GROUP), method, Figures())
    new = tokens(5)
    found = layer.attend(*new, 40, shared=True)
    torch.testing.assert_close(found, layer.exact.attend(*new, 40), rtol=1e-5, atol=1e-6)


def test_keys_that_no_token_retrieved_are_not_taken() -> None:
    logits = torch.full((1, 2, 1, 6), -torch.inf)
    logits[0, 0, 0, 1], logits[0, 1, 0, 4] = 0.5, -2.0
    weights = PromptWeights()
    weights.add(Ranking(logits, Items(10, 16)))
    found = cut(Ratio(1.0), weights.ranking(), Step(20, None, lambda ids: ids, torch.zeros(1, 1, 1)))
    assert found.ids_HTK[0, 0, : int(found.counts_HT[0, 0])].tolist() == [11, 14]
    with pytest.raises(ValueError, match="no position"):
        PromptWeights().ranking()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["csattention", "squeezed", "multipole", "tactic"])
def test_on_a_device_wherever_keys_and_values_are(name: str) -> None:
    method, device = small_windows(get_method(name)), torch.device("cuda")
    kv = make_kv().pin_memory()
    search = moved(build_search(method, kv, GROUP), method, kv, device)
    new = [part.to(device) for part in tokens(PROMPT)]
    outs = [
        SparseLayer(keys, search, method, Figures(), beside).attend(*new, COUNT, shared=True)
        for keys, beside in ((kv, device), (kv.to(device), None))
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    whole = with_everything(method)
    exact = SparseLayer(kv, search, whole, Figures(), device)
    found = SparseLayer(kv, search, whole, Figures(), device).attend(*new, COUNT, shared=True)
    torch.testing.assert_close(found, exact.exact.attend(*new, COUNT), rtol=1e-3, atol=1e-3)
