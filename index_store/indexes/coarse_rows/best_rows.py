"""Steps of several sessions over one coarse copy on a host: the best keys of each, and attention to all others.

What a ranking, a cut and the remainder `coarse` do one after the other, with one exponential for each logit, and
as many KV heads at a time as there is memory for that is kept.

Shape legend: H KV heads, Q sessions, G group heads, R = Q * G rows of queries, M columns (searched keys) of a session,
d head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line import RowsInLine
from index_store.attention.vectors.code import LANES
from index_store.compiled.launch import thread_count
from index_store.indexes.coarse_rows.scalars.best_keys_numba import Columns, take_best
from index_store.indexes.coarse_rows.scalars.coded_passes_numba import CodedPass
from index_store.indexes.coarse_rows.scalars.key_scores_numba import score_keys
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.scalars.spans import SPAN, Spans, shift_of
from index_store.indexes.coarse_rows.scalars.value_sums_numba import add_values

_WEIGHTS = 8 * 2**20
"""Weights in memory that is kept from step to step: new memory costs more than what is computed with it."""

_kept = threading.local()


@dataclass(frozen=True, slots=True)
class Searched:
    """What a session searches: rows of the context's copy, and of the copy of what it appended, one after the other.

    queries_HGD: float32, scaled by 1/sqrt(d). shared, own: ranges of these rows, which may be empty. columns: that are
    made of them.
    """

    queries_HGD: Tensor
    shared: range
    own_rows: ScalarRows
    own: range
    columns: Columns

    @classmethod
    def of(cls, queries_HGD: Tensor, shared: range, own_rows: ScalarRows, own: range) -> Searched:
        own_shift = shift_of(own_rows, own.start)
        columns = Columns.of(len(shared), len(own), shared.start % SPAN, own_shift)
        return cls(queries_HGD, shared, own_rows, own, columns)

    def heads(self, part: slice) -> Searched:
        """The same for some KV heads."""
        return replace(self, queries_HGD=self.queries_HGD[part], own_rows=self.own_rows.heads(part))


def attend_best(
    rows: ScalarRows, searched: Sequence[Searched], keeps: Sequence[int]
) -> tuple[Tensor, Tensor, AttentionState]:
    """So many best columns of each session, and attention to all other keys: ids [H, Q, K] and counts [H, Q], int32.

    Each session gets the bits that it gets alone.
    """
    heads, group, head_dim = searched[0].queries_HGD.shape
    weights = sum(group * each.columns.room for each in searched)
    step = max(thread_count(), _WEIGHTS // max(1, weights))
    widths = [
        min(keep, each.columns.shared + each.columns.own) for keep, each in zip(keeps, searched, strict=True)
    ]
    ids = torch.zeros(heads, len(searched), max(widths), dtype=torch.int32, device="cpu")
    counts = torch.zeros(heads, len(searched), dtype=torch.int32, device="cpu")
    state = AttentionState.empty((heads, len(searched), group), head_dim)
    for first in range(0, heads, step):
        part = slice(first, first + step)
        some = searched if step >= heads else [each.heads(part) for each in searched]
        own = AttentionState(state.out[part], state.lse[part])
        _attend_heads(rows.heads(part), some, widths, ids[part], counts[part], own)
    return ids, counts, state


def _attend_heads(
    rows: ScalarRows,
    searched: Sequence[Searched],
    keeps: Sequence[int],
    ids_HQK: Tensor,
    counts_HQ: Tensor,
    state: AttentionState,
) -> None:
    """`attend_best` for as many KV heads as are held at a time; writes what it finds."""
    heads, group, _ = searched[0].queries_HGD.shape
    columns = tuple(each.columns for each in searched)
    count, places_HQG = _lay_out(heads, group, columns)
    line = _memory(count)
    spans = Spans.empty(heads, len(searched) * group, max(each.spans for each in columns))
    passes, queries_HXD, weights, own = _plan(rows, searched, line, places_HQG, spans)
    if not passes:  # nobody searches anything
        return
    score_keys(passes, queries_HXD, weights, own)
    take_best(line, places_HQG, spans, columns, keeps, ids_HQK, counts_HQ)
    found = add_values(passes, weights, own)
    state.out[:] = found.out.view(state.out.shape)
    state.lse[:] = found.lse.view(state.lse.shape)


@lru_cache(maxsize=64)  # all layers of a step ask for the same
def _lay_out(heads: int, group: int, columns: tuple[Columns, ...]) -> tuple[int, NDArray[np.int64]]:
    """How many weights all sessions have, and where their rows begin among these, [H, Q, G].

    A position that is a multiple of LANES is at a cache line in every row, so no vector lies across two.
    """
    leads = np.array([each.lead for each in columns], np.int64)
    sizes = np.array([each.room for each in columns], np.int64)
    begins = heads * group * (sizes.cumsum() - sizes) + leads
    rows = np.arange(heads)[:, None, None] * group + np.arange(group)
    return int(heads * group * sizes.sum()), begins[:, None] + rows * sizes[:, None]


def _memory(count: int) -> NDArray[np.float32]:
    """Room for so many numbers from a cache line on: this thread's, unless more are wanted than are kept."""
    if count > _WEIGHTS:
        return _at_line(count)
    kept: NDArray[np.float32] | None = getattr(_kept, "weights", None)
    if kept is None or kept.size < count:
        kept = _kept.weights = _at_line(count)
    return kept


def _at_line(count: int) -> NDArray[np.float32]:
    room = np.empty(count + LANES, np.float32)
    begin = -room.ctypes.data // 4 % LANES
    return room[begin : begin + count]


def _plan(
    rows: ScalarRows,
    searched: Sequence[Searched],
    line: NDArray[np.float32],
    places_HQG: NDArray[np.int64],
    spans: Spans,
) -> tuple[list[CodedPass], Tensor, RowsInLine, Spans]:
    """Passes over the context's copy, one for each row at which sessions begin, and over what each has appended.

    And of all their rows of queries, one pass behind the other: the queries [H, X, d], where weights are, and spans.
    """
    together: dict[int, list[int]] = {}
    for number, each in enumerate(searched):
        if each.shared:
            together.setdefault(each.shared.start, []).append(number)
    appending = [number for number, each in enumerate(searched) if each.own]
    heads, _, group = places_HQG.shape
    passes: list[CodedPass] = []
    members: list[int] = []
    for first, sessions in together.items():
        passes.append(CodedPass(rows, first, _rows(len(members), len(sessions), group)))
        members += sessions
    for number in appending:
        own = searched[number]
        passes.append(CodedPass(own.own_rows, own.own.start, _rows(len(members), 1, group)))
        members.append(number)
    if not members:
        return [], torch.empty(0), RowsInLine(line, places_HQG, np.empty(0, np.int64)), spans
    shared, sessions_Y = members[: len(members) - len(appending)], np.array(members)
    columns = [searched[number].columns for number in appending]
    none = [0] * len(shared)
    counts = [len(searched[number].shared) for number in shared] + [each.own for each in columns]
    behind = np.array(none + [each.own_begin for each in columns])
    first_spans = none + [each.shared_spans for each in columns]
    # In one order whatever is indexed, or loops are compiled for another one.
    places_HX = np.ascontiguousarray(places_HQG[:, sessions_Y] + behind[:, None]).reshape(heads, -1)
    rows_X = (sessions_Y[:, None] * group + np.arange(group)).reshape(-1)
    return (
        passes,
        torch.cat([searched[number].queries_HGD for number in members], dim=1),
        RowsInLine(line, places_HX, np.repeat(counts, group)),
        spans.of(rows_X, np.repeat(first_spans, group)),
    )


def _rows(before: int, sessions: int, group: int) -> range:
    """Rows of queries of so many sessions, behind those of others."""
    return range(before * group, (before + sessions) * group)
