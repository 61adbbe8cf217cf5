"""Coarse rows: every key and value in 2 to 4 bits a channel, all scored, and all that are not selected attended.

The coarse copy is a search and a partition of its own: a query's products with the coarse keys rank all keys, and the
remainder `coarse` takes the same products for the logits of those that were not selected.

Rows that a session adds are coded block by block. Scales and offsets of keys belong to blocks of positions
that do not depend on how keys arrive: the first block goes from the end of the context to the next multiple of 128. A
block that is not full is kept as it came and coded anew whenever keys join it, so rows appended in pieces equal rows
appended at once.

Shape legend: H KV heads, T positions, G group heads, N keys, d head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.attention.vectors.code import LANES
from index_store.compiled.launch import on_host, thread_count
from index_store.indexes.coarse_rows.best_keys_numba import Columns
from index_store.indexes.coarse_rows.coded_passes_numba import SPAN, CodedPass, Spans, shift_of
from index_store.indexes.coarse_rows.coded_steps_numba import (
    BestColumns,
    attend_best_passes,
    attend_values,
    score_keys,
)
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import BLOCK, CoarseKind, CoarseParameters, value_groups
from index_store.indexes.coarse_rows.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    Asked,
    Best,
    GrowingRows,
    LayerIndex,
    LayerSource,
    check_keys,
)
from index_store.selection.ranking import Items, Ranking, ScoredRows
from index_store.store.description.json_fields import Scalar


@dataclass(frozen=True, slots=True)
class ScoredCodes(ScoredRows):
    """Consecutive coded rows, of which row `first` is key `first_id`."""

    rows: ScalarRows
    first: int

    def part(self, heads: slice, positions: slice) -> ScoredCodes:
        return ScoredCodes(
            self.logits_HTGX[heads, positions], self.first_id, self.rows.heads(heads), self.first
        )

    def remainder_bytes(self, moments: str, searched: bool) -> float:
        count = self.logits_HTGX.shape[-1]
        return self.rows.value_bytes(count) + (0.0 if searched else self.rows.key_bytes(count))

    def attend(self, logits_HTGX: Tensor, elsewhere_HTG: Tensor) -> AttentionState:
        logits, rest = logits_HTGX.flatten(1, 2), elsewhere_HTG.flatten(1, 2)
        if on_host(self.rows.key_codes_HNC):
            state = attend_values(self.rows, RowsInLine.of([logits]), self.first, rest)
        else:
            state = attend_values_reference(self.rows, logits, self.first, rest)
        shape = logits_HTGX.shape[:3]
        return AttentionState(state.out.reshape(*shape, -1), state.lse.reshape(shape))


def score_rows(rows: ScalarRows, queries_HTGD: Tensor, first: int, out_HTGX: Tensor) -> ScoredCodes:
    """Scores rows from `first` on, as many as there are columns, into these columns of a contiguous tensor."""
    queries = queries_HTGD.flatten(1, 2)
    out = out_HTGX.view(len(queries), queries.shape[1], -1)
    if on_host(rows.key_codes_HNC):
        score_keys([CodedPass(rows, first, range(queries.shape[1]))], queries, RowsInLine.of([out]))
    else:
        score_keys_reference(rows, queries, first, first + out.shape[2], out)
    return ScoredCodes(out_HTGX, rows.first_id + first, rows, first)


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
    if step >= heads:
        _attend_heads(rows, searched, widths, ids, counts, state)
        return ids, counts, state
    for first in range(0, heads, step):
        part = slice(first, first + step)
        some = [each.heads(part) for each in searched]
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
    best = BestColumns(places_HQG, columns, keeps, ids_HQK, counts_HQ)
    attend_best_passes(passes, queries_HXD, weights, own, best, state)


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
    begins = tuple([each.shared.start if each.shared else -1 for each in searched])
    columns = tuple([each.columns for each in searched])
    order = _order(begins, columns, places_HQG.shape[2])
    passes = [CodedPass(rows, first, places) for first, places in order.together]
    for number, places in order.appending:
        own = searched[number]
        passes.append(CodedPass(own.own_rows, own.own.start, places))
    if not passes:
        return [], torch.empty(0), RowsInLine(line, places_HQG, order.counts_X), spans
    # In one order whatever is indexed, or loops are compiled for another one.
    places_HX = np.ascontiguousarray(places_HQG[:, order.sessions_Y] + order.behind_Y[:, None])
    queries = [searched[number].queries_HGD for number in order.sessions_Y.tolist()]
    return (
        passes,
        queries[0] if len(queries) == 1 else torch.cat(queries, dim=1),
        RowsInLine(line, places_HX.reshape(len(places_HX), -1), order.counts_X),
        spans.of(order.rows_X, order.first_spans_X),
    )


@dataclass(frozen=True, slots=True)
class _Order:
    """Passes of sessions, and their rows of queries one pass behind the other.

    together: of passes over the context's copy, the first row and the rows of queries. appending: sessions that have
    appended rows, and theirs. sessions_Y, behind_Y: of each pass in turn its sessions, and weights of theirs before
    those of the pass. counts_X, rows_X, first_spans_X: of every row of queries.
    """

    together: Sequence[tuple[int, range]]
    appending: Sequence[tuple[int, range]]
    sessions_Y: NDArray[np.int64]
    behind_Y: NDArray[np.int64]
    counts_X: NDArray[np.int64]
    rows_X: NDArray[np.int64]
    first_spans_X: NDArray[np.int64]


@lru_cache(maxsize=64)  # all layers of a step ask for the same, and so do the steps that follow
def _order(begins: tuple[int, ...], columns: tuple[Columns, ...], group: int) -> _Order:
    """begins: the first row of the context's copy of each session, -1 where it searches none there."""
    grouped: dict[int, list[int]] = {}
    for number, first in enumerate(begins):
        if first >= 0:
            grouped.setdefault(first, []).append(number)
    members: list[int] = []
    together, appending = [], []
    for first, sessions in grouped.items():
        together.append((first, _rows_of(len(members), len(sessions), group)))
        members += sessions
    shared = len(members)
    for number, each in enumerate(columns):
        if each.own:
            appending.append((number, _rows_of(len(members), 1, group)))
            members.append(number)
    sessions_Y = np.array(members, np.int64)
    own = [columns[number] for number in members[shared:]]
    none = [0] * shared
    counts = [columns[number].shared for number in members[:shared]] + [each.own for each in own]
    return _Order(
        together,
        appending,
        sessions_Y,
        np.array(none + [each.own_begin for each in own], np.int64),
        np.repeat(np.array(counts, np.int64), group),
        (sessions_Y[:, None] * group + np.arange(group)).reshape(-1),
        np.repeat(np.array(none + [each.shared_spans for each in own], np.int64), group),
    )


def _rows_of(before: int, sessions: int, group: int) -> range:
    """Rows of queries of so many sessions, behind those of others."""
    return range(before * group, (before + sessions) * group)


_ADDRESSED = 32_768
"""Rows up to which a decode step copies none of those before: copies of 16,384 take 10 ms in a layer of 8 KV heads."""


class AppendedRows(AppendedKeys):
    """Rows with scales and offsets of their own. shared: rows of the context, whose shapes and bits they have.

    Those of a block that is not full are held besides in float32.
    """

    def __init__(self, shared: ScalarRows) -> None:
        heads, device = len(shared.key_codes_HNC), shared.key_codes_HNC.device
        super().__init__(heads, shared.head_dim)
        self._first_id = shared.count
        self._key_bits, self._value_bits = shared.key_bits, shared.value_bits
        self._groups = shared.value_scales_HNV.shape[2]

        self._coded = {
            name: GrowingRows(heads, like.shape[2], dtype=like.dtype, addressed=_ADDRESSED, device=device)
            for name, like in shared.arrays().items()
        }
        self._open = GrowingRows(heads, 2, shared.head_dim, device=device, limit=BLOCK)
        self._rows: ScalarRows | None = None

    @property
    def rows(self) -> ScalarRows:
        """All of them: the same views until there are more."""
        if self._rows is None:
            views = {name: rows.rows for name, rows in self._coded.items()}
            self._rows = ScalarRows.of(views, self._key_bits, self._value_bits, self._first_id)
        return self._rows

    def fork(self) -> Self:
        other = super().fork()
        other._coded = {name: rows.fork() for name, rows in self._coded.items()}
        other._rows = None  # those are views of this one's
        return other

    def _extend(self, kv_HT2D: Tensor) -> None:
        if not kv_HT2D.shape[1]:
            return
        raw = torch.cat([self._open.rows, kv_HT2D.float()], dim=1)
        end = self.count + kv_HT2D.shape[1]
        first = end - raw.shape[1]
        coded = code_rows(raw, self._first_id + first, self._key_bits, self._value_bits, self._groups)
        block = (self._first_id % BLOCK + first) // BLOCK
        for name, rows in coded.arrays().items():
            self._coded[name].put(block if name in ("key_scales", "key_offsets") else first, rows)
        left = min(raw.shape[1], (self._first_id + end) % BLOCK)
        if left:
            # For good: how much room there is depends on no more than where keys end.
            self._open.reserve(BLOCK)
        self._open.put(0, raw[:, raw.shape[1] - left :])
        self._rows = None

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (*self._coded.values(), self._open))


class CoarseRows(CoarseKind, LayerIndex):
    """The coarse copy of one layer's keys and values."""

    def __init__(self, parameters: CoarseParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(arrays, arrays["key_codes"].shape[1])
        self.rows = ScalarRows.of(arrays, parameters.key_bits, parameters.value_bits)

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = CoarseParameters.parse(parameters)
        check_keys(source.keys_HND)
        groups = value_groups(source.kv_HN2D.shape[3], parsed.value_group)
        rows = code_rows(source.kv_HN2D, 0, parsed.key_bits, parsed.value_bits, groups)
        return cls(parsed, rows.arrays())

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(CoarseParameters.parse(parameters), arrays)

    def start_appending(self) -> AppendedRows:
        return AppendedRows(self.rows)

    @property
    def shares(self) -> bool:
        """Loops on a host do: no row of theirs depends on those beside it."""
        return on_host(self.rows.key_codes_HNC)

    def best_together(self, asked: Sequence[Asked], keeps: Sequence[int]) -> Best:
        if not self.shares:
            return super().best_together(asked, keeps)
        for each in asked:
            self._check_held(each.end_key, each.appended)
            self.parse_search(each.search)
        searched = [self._searched(each) for each in asked]
        ids, counts, others = attend_best(self.rows, searched, keeps)
        firsts = {each.first_key for each in asked}
        if len(firsts) == 1:
            ids += firsts.pop()
        else:
            ids += torch.tensor([each.first_key for each in asked], dtype=torch.int32, device="cpu")[:, None]
        keys = [max(0, each.end_key - each.first_key) for each in asked]
        return Best(
            ids,
            counts,
            others,
            [float(count) for count in keys],
            [self.rows.key_bytes(count) for count in keys],
            [self.rows.value_bytes(count) for count in keys],
        )

    @cached_property
    def _no_rows(self) -> ScalarRows:
        """What a session has appended that has appended nothing."""
        return AppendedRows(self.rows).rows

    def _searched(self, asked: Asked) -> Searched:
        own = self._no_rows if asked.appended is None else self._own(asked.appended, AppendedRows).rows
        shared = range(asked.first_key, min(asked.end_key, self.rows.count))
        appended = range(max(0, asked.first_key - own.first_id), max(0, asked.end_key - own.first_id))
        return Searched.of(asked.queries_HTGD[:, 0], shared, own, appended)

    def _score(self, asked: Asked) -> Ranking:
        self.parse_search(asked.search)
        logits, pieces = self._scored(asked)
        count = logits.shape[3]
        items = Items(asked.first_key, asked.end_key)
        return Ranking(logits, items, pieces, float(count), self.rows.key_bytes(count))

    def pieces(self, asked: Asked) -> tuple[ScoredCodes, ...]:
        return self._scored(asked)[1]

    def _scored(self, asked: Asked) -> tuple[Tensor, tuple[ScoredCodes, ...]]:
        """Logits [H, T, G, M] of keys first_key..end_key-1, and the pieces whose logits are views of them."""
        queries, first_key = asked.queries_HTGD, asked.first_key
        logits = queries.new_empty(*queries.shape[:3], max(0, asked.end_key - first_key))
        pieces = []
        for rows in (self.rows, self._own(asked.appended, AppendedRows).rows):
            first = max(0, first_key - rows.first_id)
            end = min(rows.count, asked.end_key - rows.first_id)
            if first < end:
                begin = rows.first_id + first - first_key
                pieces.append(score_rows(rows, queries, first, logits[..., begin : begin + end - first]))
        return logits, tuple(pieces)
