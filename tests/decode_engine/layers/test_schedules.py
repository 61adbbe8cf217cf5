"""When a layer searches, and with which query: every step, or every few."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import SparseLayer
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from tests.support.layers import build_search

H, G, D, N = 2, 2, 16, 300
STEPS = 12


class Steps:
    """Decode steps of two layers over the same keys: one with a period, and one that searches in every step."""

    def __init__(self, name: str, period: int) -> None:
        generator = torch.Generator().manual_seed(3)
        kv = torch.randn(H, N, 2, D, generator=generator)
        method = replace(get_method(name, 0.1), recent=8, append_block=4)
        search = build_search(method, kv, G)
        self.figures = Figures()
        self.scheduled: list[Observation] = []
        self.always: list[Observation] = []
        self.layer = self._layer(kv, search, replace(method, period=period), self.scheduled)
        self._twin = self._layer(kv, search, method, self.always)
        self.queries = torch.randn(STEPS, H, 1, G, D, generator=generator)
        self._rows = torch.randn(STEPS, 2, H, 1, D, generator=generator)

    def _layer(self, kv: Tensor, search: object, method: Method, seen: list[Observation]) -> SparseLayer:
        figures = self.figures if seen is self.scheduled else Figures()
        layer = SparseLayer(kv, search, method, figures)  # type: ignore[arg-type]
        layer.observer = seen.append
        return layer

    def run(self) -> None:
        for step, (query, (keys, values)) in enumerate(zip(self.queries, self._rows, strict=True)):
            self.layer.attend(query, keys, values, N + step)
            self._twin.attend(query, keys, values, N + step)

    def expected(self, query: Tensor, step: int) -> list[set[int]]:
        """What a search with that query would have chosen at that step, by KV head."""
        keys, values = self._rows[step]
        self._twin.attend(query, keys, values, N + step)
        return chosen(self.always.pop())


def chosen(seen: Observation) -> list[set[int]]:
    """Selected keys by KV head."""
    ids, counts = seen.selection.ids_HTK[:, 0], seen.selection.counts_HT[:, 0]
    return [set(row[:count].tolist()) for row, count in zip(ids, counts, strict=True)]


def read(seen: Observation) -> float:
    """Something of the index that was read; indexes count vectors or bytes."""
    return seen.vectors_read + seen.bytes_read


def exact_over(seen: Observation) -> Tensor:
    """Attention over exactly the keys that the observation says were attended, [H, G, D]."""
    rows = torch.cat([seen.rows.context_HN2D, seen.rows.tail_Ht2D], dim=1).double()
    always = [*range(seen.sinks), *range(seen.search_end, seen.position + 1)]
    outs = []
    for head, keys in enumerate(chosen(seen)):
        kept = rows[head, sorted(keys) + always]
        outs.append((seen.q_HTGD[head, 0].double() @ kept[:, 0].T).softmax(-1) @ kept[:, 1])
    return torch.stack(outs)


@pytest.mark.parametrize("name", ["oracle", "csattention+dropped"])
@pytest.mark.parametrize("period", [1, 4])
def test_the_observer_sees_what_was_attended(name: str, period: int) -> None:
    steps = Steps(name, period)
    steps.run()
    assert [seen.position for seen in steps.scheduled] == list(range(N, N + STEPS))
    for seen, query in zip(steps.scheduled, steps.queries, strict=True):
        assert torch.equal(seen.q_HTGD, query)
        torch.testing.assert_close(
            seen.out_HTGD[:, 0], exact_over(seen).float(), rtol=1e-4, atol=1e-5, msg=str(seen.position)
        )


def test_a_period_reuses_the_selection_and_searches_again_after_it() -> None:
    steps = Steps("csattention", 4)
    steps.run()
    for step, seen in enumerate(steps.scheduled):
        assert chosen(seen) == chosen(steps.always[step // 4 * 4])
        assert (read(seen) > 0) == (step % 4 == 0)
    assert steps.figures.searches == STEPS / 4


def test_a_prompt_is_searched_position_by_position() -> None:
    steps = Steps("oracle", 4)
    steps.run()
    generator = torch.Generator().manual_seed(0)
    before = steps.figures.searches
    query = torch.randn(H, 20, G, D, generator=generator)
    keys, values = torch.randn(2, H, 20, D, generator=generator)
    steps.layer.attend(query, keys, values, N + STEPS)
    assert steps.figures.searches - before == 20


def test_a_repeated_step_uses_the_same_selection_again() -> None:
    steps, again = Steps("oracle", 3), Steps("oracle", 3)
    steps.run()
    for step, (query, (keys, values)) in enumerate(zip(again.queries, again._rows, strict=True)):
        for _ in range(2):
            again.layer.attend(query, keys, values, N + step)
    repeated = again.scheduled[1::2]
    assert [chosen(seen) for seen in repeated] == [chosen(seen) for seen in steps.scheduled]
    for one, two in zip(repeated, steps.scheduled, strict=True):
        assert torch.equal(one.out_HTGD, two.out_HTGD)
