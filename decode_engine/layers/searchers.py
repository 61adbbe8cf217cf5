"""When a searching layer searches, and with which queries: for each position, for steps to come, or for a whole prompt.

One selection for all tokens of a prompt (Squeezed Attention section 4.1, prefill stage): every token's estimated
attention weights sum to 1, so their average over the tokens says how much an item matters to the prompt. The average is
a ranking like any other, of one query position, and any budget cuts it.

Shape legend: H KV heads, T query positions, G group heads (1 where a search pooled the group's queries), M items,
K kept keys, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import KeyRows
from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.selection.ranking import Items, Piece, Ranking, Selection

_LOGIT_BYTES = 32 * 2**20  # logits held at a time when a budget measures keys


@dataclass(frozen=True, slots=True)
class MadeSelection:
    """A selection, and how it was made: at which position, from a range that ends where.

    pieces: as the search scored them; None where the selection serves other queries than made it.
    """

    selection: Selection
    made_at: int
    search_end: int
    pieces: Sequence[Piece] | None


@dataclass(slots=True)
class Search:
    """The searches of some positions of a layer, the first of which is `position`.

    rank: scores keys for queries, the first of which sits at a position, in a range that ends there. cut: the budget's
    selection of a ranking over a range that ends there, given exact logits of keys and what `Step.exact_lse_HTG` is.
    score_bytes: of scores at a time where positions share a selection. vectors_read, bytes_read: of the index so far,
    per position.
    """

    rank: Callable[[Tensor, int, int], Ranking]
    cut: Callable[[Ranking, int, Callable[[Tensor], Tensor], Tensor], Selection]
    rows: KeyRows
    form: LogitForm
    position: int
    exact_lse_HTG: Tensor
    score_bytes: int
    figures: Figures
    vectors_read: float = field(default=0.0, init=False)
    bytes_read: float = field(default=0.0, init=False)

    def each(self, q_HTGD: Tensor, search_end: int) -> MadeSelection:
        """A selection for every query."""
        begin = perf_counter_ns()
        ranking = self.rank(q_HTGD, self.position, search_end)

        def logits(ids_HTGK: Tensor) -> Tensor:
            return self.form.capped(self.rows.read_logits(q_HTGD, ids_HTGK))

        selection = self.cut(ranking, search_end, logits, self.exact_lse_HTG)
        self._count(q_HTGD.shape[1], ranking.vectors_read, ranking.bytes_read, begin)
        return MadeSelection(selection, self.position, search_end, ranking.pieces)

    def together(self, q_HTGD: Tensor, search_end: int) -> MadeSelection:
        """One selection [H, 1, K] for all queries."""
        begin = perf_counter_ns()
        weights = PromptWeights()
        weights.add(self.rank(q_HTGD[:, :1], self.position, search_end))
        # Now it is known how many items are scored.
        for part in passes(q_HTGD[:, 1:], weights.items, self.score_bytes):
            first = self.position + 1 + part.start
            weights.add(self.rank(q_HTGD[:, 1:][:, part], first, search_end))

        def logits(ids_H1GK: Tensor) -> Tensor:
            return weights.average_logits(q_HTGD, self.rows, ids_H1GK, self.form)

        selection = self.cut(weights.ranking(), search_end, logits, weights.average(self.exact_lse_HTG))
        self._count(1, *weights.read, begin)
        return MadeSelection(selection, self.position, search_end, None)

    def _count(self, searches: int, vectors_read: float, bytes_read: float, begin: int) -> None:
        self.vectors_read += vectors_read
        self.bytes_read += bytes_read
        self.figures.searches += searches
        self.figures.search_ns += perf_counter_ns() - begin


class PromptWeights:
    """Attention weights as a search estimates them, averaged over the positions of a prompt, which come in pieces."""

    def __init__(self) -> None:
        self._sum_H1GM: Tensor | None = None
        self._items = Items(0, 0)
        self._totals: list[Tensor] = []
        self._vectors_read = self._bytes_read = 0.0

    @property
    def positions(self) -> int:
        """How many positions were added."""
        return sum(totals.shape[1] for totals in self._totals)

    @property
    def items(self) -> int:
        """How many items are ranked; 0 before anything was added."""
        return 0 if self._sum_H1GM is None else self._sum_H1GM.shape[-1]

    @property
    def read(self) -> tuple[float, float]:
        """Vectors of the index compared, and bytes of it read, per position on average."""
        return self._vectors_read / self.positions, self._bytes_read / self.positions

    def add(self, ranking: Ranking) -> None:
        """Adds the next positions. All rankings are of the same items."""
        logits = ranking.logits_HTGM
        log_weights = Ranking(logits, ranking.items).log_weights_HTGM()
        # The same for every item: what the logits of a position were normalised by.
        totals = logits.amax(-1) - log_weights.amax(-1)
        self._totals.append(totals.nan_to_num_(0.0))
        added = log_weights.exp_().sum(1, keepdim=True)
        self._sum_H1GM = added if self._sum_H1GM is None else self._sum_H1GM.add_(added)
        self._items = ranking.items
        positions = logits.shape[1]
        self._vectors_read += ranking.vectors_read * positions
        self._bytes_read += ranking.bytes_read * positions

    def ranking(self) -> Ranking:
        """The average as a ranking of one position. Raises ValueError when nothing was added."""
        if self._sum_H1GM is None:
            raise ValueError("no position was added")
        return Ranking((self._sum_H1GM / self.positions).log_(), self._items, (), *self.read)

    def average(self, lse_HTG: Tensor) -> Tensor:
        """[H, 1, G]: logarithm of all positions' average weights, of which logarithms are given, as estimates are."""
        totals_HTG = torch.cat(self._totals, dim=1)
        return torch.logsumexp(lse_HTG - totals_HTG, 1, keepdim=True) - math.log(self.positions)

    def average_logits(
        self, q_HTGD: Tensor, rows: KeyRows, ids_H1GK: Tensor, form: LogitForm = PLAIN
    ) -> Tensor:
        """[H, 1, G, K]: the same of keys' exact weights for the queries of all positions."""
        totals_HTG = torch.cat(self._totals, dim=1)
        heads, positions, group, head_dim = q_HTGD.shape
        keys_HGKD = rows.gather(ids_H1GK.flatten(2))[:, 0, :, 0].view(heads, group, -1, head_dim)
        step = max(1, _LOGIT_BYTES // (4 * heads * group * max(1, keys_HGKD.shape[2])))
        summed: Tensor | None = None
        for first in range(0, positions, step):
            part = slice(first, first + step)
            logits = form.capped(torch.einsum("htgd,hgkd->htgk", q_HTGD[:, part], keys_HGKD))
            added = torch.logsumexp(logits - totals_HTG[:, part, :, None], 1, keepdim=True)
            summed = added if summed is None else torch.logaddexp(summed, added)
        if summed is None:
            raise ValueError("no position was given")
        return summed - math.log(positions)


class Searcher(Protocol):
    """Gives the positions of one call of a layer their selections."""

    @property
    def shared(self) -> bool:
        """Whether one selection is for all positions of the call, of the range that the first of them searches."""

    def search_end(self, position: int, usual: int) -> int:
        """End of the range that the selection for `position` is from; `usual` where it is searched for now."""

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        """The selection of positions that share one range, the first of which is `position`."""


class EachPosition:
    """Searches for every position with its own queries."""

    shared = False

    def search_end(self, position: int, usual: int) -> int:
        return usual

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        return search.each(q_HTGD, usual)


class WholePrompt:
    """Searches once with the queries of all positions."""

    shared = True

    def search_end(self, position: int, usual: int) -> int:
        return usual

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        return search.together(q_HTGD, usual)


class AcrossSteps:
    """Decode steps that use the selection of an earlier one, for so many steps (CSAttention appendix C.2).

    A step that is repeated after a failure chooses the same again.
    """

    shared = False

    def __init__(self, period: int) -> None:
        self._period = period
        self._left: MadeSelection | None = None

    def search_end(self, position: int, usual: int) -> int:
        earlier = self._earlier(position)
        return usual if earlier is None else earlier.search_end

    def choose(self, q_HTGD: Tensor, position: int, usual: int, search: Search) -> MadeSelection:
        earlier = self._earlier(position)
        if earlier is not None:
            return earlier
        made = search.each(q_HTGD, usual)
        self._left = replace(made, pieces=None)
        return made

    def adopt(self, other: AcrossSteps) -> None:
        """Has the selection of the other's earlier steps."""
        self._left = other._left

    def _earlier(self, position: int) -> MadeSelection | None:
        """The selection of an earlier step that this one may use; a step that is repeated may have left one itself."""
        left = self._left
        return left if left is not None and 0 < position - left.made_at < self._period else None


class Searchers:
    """The searchers of one layer of one session."""

    def __init__(self, period: int) -> None:
        self._across = AcrossSteps(period)
        self._steps: Searcher = self._across if period > 1 else EachPosition()

    def adopt(self, other: Searchers) -> None:
        """Goes on, by itself, where another session's layer is."""
        self._across.adopt(other._across)

    def choose(self, positions: int, shared: bool) -> Searcher:
        """What searches for so many positions; one alone is a decode step. shared: of a prompt, with one selection."""
        if positions == 1:
            return self._steps
        return WholePrompt() if shared else EachPosition()


def passes(q_HTGD: Tensor, scored: int, score_bytes: int) -> list[slice]:
    """Positions that are searched at a time, where every one has so many items scored, in about so many bytes."""
    heads, positions, group, _ = q_HTGD.shape
    count = -(-positions // max(1, score_bytes // (heads * max(1, scored) * 4 * (group + 1))))
    step = -(-positions // count)  # about as many in each
    return [slice(first, min(first + step, positions)) for first in range(0, positions, step)]
