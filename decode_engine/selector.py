"""One layer of one session: search, cut, gather, attend, merge.

The keys a query at position p sees fall into four parts that partition them:

    [0, sinks)              attended exactly, always
    [sinks, search_end)     searched; only the selection is attended
    [search_end, N)         recent context, attended exactly
    [max(N, search_end), p] tail, attended exactly

search_end depends on p alone: it is p - recent, rounded down to a multiple of `append_block`. So it makes no difference
whether tokens arrive one by one or as a prompt in chunks of any size. Tail keys before search_end are in the session's
private extension of the index.

Shape legend: H KV heads, T query positions, G group heads, K kept keys, N context tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from decode_engine.figures import Figures
from decode_engine.partial_attention import attend_gathered, attend_shared
from decode_engine.tail import Tail
from index_store.attention_state import AttentionState
from index_store.budgets import Selection
from index_store.errors import MethodUnsupportedError
from index_store.indexes.base import AppendedKeys, LayerIndex
from index_store.methods import Method

_GATHER_BYTES = 16 * 2**20  # gathered rows in float32; larger blocks gain nothing, smaller ones cost merges
_SCORE_BYTES = 16 * 2**20  # scores of one search; a longer prompt is searched in several passes


class LayerAttention(Protocol):
    """Attention of one layer of one session."""

    @property
    def nbytes(self) -> int:
        """Bytes that the layer holds besides the shared context."""
        ...

    def attend(self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> Tensor:
        """Adds T new keys at `position`.. and returns attention out [H, T, G, d] float32 for their queries.

        Queries are float32 and scaled by 1/sqrt(d).
        """
        ...


class DenseLayer:
    """Attends to everything."""

    def __init__(self, kv_HN2D: Tensor, figures: Figures) -> None:
        heads, _, _, head_dim = kv_HN2D.shape
        self._kv_HN2D = kv_HN2D
        self._figures = figures
        self.tail = Tail(heads, head_dim, kv_HN2D.dtype)

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes

    @property
    def context(self) -> int:
        """Equal for layers that share a context's keys and values."""
        return self._kv_HN2D.data_ptr()

    def attend(self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> Tensor:
        return attend_dense_together([(self, q_HTGD, keys_HTD, values_HTD, position)])[0]

    def read_context(self, q_HTGD: Tensor) -> AttentionState:
        """Attention to the context alone, for queries of any sessions on it."""
        return attend_shared(q_HTGD, self._kv_HN2D, causal=False)

    def read_tail(
        self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int
    ) -> AttentionState:
        """Adds the new keys and attends to the session's tail."""
        heads, count = self._kv_HN2D.shape[:2]
        self.tail.write(position - count, keys_HTD, values_HTD)
        self._figures.count_dense(heads * _visible(position, q_HTGD.shape[1]))
        return attend_shared(q_HTGD, self.tail.rows, causal=True)

    def count_time(self, nanoseconds: int) -> None:
        """Notes time spent on this session's attention."""
        self._figures.attend_ns += nanoseconds


def attend_dense_together(
    calls: Sequence[tuple[DenseLayer, Tensor, Tensor, Tensor, int]],
) -> list[Tensor]:
    """`DenseLayer.attend` of several sessions on one context, which is read and converted once for all of them.

    The time counts in full for every session, as that of any batched work.
    """
    begin = perf_counter_ns()
    queries = [q_HTGD for _, q_HTGD, _, _, _ in calls]
    context = calls[0][0].read_context(queries[0] if len(calls) == 1 else torch.cat(queries, dim=1))
    outs: list[Tensor] = []
    first = 0
    for layer, q_HTGD, keys_HTD, values_HTD, position in calls:
        part = slice(first, first + q_HTGD.shape[1])
        own = AttentionState(context.out[:, part], context.lse[:, part])
        outs.append(own.merge(layer.read_tail(q_HTGD, keys_HTD, values_HTD, position)).out)
        first = part.stop
    spent = perf_counter_ns() - begin
    for layer, *_ in calls:
        layer.count_time(spent)
    return outs


@dataclass(frozen=True, slots=True)
class _Reusable:
    """A selection kept for later steps, with the end of the range that it was chosen from."""

    selection: Selection
    search_end: int
    made_at: int


class SparseLayer:
    """Attends to a selection, the sinks, the recent window and the tail."""

    def __init__(self, kv_HN2D: Tensor, index: LayerIndex, method: Method, figures: Figures) -> None:
        if method.budget is None:
            raise MethodUnsupportedError(
                f"method {method.name!r} has no budget, a searching layer needs one", method=method.name
            )
        heads, count, _, head_dim = kv_HN2D.shape
        self._kv_HN2D = kv_HN2D
        self._sinks = min(method.sinks, count)
        self._index = index
        self._method = method
        self._budget = method.budget
        self._figures = figures
        self._appended: AppendedKeys | None = None
        self._reusable: _Reusable | None = None
        self.tail = Tail(heads, head_dim, kv_HN2D.dtype)

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes + (self._appended.nbytes if self._appended else 0)

    def attend(self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> Tensor:
        end = position + q_HTGD.shape[1]
        self.tail.write(position - self._kv_HN2D.shape[1], keys_HTD, values_HTD)
        reused = self._reuse(position) if q_HTGD.shape[1] == 1 else None
        if reused is not None:
            return self._attend_exact(
                q_HTGD, end, reused.search_end, self._attend_rows(q_HTGD, reused.selection)
            )
        outs: list[Tensor] = []
        first = position
        while first < end:
            last = min(end, self._next_move(first))
            queries = q_HTGD[:, first - position : last - position]
            outs.append(self._attend_together(queries, first, is_step=end - position == 1))
            first = last
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _search_end(self, position: int) -> int:
        block = self._method.append_block
        return max(self._sinks, (position - self._method.recent) // block * block)

    def _next_move(self, position: int) -> int:
        """The first later position whose search_end may be another one."""
        block = self._method.append_block
        return position + block - (position - self._method.recent) % block

    def _reuse(self, position: int) -> _Reusable | None:
        last = self._reusable
        return last if last and 0 < position - last.made_at < self._method.period else None

    def _attend_together(self, q_HTGD: Tensor, position: int, *, is_step: bool) -> Tensor:
        """Attention of positions that share a search_end, the first of which is `position`.

        is_step: this is a decode step by itself, whose selection later steps may reuse.
        """
        positions = q_HTGD.shape[1]
        search_end = self._search_end(position)
        searchable = search_end - self._sinks
        if searchable == 0:
            empty = AttentionState.empty(q_HTGD.shape[:3], q_HTGD.shape[3])
            return self._attend_exact(q_HTGD, position + positions, search_end, empty)
        self._append_until(search_end)
        heads, _, group, _ = q_HTGD.shape
        step = max(1, _SCORE_BYTES // (heads * searchable * 4 * (group + 1)))
        states: list[AttentionState] = []
        for first in range(0, positions, step):
            queries = q_HTGD[:, first : first + step]
            selection = self._search(queries, search_end)
            states.append(self._attend_rows(queries, selection))
        if is_step and self._method.period > 1:
            self._reusable = _Reusable(selection, search_end, position)
        return self._attend_exact(q_HTGD, position + positions, search_end, _concatenate(states))

    def _append_until(self, search_end: int) -> None:
        """Makes the tail keys before search_end searchable."""
        count = self._kv_HN2D.shape[1]
        indexed = count + (self._appended.count if self._appended else 0)
        if search_end <= indexed:
            return
        begin = perf_counter_ns()
        if self._appended is None:
            self._appended = self._index.start_appending()
        self._appended.append(self.tail.rows[:, indexed - count : search_end - count, 0])
        self._figures.append_ns += perf_counter_ns() - begin

    def _attend_rows(self, q_HTGD: Tensor, selection: Selection) -> AttentionState:
        """Gathers and attends to the selection, in blocks of bounded size over positions and kept keys."""
        heads, positions, _, head_dim = q_HTGD.shape
        kept = max(1, selection.ids_HTK.shape[2])
        key_bytes = heads * 2 * head_dim * 4
        positions_step = max(1, _GATHER_BYTES // (kept * key_bytes))
        keys_step = max(1, min(kept, _GATHER_BYTES // key_bytes))
        states: list[AttentionState] = []
        for first in range(0, positions, positions_step):
            part = slice(first, first + positions_step)
            queries = q_HTGD[:, part]
            state = AttentionState.empty(queries.shape[:3], head_dim)
            for start in range(0, kept, keys_step):
                begin = perf_counter_ns()
                rows = self._gather(selection.ids_HTK[:, part, start : start + keys_step])
                gathered = perf_counter_ns()
                counts_HT = (selection.counts_HT[:, part] - start).clamp_(min=0)
                state = state.merge(attend_gathered(queries, rows, counts_HT))
                self._figures.count_kept(int(counts_HT.clamp(max=rows.shape[2]).sum()))
                self._figures.gather_ns += gathered - begin
                self._figures.attend_ns += perf_counter_ns() - gathered
            states.append(state)
        return _concatenate(states)

    def _search(self, q_HTGD: Tensor, search_end: int) -> Selection:
        begin = perf_counter_ns()
        ranking = self._index.rank(q_HTGD, self._sinks, search_end, self._appended, self._method.search)
        selection = self._budget.cut(ranking, search_end + self._method.recent)
        self._figures.searches += q_HTGD.shape[1]
        self._figures.search_ns += perf_counter_ns() - begin
        return selection

    def _gather(self, ids_HTK: Tensor) -> Tensor:
        """Rows [H, T, K, 2, d] float32 of context and tail keys."""
        _, count, _, head_dim = self._kv_HN2D.shape
        flat = _gather_rows(self._kv_HN2D, ids_HTK.clamp(max=count - 1)).float()
        if self._appended is not None:
            heads = torch.arange(len(ids_HTK))[:, None, None].expand(ids_HTK.shape)
            late = ids_HTK >= count
            tail_rows = self.tail.rows[heads[late], (ids_HTK[late] - count).long()]
            flat[late.flatten()] = tail_rows.flatten(1).float()
        return flat.view(*ids_HTK.shape, 2, head_dim)

    def _attend_exact(self, q_HTGD: Tensor, end: int, search_end: int, selected: AttentionState) -> Tensor:
        """Adds sinks, recent context and the tail up to `end` (the last key of the last query); counts the keys."""
        begin = perf_counter_ns()
        heads, count = self._kv_HN2D.shape[:2]
        tail = self.tail.rows[:, max(search_end - count, 0) : end - count]
        recent = self._kv_HN2D[:, min(search_end, count) :]
        exact = torch.cat([self._kv_HN2D[:, : self._sinks], recent, tail], dim=1)
        out = selected.merge(attend_shared(q_HTGD, exact, causal=True)).out
        positions = q_HTGD.shape[1]
        available = heads * _visible(end - positions, positions)
        skipped = heads * positions * (search_end - self._sinks)
        self._figures.count_exact(available - skipped, available)
        self._figures.attend_ns += perf_counter_ns() - begin
        return out


def _concatenate(states: list[AttentionState]) -> AttentionState:
    """One state of consecutive query positions."""
    if len(states) == 1:
        return states[0]
    return AttentionState(
        torch.cat([state.out for state in states], dim=1), torch.cat([state.lse for state in states], dim=1)
    )


def _visible(position: int, positions: int) -> int:
    """Keys seen by `positions` causal queries, the first of which sits at `position`."""
    return positions * (position + 1) + positions * (positions - 1) // 2


def _gather_rows(kv_HN2D: Tensor, ids_HTK: Tensor) -> Tensor:
    """Rows [H*T*K, 2*d] at the ids of every head, in the stored dtype."""
    heads = kv_HN2D.shape[0]
    stride = kv_HN2D.stride(0) // kv_HN2D.stride(
        1
    )  # rows between heads; more than N where a buffer has slack
    width = kv_HN2D.shape[2] * kv_HN2D.shape[3]
    table = kv_HN2D.as_strided(((heads - 1) * stride + kv_HN2D.shape[1], width), (width, 1))
    offsets = (torch.arange(heads) * stride)[:, None, None]
    return table.index_select(0, (ids_HTK.long() + offsets).flatten())
