"""When a searching layer searches, and with which queries: for each position, or for steps to come.

Shape legend: H KV heads, T query positions, G group heads, K kept keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from index_store.methods.schedules import Schedule
from index_store.selection.pieces import Piece
from index_store.selection.selected import Selection


@dataclass(frozen=True, slots=True)
class MadeSelection:
    """A selection, and how it was made: by which queries, at which position, from a range that ends where.

    pieces: as the search scored them; None where the selection serves other queries than made it.
    """

    selection: Selection
    q_HTGD: Tensor
    made_at: int
    search_end: int
    pieces: Sequence[Piece] | None


Search = Callable[[Tensor, int], MadeSelection]
"""Searches now with queries [H, T, G, d], in a range that ends there."""


class Searcher(Protocol):
    """Gives the positions of one call of a layer their selections."""

    def search_end(self, position: int, usual: int) -> int:
        """End of the range that the selection for `position` is from; `usual` where it is searched for now."""

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        """The selection of positions that share one range, the first of which is `position`."""


class EachPosition:
    """Searches for every position with its own queries."""

    def search_end(self, position: int, usual: int) -> int:
        return usual

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        return search(q_HTGD, usual)


@dataclass(frozen=True, slots=True)
class Correction:
    """Searches again in KV heads whose queries are too far from those that the selection was made with.

    below: cosine from which on it does not; None never searches again.
    """

    below: float | None
    figures: Figures

    def apply(self, q_HTGD: Tensor, made: MadeSelection, search: Search) -> MadeSelection:
        """The selection for these queries, where it is that of others."""
        if self.below is None:
            return made
        cosine_HT = torch.nn.functional.cosine_similarity(q_HTGD, made.q_HTGD, dim=-1).amin(2)
        wrong_HT = cosine_HT < self.below
        self.figures.corrected += int(wrong_HT.sum())
        self.figures.correctable += wrong_HT.numel()
        if not bool(wrong_HT.any()):
            return made
        fresh = search(q_HTGD, made.search_end)
        return replace(
            made,
            selection=_merge_selections(wrong_HT, fresh.selection, made.selection),
            q_HTGD=torch.where(wrong_HT[:, :, None, None], q_HTGD, made.q_HTGD),
        )


class AcrossSteps:
    """Decode steps that use selections of earlier ones: for a period, or of the step before with a lag.

    A step that is repeated after a failure chooses the same again.
    """

    def __init__(self, schedule: Schedule, correction: Correction) -> None:
        self._schedule = schedule
        self._correction = correction
        self._left: list[MadeSelection] = []  # the newest two

    def search_end(self, position: int, usual: int) -> int:
        earlier = self._earlier(position)
        return usual if earlier is None else earlier.search_end

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        earlier = self._earlier(position)
        if earlier is None:
            used = left = search(q_HTGD, usual)
        else:
            used = self._correction.apply(q_HTGD, earlier, search)
            left = search(q_HTGD, usual) if self._schedule.lag else used
        others = [choice for choice in self._left if choice.made_at < left.made_at]
        self._left = [*others[-1:], replace(left, pieces=None)]
        return used

    def adopt(self, other: AcrossSteps) -> None:
        """Has the selections of the other's earlier steps."""
        self._left = list(other._left)

    def _earlier(self, position: int) -> MadeSelection | None:
        """The selection of an earlier step that this one may use."""
        # A step that is repeated has left a selection already, which is not an earlier one.
        older = [choice for choice in self._left if choice.made_at < position]
        if not older:
            return None
        age = position - older[-1].made_at
        return older[-1] if age < self._schedule.period or (self._schedule.lag and age == 1) else None


class Searchers:
    """The searchers of one layer of one session."""

    def __init__(self, schedule: Schedule, figures: Figures) -> None:
        self._prompts: Searcher = EachPosition()
        self._across = AcrossSteps(schedule, Correction(schedule.correct_below, figures))
        self._steps = self._across if schedule.by_step else self._prompts

    def adopt(self, other: Searchers) -> None:
        """Goes on, by itself, where another session's layer is."""
        self._across.adopt(other._across)

    def choose(self, positions: int) -> Searcher:
        """What searches for so many positions; one alone is a decode step."""
        return self._steps if positions == 1 else self._prompts


def _merge_selections(wrong_HT: Tensor, fresh: Selection, earlier: Selection) -> Selection:
    """The fresh selection where `wrong_HT`, the earlier one elsewhere."""
    width = max(fresh.ids_HTK.shape[2], earlier.ids_HTK.shape[2])
    ids = [
        torch.nn.functional.pad(selection.ids_HTK, (0, width - selection.ids_HTK.shape[2]))
        for selection in (fresh, earlier)
    ]
    return Selection(
        torch.where(wrong_HT.unsqueeze(-1), ids[0], ids[1]),
        torch.where(wrong_HT, fresh.counts_HT, earlier.counts_HT),
    )
