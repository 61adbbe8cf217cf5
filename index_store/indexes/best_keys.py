"""What budgets keep of an index that sessions share, and attention to all others: in one go, or by rankings."""

from __future__ import annotations

from collections.abc import Sequence

from index_store.indexes.interface.layer_index import Asked, Best, LayerIndex
from index_store.selection.budgets import Budget, Step
from index_store.selection.remainders import COARSE


def find_best(
    index: LayerIndex, asked: Sequence[Asked], budgets: Sequence[Budget], steps: Sequence[Step]
) -> list[Best]:
    """What the budgets keep of an index that sessions share, and attention to all others of the searched range.

    How one is found does not depend on the others.
    """
    keeps = [budget.best(step) for budget, step in zip(budgets, steps, strict=True)]
    known = {number: keep for number, keep in enumerate(keeps) if keep is not None}
    found: dict[int, Best] = {}
    if known:
        best = index.best_together([asked[number] for number in known], list(known.values()))
        found |= zip(known, best, strict=True)
    others = [number for number, keep in enumerate(keeps) if keep is None]
    if others:
        found |= zip(others, _cut_rankings(index, asked, budgets, steps, others), strict=True)
    return [found[number] for number in range(len(asked))]


def _cut_rankings(
    index: LayerIndex,
    asked: Sequence[Asked],
    budgets: Sequence[Budget],
    steps: Sequence[Step],
    numbers: Sequence[int],
) -> list[Best]:
    """The same by rankings, which any budget can cut, for some of the sessions."""
    rankings = index.rank_together([asked[number] for number in numbers])
    selections = [
        budgets[number].cut(ranking, steps[number]) for number, ranking in zip(numbers, rankings, strict=True)
    ]
    pieces = [ranking.pieces for ranking in rankings]
    others = COARSE.states(list(zip(pieces, selections, strict=True)))
    rests = [sum(piece.remainder_bytes(COARSE.moments, True) for piece in own) for own in pieces]
    return [
        Best(selection, state, ranking.vectors_read, ranking.bytes_read, rest)
        for selection, state, ranking, rest in zip(selections, others, rankings, rests, strict=True)
    ]
