"""When a layer searches, and with which query: every step, every few, one step late, corrected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import SparseLayer
from index_store.methods.method import Method, Schedule
from index_store.methods.presets import get_method
from tests.support.layers import build_search

H, G, D, N = 2, 2, 16, 300
STEPS = 12


class Steps:
    """Decode steps of two layers over the same keys: one with a schedule, and one that searches in every step."""

    def __init__(self, name: str, schedule: Schedule) -> None:
        generator = torch.Generator().manual_seed(3)
        kv = torch.randn(H, N, 2, D, generator=generator)
        method = replace(get_method(name, 0.1), recent=8, append_block=4)
        search = build_search(method, kv, G)
        self.figures = Figures()
        self.scheduled: list[Observation] = []
        self.always: list[Observation] = []
        self.layer = self._layer(kv, search, replace(method, schedule=schedule), self.scheduled)
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
@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(period=4), Schedule(lag=1), Schedule(lag=1, correct_below=0.3)]
)
def test_the_observer_sees_what_was_attended(name: str, schedule: Schedule) -> None:
    steps = Steps(name, schedule)
    steps.run()
    assert [seen.position for seen in steps.scheduled] == list(range(N, N + STEPS))
    for seen, query in zip(steps.scheduled, steps.queries, strict=True):
        assert torch.equal(seen.q_HTGD, query)
        torch.testing.assert_close(
            seen.out_HTGD[:, 0], exact_over(seen).float(), rtol=1e-4, atol=1e-5, msg=str(seen.position)
        )


def test_a_lag_uses_the_selection_of_the_step_before() -> None:
    steps = Steps("csattention", Schedule(lag=1))
    steps.run()
    scheduled = [(chosen(seen), seen.search_end) for seen in steps.scheduled]
    always = [(chosen(seen), seen.search_end) for seen in steps.always]
    assert scheduled[0] == always[0]
    assert scheduled[1:] == always[:-1]
    assert len({str(keys) for keys, _ in always}) == STEPS
    assert steps.figures.searches == STEPS


def test_a_period_reuses_the_selection_and_searches_again_after_it() -> None:
    steps = Steps("csattention", Schedule(period=4))
    steps.run()
    for step, seen in enumerate(steps.scheduled):
        assert chosen(seen) == chosen(steps.always[step // 4 * 4])
        assert (read(seen) > 0) == (step % 4 == 0)
    assert steps.figures.searches == STEPS / 4


@pytest.mark.parametrize("schedule", [Schedule(period=4), Schedule(lag=1)])
def test_a_prompt_is_searched_position_by_position(schedule: Schedule) -> None:
    steps = Steps("oracle", schedule)
    steps.run()
    generator = torch.Generator().manual_seed(0)
    before = steps.figures.searches
    query = torch.randn(H, 20, G, D, generator=generator)
    keys, values = torch.randn(2, H, 20, D, generator=generator)
    steps.layer.attend(query, keys, values, N + STEPS)
    assert steps.figures.searches - before == 20


def test_a_repeated_step_uses_the_same_selection_again() -> None:
    for schedule in (Schedule(period=3), Schedule(lag=1), Schedule(lag=1, correct_below=0.2)):
        steps, again = Steps("oracle", schedule), Steps("oracle", schedule)
        steps.run()
        for step, (query, (keys, values)) in enumerate(zip(again.queries, again._rows, strict=True)):
            for _ in range(2):
                again.layer.attend(query, keys, values, N + step)
        repeated = again.scheduled[1::2]
        assert [chosen(seen) for seen in repeated] == [chosen(seen) for seen in steps.scheduled]
        for one, two in zip(repeated, steps.scheduled, strict=True):
            assert torch.equal(one.out_HTGD, two.out_HTGD)


@pytest.mark.parametrize(
    "schedule", [Schedule(period=STEPS, correct_below=0.9), Schedule(lag=1, correct_below=0.9)]
)
def test_a_correction_searches_again_where_the_query_turned_away(schedule: Schedule) -> None:
    """In step 1 one query head of KV head 0 turns away, in step 2 both of KV head 1; all others stay as they are."""
    steps = Steps("oracle", schedule)
    turned = steps.queries[1:3].clone()
    steps.queries[1:] = steps.queries[0]
    steps.queries[1:, 0, :, 1] = turned[0, 0, :, 1]
    steps.queries[2:, 1] = turned[1, 1]
    steps.run()
    first, second, third = (chosen(seen) for seen in steps.scheduled[:3])
    fresh = [chosen(seen) for seen in steps.always]
    assert first == fresh[0]
    assert second == [fresh[1][0], first[1]]
    assert third[1] == fresh[2][1]
    assert third[0] == (fresh[1][0])
    assert fresh[1][0] != first[0]
    assert fresh[2][1] != first[1]
    assert (steps.figures.corrected, steps.figures.correctable) == (2, H * (STEPS - 1))
