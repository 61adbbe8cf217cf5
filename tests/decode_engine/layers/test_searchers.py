"""Which selection a position gets, whatever makes the selections: searches are counted, none is computed."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from decode_engine.layers.searchers import MadeSelection, Searchers
from index_store.selection.ranking import Selection

H, G, D, USUAL = 2, 2, 4, 100


class Searches:
    """Numbers the searches that it is asked for; the number is the key that is selected."""

    def __init__(self, period: int) -> None:
        self.searchers = Searchers(period)
        self.made: list[tuple[Tensor, int]] = []

    def step(self, position: int, q_HTGD: Tensor, usual: int = USUAL) -> MadeSelection:
        """The choice of one call."""

        def search(queries: Tensor, end: int) -> MadeSelection:
            self.made.append((queries, end))
            ids = torch.full((*queries.shape[:2], 1), len(self.made), dtype=torch.int32)
            return MadeSelection(Selection(ids, torch.ones_like(ids[..., 0])), position, end, ())

        searcher = self.searchers.choose(q_HTGD.shape[1], shared=False)
        choice = searcher.choose(q_HTGD, position, usual, SimpleNamespace(each=search))
        assert searcher.search_end(position, usual) == choice.search_end
        return choice


def query(positions: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(H, positions, G, D, generator=torch.Generator().manual_seed(seed))


def keys(choice: MadeSelection) -> list[int]:
    """The selected key of every KV head at the first position."""
    return [int(row) for row in choice.selection.ids_HTK[:, 0, 0]]


def test_without_a_period_every_call_searches_with_its_own_queries() -> None:
    searches = Searches(1)
    for position in range(3):
        assert searches.step(position, query()).pieces == ()
    assert len(searches.made) == 3
    assert all(torch.equal(made, query()) for made, _ in searches.made)


def test_a_selection_serves_a_period_over_the_range_it_was_made_from() -> None:
    searches = Searches(3)
    found = [searches.step(position, query(), usual=USUAL + position) for position in range(5)]
    assert [keys(choice)[0] for choice in found] == [1, 1, 1, 2, 2]
    assert [choice.search_end for choice in found] == [100, 100, 100, 103, 103]
    # What scored its clusters was another step's query.
    assert [choice.pieces for choice in found] == [(), None, None, (), None]


def test_a_repeated_step_chooses_the_same() -> None:
    once, twice = Searches(2), Searches(2)
    for position in range(6):
        choice = once.step(position, query(seed=position))
        for _ in range(2):
            again = twice.step(position, query(seed=position))
        assert again.made_at == choice.made_at
        assert torch.equal(twice.made[-1][0], once.made[-1][0])


def test_prompts_neither_use_nor_leave_selections() -> None:
    searches = Searches(4)
    searches.step(0, query())
    assert keys(searches.step(1, query(2))) == [2, 2]
    assert keys(searches.step(3, query())) == [1, 1]
