"""One layer of one session: search, cut, gather, attend, merge.

The keys a query at position p sees fall into four parts that partition them:

    [0, sinks)              attended exactly, always
    [sinks, search_end)     searched; only the selection is attended
    [search_end, N)         recent context, attended exactly
    [max(N, search_end), p] tail, attended exactly

Tail keys that left the recent window join the session's private extension of the index, which moves search_end on.

Shape legend: H KV heads, T query positions, G group heads, K kept keys, N context tokens, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from decode_engine.figures import Figures
from decode_engine.partial_attention import BLOCK_BYTES, attend_gathered, attend_shared
from decode_engine.tail import Tail
from index_store.attention_state import AttentionState
from index_store.budgets import Selection
from index_store.indexes.base import AppendedKeys, LayerIndex
from index_store.methods import Method

_SCORE_BYTES = 16 * 2**20  # scores of one search; a longer prompt is searched in several passes


class LayerAttention(Protocol):
    """Attention of one layer of one session."""

    tail: Tail

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

    def attend(self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> Tensor:
        heads, count = self._kv_HN2D.shape[:2]
        positions = q_HTGD.shape[1]
        self.tail.write(position - count, keys_HTD, values_HTD)
        start = perf_counter_ns()
        state = attend_shared(q_HTGD, self._kv_HN2D, causal=False).merge(
            attend_shared(q_HTGD, self.tail.rows, causal=True)
        )
        self._figures.attend_ns += perf_counter_ns() - start
        self._figures.count_dense(heads * _visible(position, positions))
        return state.out


@dataclass(frozen=True, slots=True)
class _Reusable:
    """A selection kept for later steps, with the end of the range that it was chosen from."""

    selection: Selection
    search_end: int
    made_at: int


class SparseLayer:
    """Attends to a selection, the sinks, the recent window and the tail."""

    def __init__(self, kv_HN2D: Tensor, index: LayerIndex, method: Method, figures: Figures) -> None:
        heads, count, _, head_dim = kv_HN2D.shape
        self._kv_HN2D = kv_HN2D
        self._sinks = min(method.sinks, count)
        self._index = index
        self._method = method
        self._figures = figures
        self._appended: AppendedKeys | None = None
        self._reusable: _Reusable | None = None
        self.tail = Tail(heads, head_dim, kv_HN2D.dtype)

    def attend(self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> Tensor:
        count = self._kv_HN2D.shape[1]
        self.tail.write(position - count, keys_HTD, values_HTD)
        reused = self._reuse(position, q_HTGD.shape[1])
        search_end = self._advance(position) if reused is None else reused.search_end
        state, kept = self._attend_selected(q_HTGD, position, search_end, reused)
        begin = perf_counter_ns()
        out = state.merge(self._attend_exact(q_HTGD, search_end)).out
        self._figures.attend_ns += perf_counter_ns() - begin
        self._count(q_HTGD, position, search_end, kept)
        return out

    def _advance(self, position: int) -> int:
        """Moves tail keys that left the recent window into the index; returns the end of the searched range."""
        begin = perf_counter_ns()
        count = self._kv_HN2D.shape[1]
        leaving = position - self._method.recent
        indexed = count + (self._appended.count if self._appended else 0)
        if leaving - indexed >= self._method.append_block:
            if self._appended is None:
                self._appended = self._index.start_appending()
            self._appended.append(self.tail.rows[:, indexed - count : leaving - count, 0])
            indexed = leaving
        self._figures.append_ns += perf_counter_ns() - begin
        return max(min(leaving, indexed), self._sinks)

    def _reuse(self, position: int, positions: int) -> _Reusable | None:
        last = self._reusable
        if last is None or positions != 1 or position - last.made_at >= self._method.period:
            return None
        return last if position > last.made_at else None

    def _attend_selected(
        self, q_HTGD: Tensor, position: int, search_end: int, reused: _Reusable | None
    ) -> tuple[AttentionState, int]:
        heads, positions, group, head_dim = q_HTGD.shape
        searchable = search_end - self._sinks
        if searchable == 0:
            return AttentionState.empty((heads, positions, group), head_dim), 0
        self._figures.searches += reused is None
        step = max(1, _SCORE_BYTES // (heads * searchable * 4 * (group + 1)))
        states: list[AttentionState] = []
        kept = 0
        for first in range(0, positions, step):
            queries = q_HTGD[:, first : first + step]
            selection = reused.selection if reused else self._search(queries, position, search_end)
            states.append(self._attend_rows(queries, selection))
            kept += int(selection.counts_HT.sum())
            if positions == 1 and self._method.period > 1 and reused is None:
                self._reusable = _Reusable(selection, search_end, position)
        return _concatenate(states), kept

    def _attend_rows(self, q_HTGD: Tensor, selection: Selection) -> AttentionState:
        """Gathers and attends to the selection, in blocks of bounded size over positions and kept keys."""
        heads, positions, _, head_dim = q_HTGD.shape
        kept = max(1, selection.ids_HTK.shape[2])
        key_bytes = heads * 2 * head_dim * 4
        positions_step = max(1, BLOCK_BYTES // (kept * key_bytes))
        keys_step = max(1, min(kept, BLOCK_BYTES // key_bytes))
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
                self._figures.gather_ns += gathered - begin
                self._figures.attend_ns += perf_counter_ns() - gathered
            states.append(state)
        return _concatenate(states)

    def _search(self, q_HTGD: Tensor, position: int, search_end: int) -> Selection:
        begin = perf_counter_ns()
        ranking = self._index.rank(q_HTGD, self._sinks, search_end, self._appended, self._method.search)
        selection = self._method.budget.cut(ranking, position)
        self._figures.search_ns += perf_counter_ns() - begin
        return selection

    def _gather(self, ids_HTK: Tensor) -> Tensor:
        """Rows [H, T, K, 2, d] float32 of context and tail keys."""
        _, count, _, head_dim = self._kv_HN2D.shape
        flat = _gather_rows(self._kv_HN2D, ids_HTK.clamp(max=count - 1))
        if self._appended is not None:
            late = (ids_HTK >= count).flatten()
            if bool(late.any()):
                tail_ids = (ids_HTK - count).clamp_(min=0)
                flat[late] = _gather_rows(self.tail.rows, tail_ids)[late]
        return flat.float().view(*ids_HTK.shape, 2, head_dim)

    def _attend_exact(self, q_HTGD: Tensor, search_end: int) -> AttentionState:
        """Sinks and recent context without a mask, the exact part of the tail causally."""
        count = self._kv_HN2D.shape[1]
        tail = self.tail.rows[:, max(search_end - count, 0) :]
        recent = self._kv_HN2D[:, min(search_end, count) :]
        exact = torch.cat([self._kv_HN2D[:, : self._sinks], recent, tail], dim=1)
        return attend_shared(q_HTGD, exact, causal=True)

    def _count(self, q_HTGD: Tensor, position: int, search_end: int, kept: int) -> None:
        heads, positions = q_HTGD.shape[:2]
        available = heads * _visible(position, positions)
        skipped = heads * positions * (search_end - self._sinks)
        self._figures.count_sparse(kept, available - skipped + kept, available)


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
