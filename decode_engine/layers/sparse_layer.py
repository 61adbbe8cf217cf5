"""One searching layer of one session: search, cut, gather, attend, add the remainder, merge.

The keys a query at position p sees fall into four parts that partition them:

    [0, sinks)              attended exactly, always
    [sinks, search_end)     searched; the selection is attended exactly, the others by the method's remainder
    [search_end, N)         recent context, attended exactly
    [max(N, search_end), p] tail, attended exactly

search_end depends on p alone: it is p - recent, rounded down to a multiple of `append_block`. So it makes no difference
whether tokens arrive one by one or as a prompt in chunks of any size. Tail keys before search_end are in the session's
private extensions of the indexes.

Shape legend: H KV heads, T query positions, G group heads, K kept keys, N context tokens, t tail tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.exact_part import ExactPart
from decode_engine.layers.figures import Figures
from decode_engine.layers.prompt_selection import PromptWeights, passes
from decode_engine.layers.searchers import EachPosition, MadeSelection, Searcher, Searchers
from decode_engine.layers.selected_attention import (
    KeyRows,
    LeftOut,
    Observation,
    attend_selection,
    attend_sparse_together,
    attends_together,
)
from decode_engine.layers.tail import Tail
from decode_engine.layers.window_layer import WindowLayer
from index_store.attention.attention_state import AttentionState
from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.errors import MethodUnsupportedError
from index_store.indexes.interface.layer_index import AppendedKeys, Asked, Best, LayerIndex
from index_store.indexes.row_planes.two_planes import ContextRows
from index_store.methods.method import Method
from index_store.selection.cutting import cut
from index_store.selection.pieces import Piece
from index_store.selection.ranking import Ranking
from index_store.selection.remainder_states import ExactKeys
from index_store.selection.selected import Selection, Step

_SCORE_BYTES = 16 * 2**20  # scores of one search; a longer prompt is searched in several passes
_DEVICE_SCORE_BYTES = 128 * 2**20
"""The same on a GPU, where small passes leave most of it idle; not for budgets whose passes share a selection."""


@dataclass(frozen=True, slots=True)
class LayerSearch:
    """What a searching layer uses of a context, besides its keys and values.

    index: is searched. partition: its pieces make the remainder; None where the searched index has its own, or the
    remainder is dropped. thresholds: the index's offline calibration (see `Step.thresholds`).
    """

    index: LayerIndex
    partition: LayerIndex | None = None
    thresholds: Callable[[float], float] | None = None


class SparseLayer:
    """Attends to a selection, the sinks, the recent window and the tail, and approximately to the rest.

    device: of queries, indexes and tail where keys and values of the context are in host memory; None where all are in
    one place. sharing: the index of a layer whose decode steps can be taken together with those of other sessions on
    the context, which have the same one; None elsewhere.
    """

    def __init__(
        self,
        kv_HN2D: ContextRows,
        search: LayerSearch,
        method: Method,
        figures: Figures,
        device: torch.device | None = None,
        form: LogitForm = PLAIN,
    ) -> None:
        if method.budget is None:
            raise MethodUnsupportedError(
                f"method {method.name!r} has no budget, a searching layer needs one", method=method.name
            )
        heads, count, _, head_dim = kv_HN2D.shape
        self.context_HN2D, self._on_host = kv_HN2D, device is not None
        self._sinks = min(method.sinks, count)
        self._index, self._partition, self._thresholds = search.index, search.partition, search.thresholds
        self._indexes = [self._index] if self._partition is None else [self._index, self._partition]
        self._method = method
        self.budget = method.budget
        self._figures = figures
        self.form = form
        self._appended: dict[LayerIndex, AppendedKeys] = {}
        self._searchers = Searchers(method.schedule, figures)
        self._vectors_read, self._bytes_read = 0.0, 0.0
        place = kv_HN2D.device if device is None else device
        on_cpu = place.type == "cpu"
        self._score_bytes = _SCORE_BYTES if on_cpu or self.budget.per_prompt else _DEVICE_SCORE_BYTES
        self._prompt_score_bytes = _SCORE_BYTES if on_cpu else 4 * _DEVICE_SCORE_BYTES
        self.tail = Tail(heads, head_dim, kv_HN2D.dtype, place)
        self._exact = DenseLayer(kv_HN2D, figures, device, self.tail, form)
        self._always = ExactPart(kv_HN2D, self.tail, self._sinks, figures, self._on_host, form)
        self.observer: Callable[[Observation], None] | None = None
        together = on_cpu and attends_together(method, search.index, search.partition, form)
        self.sharing = search.index if together else None

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes + sum(appended.nbytes for appended in self._appended.values())

    @property
    def exact(self) -> DenseLayer:
        return self._exact

    @property
    def _rows(self) -> KeyRows:
        return KeyRows(self.context_HN2D, self.tail.rows, self._on_host)

    def attend(
        self,
        q_HTGD: Tensor,
        keys_HTD: Tensor,
        values_HTD: Tensor,
        position: int,
        *,
        shared: bool = False,
    ) -> Tensor:
        """Adds T new keys at `position`.. and returns attention out [H, T, G, d] float32 for their queries.

        Queries are float32 and scaled by 1/sqrt(d). shared: of a prompt, whose positions share one selection.
        """
        if self.sharing is not None and q_HTGD.shape[1] == 1:
            return attend_sparse_together([(self, q_HTGD, keys_HTD, values_HTD, position)])[0]
        self.tail.write(position - self.context_HN2D.shape[1], keys_HTD, values_HTD)
        if shared and q_HTGD.shape[1] > 1:
            return self._attend_shared(q_HTGD, position)
        searcher = self._searchers.choose(q_HTGD.shape[1])
        return self._attend_all(q_HTGD, position, searcher)

    def ask(self, q_H1GD: Tensor, keys_H1D: Tensor, values_H1D: Tensor, position: int) -> Asked:
        """Adds a new key, and says what its query wants of the index."""
        self.tail.write(position - self.context_HN2D.shape[1], keys_H1D, values_H1D)
        search_end = self._search_end(position)
        self._append_until(search_end)
        appended = self._appended.get(self._index)
        return Asked(q_H1GD, self._sinks, search_end, appended, self._method.search, position)

    def length(self, asked: Asked) -> int:
        """Tokens of sinks, searched keys and recent window together."""
        return asked.end_key + self._method.recent

    def step(self, asked: Asked) -> Step:
        """What the budget may know besides the ranking; budgets of such layers ask for no more."""
        return self._step(asked.queries_HTGD, asked.end_key, asked.queries_HTGD.new_empty(0))

    def note(self, asked: Asked, position: int, best: Best, number: int, out_H1GD: Tensor) -> None:
        """Counts what was done for the session of that number, and tells who measures."""
        self._figures.searches += 1
        self._figures.count_kept(best.kept[number])
        self._always.count(position, 1, asked.end_key)
        if self.observer is not None:
            own = best.of([number])
            self._vectors_read, self._bytes_read = own.vectors_read[0], own.bytes_read[0]
            selection = Selection(own.ids_HSK, own.counts_HS)
            rest = own.remainder_bytes[0]
            self._observe(asked.queries_HTGD, position, asked.end_key, selection, rest, out_H1GD)

    def count_time(self, search_ns: int, attend_ns: int) -> None:
        """Notes time spent on this session's attention."""
        self._figures.search_ns += search_ns
        self._figures.attend_ns += attend_ns

    def adopt(self, other: SparseLayer) -> None:
        """As `DenseLayer.adopt`; what was appended to the index, and selections that serve later steps, go along."""
        self.tail.adopt(other.tail)
        self._appended = {index: appended.fork() for index, appended in other._appended.items()}
        self._searchers.adopt(other._searchers)

    def catch_up(self, position: int) -> None:
        """Makes searchable what a query at `position` searches: after tokens that attended to everything.

        Otherwise the next decode step would append all of their keys.
        """
        self._append_until(self._search_end(position))

    def replay(self, q_HTGD: Tensor, position: int) -> Tensor:
        """What `attend` would have returned for the context's own queries at `position`.., had the context ended there.

        Every query sees the keys up to its own, none of the session's; nothing is added. Indexes know all of the
        context: later keys are in their clusters, and are taken out of the remainder.
        """
        return self._attend_all(q_HTGD, position, EachPosition())

    def _attend_all(self, q_HTGD: Tensor, position: int, searcher: Searcher) -> Tensor:
        end = position + q_HTGD.shape[1]
        outs: list[Tensor] = []
        first = position
        while first < end:
            last = min(end, self._next_move(first))
            part = slice(first - position, last - position)
            outs.append(self._attend_together(q_HTGD[:, part], first, searcher))
            first = last
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _search_end(self, position: int) -> int:
        return self._method.searched_range(position, self.context_HN2D.shape[1])[1]

    def _next_move(self, position: int) -> int:
        """The first later position whose search_end may be another one."""
        block = self._method.append_block
        return position + block - (position - self._method.recent) % block

    def _attend_together(self, q_HTGD: Tensor, position: int, searcher: Searcher) -> Tensor:
        """Attention of positions that share a search_end, the first of which is `position`."""
        search_end = self._search_end(position)
        if search_end == self._sinks:
            self._always.count(position, q_HTGD.shape[1], search_end)
            return self._always.attend(q_HTGD, position, search_end).out
        self._append_until(search_end)
        outs: list[Tensor] = []
        for part in passes(q_HTGD, search_end - self._sinks, self._score_bytes):
            outs.append(self._attend_some(q_HTGD[:, part], position + part.start, searcher))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _attend_shared(self, q_HTGD: Tensor, position: int) -> Tensor:
        """Attention of positions that share one selection, made from the keys that the first of them searches."""
        search_end = self._search_end(position)
        exact = self._always.attend(q_HTGD, position, search_end)
        self._always.count(position, q_HTGD.shape[1], search_end)
        if search_end == self._sinks:
            return exact.out
        self._append_until(search_end)
        self._vectors_read = self._bytes_read = 0.0
        rows = self._rows
        selection = self._select_together(q_HTGD, position, search_end, exact.lse, rows)
        held = rows.hold(selection)
        # Without pieces there is nothing to score but the rows themselves.
        kind = self._method.remainder.pieces
        scored = 0 if kind is None else (search_end - self._sinks) // kind.keys_each
        outs: list[Tensor] = []
        for part in passes(q_HTGD, scored, self._prompt_score_bytes):
            queries, first = q_HTGD[:, part], position + part.start
            pieces = self._pieces(queries, first, search_end, None)
            elsewhere = self._elsewhere(queries, search_end, pieces)
            left = LeftOut(self._method.remainder, pieces, elsewhere, self.form)
            state = attend_selection(queries, held, selection, left, self._figures)
            outs.append(state.merge(AttentionState(exact.out[:, part], exact.lse[:, part])).out)
            rest = self._remainder_bytes(pieces, None)
            self._observe(queries, first, search_end, selection, rest, outs[-1])
        return torch.cat(outs, dim=1)

    def _select_together(
        self, q_HTGD: Tensor, position: int, search_end: int, exact_lse_HTG: Tensor, rows: KeyRows
    ) -> Selection:
        """One selection [H, 1, K] for all positions."""
        begin = perf_counter_ns()
        weights = PromptWeights()
        weights.add(self._rank(q_HTGD[:, :1], position, search_end))
        # Now it is known how many items are scored.
        for part in passes(q_HTGD[:, 1:], weights.items, self._prompt_score_bytes):
            weights.add(self._rank(q_HTGD[:, 1:][:, part], position + 1 + part.start, search_end))
        length = search_end + self._method.recent
        thresholds, form = self._thresholds, self.form
        selection = weights.cut(self.budget, q_HTGD, exact_lse_HTG, rows, length, thresholds, form)
        self._vectors_read, self._bytes_read = weights.read
        self._figures.searches += 1
        self._figures.search_ns += perf_counter_ns() - begin
        return selection

    def _attend_some(self, q_HTGD: Tensor, position: int, searcher: Searcher) -> Tensor:
        usual = self._search_end(position)
        self._vectors_read = self._bytes_read = 0.0
        exact = self._always.attend(q_HTGD, position, searcher.search_end(position, usual))
        choice = searcher.choose(q_HTGD, position, usual, partial(self._search, position, exact.lse))
        pieces = self._pieces(q_HTGD, position, choice.search_end, choice.pieces)
        elsewhere = self._elsewhere(q_HTGD, choice.search_end, pieces)
        left = LeftOut(self._method.remainder, pieces, elsewhere, self.form)
        state = attend_selection(q_HTGD, self._rows, choice.selection, left, self._figures)
        out = state.merge(exact).out
        self._always.count(position, q_HTGD.shape[1], choice.search_end)
        rest = self._remainder_bytes(pieces, choice.pieces)
        self._observe(q_HTGD, position, choice.search_end, choice.selection, rest, out)
        return out

    def _observe(
        self,
        q_HTGD: Tensor,
        position: int,
        search_end: int,
        selection: Selection,
        remainder_bytes: float,
        out_HTGD: Tensor,
    ) -> None:
        """Tells who measures."""
        if self.observer is not None:
            read = (self._vectors_read, self._bytes_read, remainder_bytes)
            found = (selection, self._rows, out_HTGD, *read, self.form)
            self.observer(Observation(q_HTGD, position, self._sinks, search_end, *found))

    def _remainder_bytes(self, pieces: Sequence[Piece], searched: Sequence[Piece] | None) -> float:
        """What a remainder over the pieces reads; they are `searched` where a search has scored them."""
        moments = self._method.remainder.moments
        return sum(piece.remainder_bytes(moments, pieces is searched) for piece in pieces)

    def _append_until(self, search_end: int) -> None:
        """Makes the tail keys before search_end searchable, and no others, block by block.

        A failed step may have appended more, and be repeated with other keys: then the extension is made anew.
        """
        begin = perf_counter_ns()
        count, block = self.context_HN2D.shape[1], self._method.append_block
        for index in self._indexes:
            appended = self._appended.get(index)
            indexed = count + (appended.count if appended else 0)
            if indexed > max(search_end, count):
                appended, indexed = None, count
            while indexed < search_end:
                if appended is None:
                    appended = self._appended[index] = index.start_appending()
                end = min(search_end, (indexed // block + 1) * block)
                appended.append(self.tail.rows[:, indexed - count : end - count])
                indexed = end
            if appended is None:
                self._appended.pop(index, None)
        self._figures.append_ns += perf_counter_ns() - begin

    def _rank(self, q_HTGD: Tensor, position: int, search_end: int) -> Ranking:
        appended, search = self._appended.get(self._index), self._method.search
        return self._index.rank(q_HTGD, self._sinks, search_end, appended, search, position).capped(self.form)

    def _step(self, q_HTGD: Tensor, search_end: int, exact_lse_HTG: Tensor) -> Step:
        rows = self._rows
        return Step(
            search_end + self._method.recent,
            self._thresholds,
            lambda ids_HTGK: self.form.capped(rows.read_logits(q_HTGD, ids_HTGK)),
            exact_lse_HTG,
        )

    def _search(self, position: int, exact_lse_HTG: Tensor, q_HTGD: Tensor, search_end: int) -> MadeSelection:
        begin = perf_counter_ns()
        ranking = self._rank(q_HTGD, position, search_end)
        selection = cut(self.budget, ranking, self._step(q_HTGD, search_end, exact_lse_HTG))
        self._vectors_read += ranking.vectors_read
        self._bytes_read += ranking.bytes_read
        self._figures.searches += q_HTGD.shape[1]
        self._figures.search_ns += perf_counter_ns() - begin
        return MadeSelection(selection, q_HTGD, position, search_end, ranking.pieces)

    def _elsewhere(self, q_HTGD: Tensor, search_end: int, pieces: Sequence[Piece]) -> ExactKeys | None:
        appended = self._appended.get(self._indexes[-1])
        held = self.context_HN2D.shape[1] + (appended.count if appended else 0)
        return self._always.elsewhere(q_HTGD, search_end, held, pieces)

    def _pieces(
        self, q_HTGD: Tensor, position: int, search_end: int, scored: Sequence[Piece] | None
    ) -> Sequence[Piece]:
        """What the remainder is computed over, scored; nothing when it is dropped.

        scored: pieces of the searched index, where the search has scored them with these queries.
        """
        if self._method.drops_remainder:
            return ()
        if self._partition is None and scored is not None:
            return scored
        index = self._index if self._partition is None else self._partition
        begin = perf_counter_ns()
        pieces = index.pieces(q_HTGD, self._sinks, search_end, self._appended.get(index), position)
        self._figures.search_ns += perf_counter_ns() - begin
        return pieces


LayerAttention = DenseLayer | SparseLayer | WindowLayer
"""Attention of one layer of one session: all have `tail`, `nbytes` and `exact`."""
