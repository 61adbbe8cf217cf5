"""Sessions on one context that attend together get the bits that they get alone, whoever comes and goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_engine.layers import sparse_layer
from decode_engine.layers.figures import Figures
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer, attend_sparse_together
from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.indexes.interface.layer_index import Asked
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import Mass, Ratio, Threshold, TokenCount
from tests.support.layers import ALL_METHODS, build_index, build_search

H, G, D = 2, 3, 16


def context(count: int) -> Tensor:
    return torch.randn(H, count, 2, D, generator=torch.Generator().manual_seed(count)).bfloat16()


def turn(session: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The session's next query, key and value."""
    generator = torch.Generator().manual_seed(1000 * session + number)
    q, k, v = (torch.randn(H, 1, n, D, generator=generator) for n in (G, 1, 1))
    return q * 2 / D**0.5, k[:, :, 0], v[:, :, 0]


class Sessions:
    """Layers of sessions on one context, and how many tokens each has had."""

    def __init__(self, methods: list[Method], count: int, form: LogitForm = PLAIN) -> None:
        kv = context(count)
        assert methods[0].index is not None
        search = LayerSearch(build_index(methods[0].index, kv, G))
        self.layers = [SparseLayer(kv, search, method, Figures(), form=form) for method in methods]
        self._taken = [0] * len(methods)
        self._count = count

    def step(self, members: list[int]) -> list[Tensor]:
        calls = []
        for number in members:
            q, k, v = turn(number, self._taken[number])
            calls.append((self.layers[number], q, k, v, self._count + self._taken[number]))
            self._taken[number] += 1
        return attend_sparse_together(calls)


BUDGETS = [Ratio(0.02), Ratio(0.3), TokenCount(7)]


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(["refined", "refined-3"]),
    count=st.sampled_from([1, 5, 130, 700, 2300]),
    groups=st.lists(st.permutations(range(5)).flatmap(lambda p: st.integers(1, 5).map(lambda n: p[:n]))),
    budgets=st.lists(st.sampled_from(BUDGETS), min_size=5, max_size=5),
    recent=st.integers(1, 6),
    sink=st.booleans(),
)
def test_a_session_gets_the_same_bits_alone_and_in_any_group(
    name: str, count: int, groups: list[list[int]], budgets: list[Ratio], recent: int, sink: bool
) -> None:
    method = replace(get_method(name), recent=recent, append_block=4)
    methods = [replace(method, budget=budget) for budget in budgets]
    form = LogitForm(sink_HG=torch.ones(H, G)) if sink else PLAIN
    together, alone = Sessions(methods, count, form), Sessions(methods, count, form)
    for members in groups:
        for number, out in zip(members, together.step(list(members)), strict=True):
            assert torch.equal(alone.step([number])[0], out)
    for one, other in zip(together.layers, alone.layers, strict=True):
        for figure in ("kept", "attended", "available", "sparse_attended", "sparse_available", "searches"):
            assert getattr(one._figures, figure) == getattr(other._figures, figure)


def test_groups_whose_scores_are_many_attend_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [get_method("refined", 0.05)] * 7
    whole, parts = Sessions(methods, 400), Sessions(methods, 400)
    expected = whole.step(list(range(7)))
    monkeypatch.setattr(sparse_layer, "_GROUP_SCORE_BYTES", 4 * 4 * H * G * 256)
    ranked: list[int] = []
    rank = parts.layers[0].sharing
    together = rank.best_together

    def counting(asked: list[Asked], keeps: list[int]) -> object:
        ranked.append(len(asked))
        return together(asked, keeps)

    monkeypatch.setattr(rank, "best_together", counting)
    for one, other in zip(parts.step(list(range(7))), expected, strict=True):
        assert torch.equal(one, other)
    assert ranked == [4, 3]


def test_which_layers_attend_together() -> None:
    kv = context(100)

    def sharing(method: Method, form: LogitForm = PLAIN) -> bool:
        return SparseLayer(kv, build_search(method, kv, G), method, Figures(), form=form).sharing is not None

    assert {name for name, method in ALL_METHODS.items() if sharing(method)} == {"refined", "refined-3"}
    refined = ALL_METHODS["refined"]
    for budget in (Mass(0.9), Threshold(threshold=0.01)):
        assert not sharing(replace(refined, budget=budget))
    assert not sharing(replace(refined, period=2))
    assert not sharing(refined, LogitForm(cap=20.0))
    assert sharing(replace(refined, budget=TokenCount(3)))
