"""One searching layer of one session: search, cut, attend, add the remainder, merge.

The keys a query at position p sees fall into four parts that partition them:

    [0, sinks)              attended exactly, always
    [sinks, search_end)     searched; the selection is attended exactly, the others by the method's remainder
    [search_end, N)         recent context, attended exactly
    [max(N, search_end), p] tail, attended exactly

search_end depends on p alone: it is p - recent, rounded down to a multiple of `append_block`. So it makes no difference
whether tokens arrive one by one or as a prompt in chunks of any size. Tail keys before search_end are in the session's
private extensions of the indexes.

All positions take the same way: a `Searcher` has a selection made for them, whether each searches, steps use earlier
selections or a prompt shares one; what was selected is attended exactly, and merged with the remainder and with what is
always attended. Decode steps over an index that makes selection and remainder in one go, for any number of sessions,
need one loop for all that is exact (`attend_sparse_together`).

Shape legend: H KV heads, T query positions, G group heads, K kept keys, N context tokens, t tail tokens, S keys or
sessions, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.dense_layer import DenseLayer, Tail, WindowLayer, visible_keys
from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import attend_shared, copy_rows
from decode_engine.layers.searchers import MadeSelection, Search, Searcher, Searchers, passes
from decode_engine.layers.selected_attention import (
    HeldRows,
    KeyRows,
    LeftOut,
    Observation,
    attend_listed_rows,
    attend_selection,
)
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.listed_keys_numba import Listed
from index_store.errors import MethodUnsupportedError
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes
from index_store.indexes.interface.layer_index import AppendedKeys, Asked, Best, LayerIndex
from index_store.methods.method import Method
from index_store.selection.budgets import COARSE
from index_store.selection.cutting import cut
from index_store.selection.ranking import Piece, Ranking, ScoredClusters, Selection, Step
from index_store.selection.remainder_states import ExactKeys

_SCORE_BYTES = 16 * 2**20  # scores of one search; a longer prompt is searched in several passes
_DEVICE_SCORE_BYTES = 128 * 2**20
"""The same on a GPU, where small passes leave most of it idle; not for budgets whose passes share a selection."""

_GROUP_SCORE_BYTES = 128 * 2**20
"""Scores of sessions that search together; of more of them one part after another does."""


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
        self._context_HN2D, self._on_host = kv_HN2D, device is not None
        self._sinks = min(method.sinks, count)
        self._sinks_clustered: bool | None = None
        self._index, self._partition, self._thresholds = search.index, search.partition, search.thresholds
        self._indexes = [self._index] if self._partition is None else [self._index, self._partition]
        self._method, self._budget = method, method.budget
        self._figures = figures
        self._form = form
        self._appended: dict[LayerIndex, AppendedKeys] = {}
        self._searchers = Searchers(method.period)
        place = kv_HN2D.device if device is None else device
        on_cpu = place.type == "cpu"
        self._score_bytes = _SCORE_BYTES if on_cpu or self._budget.per_prompt else _DEVICE_SCORE_BYTES
        self._prompt_score_bytes = _SCORE_BYTES if on_cpu else 4 * _DEVICE_SCORE_BYTES
        self.tail = Tail(heads, head_dim, kv_HN2D.dtype, place)
        self.exact = DenseLayer(kv_HN2D, figures, device, self.tail, form)
        self.observer: Callable[[Observation], None] | None = None
        self.sharing = search.index if on_cpu and self._attends_together else None

    @property
    def _attends_together(self) -> bool:
        """Whether the index makes what a decode step selects and its remainder in one go (`best_together`)."""
        return (
            self._index.shares
            and self._partition is None
            and self._method.remainder is COARSE
            and self._budget.best(1) is not None
            and self._method.period == 1
            and self._form.cap is None
        )

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes + sum(appended.nbytes for appended in self._appended.values())

    @property
    def _rows(self) -> KeyRows:
        return KeyRows(self._context_HN2D, self.tail.rows, self._on_host)

    def attend(
        self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int, *, shared: bool = False
    ) -> Tensor:
        """Adds T new keys at `position`.. and returns attention out [H, T, G, d] float32 for their queries.

        Queries are float32 and scaled by 1/sqrt(d). shared: of a prompt, whose positions share one selection.
        """
        positions = q_HTGD.shape[1]
        if self.sharing is not None and positions == 1:
            return attend_sparse_together([(self, q_HTGD, keys_HTD, values_HTD, position)])[0]
        self._write(position, keys_HTD, values_HTD)
        return self._attend_all(q_HTGD, position, self._searchers.choose(positions, shared))

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

    def _attend_all(self, q_HTGD: Tensor, position: int, searcher: Searcher) -> Tensor:
        """Attention of positions, those at a time that search one range."""
        end = position + q_HTGD.shape[1]
        outs: list[Tensor] = []
        first = position
        while first < end:
            last = end if searcher.shared else min(end, self._next_move(first))
            part = slice(first - position, last - position)
            outs += self._attend_range(q_HTGD[:, part], first, searcher)
            first = last
        return _joined(outs)

    def _attend_range(self, q_HTGD: Tensor, position: int, searcher: Searcher) -> list[Tensor]:
        """Attention of positions that search the range of the first of them, part by part."""
        search_end = self._search_end(position)
        positions = q_HTGD.shape[1]
        if search_end == self._sinks:
            self._count_always(position, positions, search_end)
            return [self._attend_always(q_HTGD, position, search_end).out]
        self._append_until(search_end)
        whole = [slice(0, positions)]
        parts = whole if searcher.shared else passes(q_HTGD, search_end - self._sinks, self._score_bytes)
        outs: list[Tensor] = []
        for part in parts:
            outs += self._attend_some(q_HTGD[:, part], position + part.start, searcher)
        return outs

    def _attend_some(self, q_HTGD: Tensor, position: int, searcher: Searcher) -> list[Tensor]:
        """Search, cut, attend, remainder, merge; where all share a selection, part by part after the search."""
        usual, positions = self._search_end(position), q_HTGD.shape[1]
        search_end = searcher.search_end(position, usual)
        always = self._attend_always(q_HTGD, position, search_end)
        search = self._search(position, always.lse)
        found = searcher.choose(q_HTGD, position, usual, search)
        self._count_always(position, positions, search_end)
        if not searcher.shared:
            return [self._attend_found(q_HTGD, position, found, self._rows, always, search)]
        held = self._rows.hold(found.selection)
        # Without pieces there is nothing to score but the rows themselves.
        kind = self._method.remainder.pieces
        scored = 0 if kind is None else (search_end - self._sinks) // kind.keys_each
        return [
            self._attend_found(
                q_HTGD[:, part], position + part.start, found, held, always.columns(part), search
            )
            for part in passes(q_HTGD, scored, self._prompt_score_bytes)
        ]

    def _attend_found(
        self,
        q_HTGD: Tensor,
        position: int,
        found: MadeSelection,
        rows: KeyRows | HeldRows,
        always: AttentionState,
        search: Search,
    ) -> Tensor:
        """Attend, remainder, merge, of positions whose selection is known, and so what is always attended."""
        pieces = self._pieces(q_HTGD, position, found.search_end, found.pieces)
        elsewhere = self._elsewhere(q_HTGD, found.search_end, pieces)
        left = LeftOut(self._method.remainder, pieces, elsewhere, self._form)
        out = attend_selection(q_HTGD, rows, found.selection, left, self._figures).merge(always).out
        moments = self._method.remainder.moments
        rest = sum(piece.remainder_bytes(moments, pieces is found.pieces) for piece in pieces)
        read = (search.vectors_read, search.bytes_read, rest)
        self._observe(q_HTGD, position, found.search_end, found.selection, out, read)
        return out

    def _search(self, position: int, exact_lse_HTG: Tensor) -> Search:
        sizes = (position, exact_lse_HTG, self._prompt_score_bytes)
        return Search(self._rank, self._cut, self._rows, self._form, *sizes, self._figures)

    def _rank(self, q_HTGD: Tensor, position: int, search_end: int) -> Ranking:
        appended, options = self._appended.get(self._index), self._method.search
        ranking = self._index.rank(q_HTGD, self._sinks, search_end, appended, options, position)
        return ranking.capped(self._form)

    def _cut(
        self,
        ranking: Ranking,
        search_end: int,
        read_logits: Callable[[Tensor], Tensor],
        exact_lse_HTG: Tensor,
    ) -> Selection:
        step = Step(self._length(search_end), self._thresholds, read_logits, exact_lse_HTG)
        return cut(self._budget, ranking, step)

    def _ask(self, q_H1GD: Tensor, keys_H1D: Tensor, values_H1D: Tensor, position: int) -> Asked:
        """Adds a new key, and says what its query wants of the index."""
        self._write(position, keys_H1D, values_H1D)
        search_end = self._search_end(position)
        self._append_until(search_end)
        appended = self._appended.get(self._index)
        return Asked(q_H1GD, self._sinks, search_end, appended, self._method.search, position)

    def _keep(self, asked: Asked) -> int:
        keep = self._budget.best(self._length(asked.end_key))
        if keep is None:
            raise ValueError(f"budget {self._budget.label!r} does not say how many keys are kept")
        return keep

    def _note(self, asked: Asked, best: Best, number: int, out_H1GD: Tensor) -> None:
        """Counts what was done for the session of that number, and tells who measures."""
        self._figures.searches += 1
        self._figures.count_kept(best.kept[number])
        self._count_always(asked.position, 1, asked.end_key)
        if self.observer is not None:
            own = best.of([number])
            read = (own.vectors_read[0], own.bytes_read[0], own.remainder_bytes[0])
            selection = Selection(own.ids_HSK, own.counts_HS)
            self._observe(asked.queries_HTGD, asked.position, asked.end_key, selection, out_H1GD, read)

    def _observe(
        self,
        q_HTGD: Tensor,
        position: int,
        search_end: int,
        selection: Selection,
        out_HTGD: Tensor,
        read: tuple[float, float, float],
    ) -> None:
        """Tells who measures. read: vectors and bytes of the index, and bytes for the remainder."""
        if self.observer is not None:
            found = (selection, self._rows, out_HTGD, *read, self._form)
            self.observer(Observation(q_HTGD, position, self._sinks, search_end, *found))

    def _search_end(self, position: int) -> int:
        return self._method.searched_range(position, self._context_HN2D.shape[1])[1]

    def _next_move(self, position: int) -> int:
        """The first later position whose search_end may be another one."""
        block = self._method.append_block
        return position + block - (position - self._method.recent) % block

    def _length(self, search_end: int) -> int:
        """Tokens of sinks, searched keys and recent window together."""
        return search_end + self._method.recent

    def _write(self, position: int, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        self.tail.write(position - self._context_HN2D.shape[1], keys_HTD, values_HTD)

    def _append_until(self, search_end: int) -> None:
        """Makes the tail keys before search_end searchable, and no others, block by block.

        A failed step may have appended more, and be repeated with other keys: then the extension is made anew.
        """
        begin = perf_counter_ns()
        count, block = self._context_HN2D.shape[1], self._method.append_block
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
        pieces = index.pieces(Asked(q_HTGD, self._sinks, search_end, self._appended.get(index), {}, position))
        self._figures.search_ns += perf_counter_ns() - begin
        return pieces

    def _elsewhere(self, q_HTGD: Tensor, search_end: int, pieces: Sequence[Piece]) -> ExactKeys | None:
        """Keys outside of the searched range that are in the pieces; None when there are none.

        Only clusters cross its borders. Sinks may be in them. Keys from search_end to the last one that the clusters'
        index holds are: those of the context, and those of the tail that were appended after an earlier selection was
        made that is used again.
        """
        clusters = [piece.clusters for piece in pieces if isinstance(piece, ScoredClusters)]
        if not clusters:
            return None
        begin = perf_counter_ns()
        heads, count, device = *self._context_HN2D.shape[:2], q_HTGD.device
        appended = self._appended.get(self._indexes[-1])
        held = count + (appended.count if appended else 0)
        if self._sinks_clustered is None:
            ids_HS = torch.arange(self._sinks, device=device).expand(heads, -1)
            self._sinks_clustered = any(bool((each.cluster_of(ids_HS) >= 0).any()) for each in clusters)
        sinks = self._sinks if self._sinks_clustered else 0
        ids_S = torch.cat([torch.arange(sinks, device=device), torch.arange(search_end, held, device=device)])
        if not len(ids_S):
            return None
        kv_HS2D = self._outside(sinks, search_end, held, count).float()
        ids = ids_S.to(torch.int32).expand(heads, 1, -1)
        logits = torch.einsum("htgd,hsd->htgs", q_HTGD, kv_HS2D[:, :, 0])
        self._figures.attend_ns += perf_counter_ns() - begin
        return ExactKeys(ids, torch.ones_like(ids, dtype=torch.bool), logits, kv_HS2D[:, None, :, 1])

    def _attend_always(self, q_HTGD: Tensor, position: int, search_end: int) -> AttentionState:
        """Attention to sinks, learnt or not, recent context and the tail up to the last query's own key."""
        begin = perf_counter_ns()
        end = position + q_HTGD.shape[1]
        rows = self._outside(self._sinks, search_end, end, min(end, self._context_HN2D.shape[1]))
        state = self._form.add_sink(attend_shared(q_HTGD, rows, causal=True, cap=self._form.cap))
        self._figures.attend_ns += perf_counter_ns() - begin
        return state

    def _count_always(self, position: int, positions: int, search_end: int) -> None:
        """Counts the keys that are always attended, and all there are."""
        heads = self._context_HN2D.shape[0]
        available = heads * visible_keys(position, positions)
        skipped = heads * positions * (search_end - self._sinks)
        self._figures.count_exact(available - skipped, available)

    def _outside(self, sinks: int, search_end: int, end: int, context_end: int) -> Tensor:
        """Rows [H, S, 2, d] of so many sinks, and of all keys from search_end to `end`."""
        count = self._context_HN2D.shape[1]
        recent = self._context_rows(min(search_end, count), context_end)
        tail = self.tail.rows[:, max(search_end - count, 0) : max(end - count, 0)]
        return torch.cat([self._context_rows(0, sinks), recent, tail], dim=1)

    def _context_rows(self, start: int, end: int) -> Tensor:
        """Rows start..end-1 of the context on the device of the queries, copied only where they are not there."""
        if self._on_host or isinstance(self._context_HN2D, TwoPlanes):
            return copy_rows(self._context_HN2D, start, end, self.tail.rows.device)
        return self._context_HN2D[:, start:end]


def attend_sparse_together(calls: Sequence[tuple[SparseLayer, Tensor, Tensor, Tensor, int]]) -> list[Tensor]:
    """`SparseLayer.attend` of decode steps of sessions that share an index: each gets the bits that it gets alone.

    The index is read once for all of them, and so are the values that stand for what nobody selected. Time counts in
    full for every session, as that of any batched work.
    """
    begin = perf_counter_ns()
    layers = [layer for layer, *_ in calls]
    asked = [layer._ask(q, keys, values, position) for layer, q, keys, values, position in calls]
    outs: list[Tensor] = []
    score_bytes = max(4 * each.queries_HTGD[..., 0].numel() * each.end_key for each in asked)
    at_once = max(1, _GROUP_SCORE_BYTES // score_bytes)
    search_ns = perf_counter_ns() - begin
    for first in range(0, len(calls), at_once):
        part = slice(first, first + at_once)
        found, spent_ns = _attend_asked(layers[part], asked[part])
        outs += found
        search_ns += spent_ns
    attend_ns = perf_counter_ns() - begin - search_ns
    for layer in layers:
        layer._figures.search_ns += search_ns
        layer._figures.attend_ns += attend_ns
    return outs


def _attend_asked(layers: Sequence[SparseLayer], asked: Sequence[Asked]) -> tuple[list[Tensor], int]:
    """Search, cut and remainder in one go, all that is attended exactly in another; and the time of the first."""
    begin = perf_counter_ns()
    index, form = layers[0].sharing, layers[0]._form
    if index is None:
        raise ValueError("layers of this method do not attend together")
    best = index.best_together(asked, [layer._keep(each) for layer, each in zip(layers, asked, strict=True)])
    search_ns = perf_counter_ns() - begin
    listed = Listed(
        torch.cat([each.queries_HTGD for each in asked], dim=1),
        [layer.tail.rows for layer in layers],
        best.ids_HSK,
        best.counts_HS,
        [each.first_key for each in asked],
        [each.end_key for each in asked],
        best.others,
    )
    state = form.add_sink(attend_listed_rows(layers[0]._context_HN2D, listed))
    outs = state.out.split_with_sizes([1] * len(layers), dim=1)
    for number, (layer, each, out) in enumerate(zip(layers, asked, outs, strict=True)):
        layer._note(each, best, number, out)
    return list(outs), search_ns


def _joined(outs: Sequence[Tensor]) -> Tensor:
    """[H, T, G, d] of several parts of the positions."""
    return outs[0] if len(outs) == 1 else torch.cat(list(outs), dim=1)


LayerAttention = DenseLayer | SparseLayer | WindowLayer
"""Attention of one layer of one session: all have `tail`, `nbytes` and `exact`."""
