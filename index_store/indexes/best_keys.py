"""What budgets keep of an index that sessions share, and attention to all others: in one go, or by rankings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from index_store.attention.attention_state import AttentionState
from index_store.indexes.interface.layer_index import Asked, Best, LayerIndex
from index_store.selection.budgets import Budget
from index_store.selection.cutting import cut
from index_store.selection.remainder_states import coarse_states
from index_store.selection.remainders import COARSE
from index_store.selection.selected import Step


def find_best(
    index: LayerIndex,
    asked: Sequence[Asked],
    budgets: Sequence[Budget],
    lengths: Sequence[int],
    step: Callable[[int], Step],
) -> Best:
    """What the budgets keep of an index that sessions share, and attention to all others of the searched range.

    How one is found does not depend on the others. lengths: of each session, as `Step.length`. step: of the session of
    that number, asked for where its budget cuts a ranking.
    """
    keeps = [budget.best(length) for budget, length in zip(budgets, lengths, strict=True)]
    known = [number for number, keep in enumerate(keeps) if keep is not None]
    others = [number for number, keep in enumerate(keeps) if keep is None]
    parts = []
    if known:
        parts.append(
            index.best_together(
                [asked[number] for number in known], [keep for keep in keeps if keep is not None]
            )
        )
    if others:
        parts.append(
            _cut_rankings(
                index,
                [asked[number] for number in others],
                [budgets[number] for number in others],
                [step(number) for number in others],
            )
        )
    if len(parts) == 1:
        return parts[0]
    places = {number: place for place, number in enumerate([*known, *others])}
    return Best.join(parts).of([places[number] for number in range(len(asked))])


def _cut_rankings(
    index: LayerIndex, asked: Sequence[Asked], budgets: Sequence[Budget], steps: Sequence[Step]
) -> Best:
    """The same by rankings, which any budget can cut."""
    rankings = index.rank_together(asked)
    selections = [
        cut(budget, ranking, step) for budget, ranking, step in zip(budgets, rankings, steps, strict=True)
    ]
    states = coarse_states(
        [(ranking.pieces, selection) for ranking, selection in zip(rankings, selections, strict=True)]
    )
    found = []
    for each, ranking, selection, state in zip(asked, rankings, selections, states, strict=True):
        heads, positions, group, head_dim = each.queries_HTGD.shape
        others = state or AttentionState.empty((heads, positions, group), head_dim, each.queries_HTGD.device)
        rest = sum(piece.remainder_bytes(COARSE.moments, True) for piece in ranking.pieces)
        read = ([ranking.vectors_read], [ranking.bytes_read], [rest])
        found.append(Best(selection.ids_HTK, selection.counts_HT, others, *read))
    return Best.join(found)
