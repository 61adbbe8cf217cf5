"""All that is done with coded rows on a host, in one compiled loop: keys scored, the best taken out, values added up.

A decode step does all of it in one launch: its threads are woken once, and meet behind every phase. Prompts, which list
keys in another way, do a part of it. So there is one loop to compile. What it computes depends neither on the number of
threads nor on what else is launched with it.

Shape legend: H KV heads, Q sessions, G group heads, R rows of queries, X those of all passes, S spans, K kept keys, P
parts of the keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.attention.vectors.counters_numba import LINE, phase_of
from index_store.compiled.launch import F4, I4, I8, launch, njit, spread, thread_count
from index_store.indexes.coarse_rows.best_keys_numba import (
    SPAN_MAXIMA,
    Columns,
    SearchTable,
    column_tables,
    find_row_factors,
    find_span_maxima,
    take_row,
)
from index_store.indexes.coarse_rows.coded_passes_numba import (
    CodedPass,
    PassTable,
    PassTasks,
    Spans,
    SpanTable,
    Weights,
    passes_among,
    shift_of,
    span_count,
)
from index_store.indexes.coarse_rows.key_scores_numba import score_some, weigh
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.value_sums_numba import (
    Parts,
    attend_some,
    find_limit,
    merge_some,
    shifts_of,
)

_MOST_PARTS = 16
_MOST_ROWS = 256  # of one launch, whose parts' outputs are all in memory
_ROWS_EACH = 4  # of a thread, for which there is no need to share out spans

_NO_SPANS = Spans.empty(0, 0, 0)
_NO_TABLE = np.zeros((0, 0), np.int64)
_NO_NUMBERS = np.zeros(0, np.int64)


def _nothing(dimensions: int) -> F4:
    return np.zeros((0,) * dimensions, np.float32)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one launch does of keys, of the best, or of values: how many tasks each phase has, and what they are told.

    work: nanoseconds of one thread.
    """

    tasks: tuple[int, ...]
    arguments: tuple[Any, ...]
    work: float = 0.0


_NO_KEYS = _Part((0,), (_NO_TABLE, 0, 1, 0, 4, _nothing(3)))
_NO_BEST = _Part(
    (0, 0, 0),
    (_NO_TABLE, _nothing(3), _nothing(2), _NO_TABLE, _NO_TABLE, _NO_NUMBERS, True,
     np.zeros((0, 0, 0), np.int32), np.zeros((0, 0), np.int32)),
)  # fmt: skip
_NO_VALUES = _Part(
    (0, 0, 0),
    (_NO_TABLE, 0, 1, 0, 1, 4, _NO_NUMBERS, _nothing(2), _nothing(2), 0, _nothing(4), _nothing(3), _nothing(3),
     _nothing(3), _nothing(2)),
)  # fmt: skip


def score_keys(
    passes: Sequence[CodedPass], queries_HXD: Tensor, out: RowsInLine, spans: Spans | None = None
) -> None:
    """Writes the products of queries [H, X, d] float32 with the keys of each pass, as many as a row of out has.

    spans: where given, peaks and totals are written to them, and to out the exponentials (`Spans`).
    """
    _launch(out, _NO_SPANS if spans is None else spans, _keys(passes, queries_HXD, out))


def take_best(
    weights: F4,
    places_HQG: I8,
    spans: Spans,
    columns: Sequence[Columns],
    keeps: Sequence[int],
    ids_HQK: Tensor,
    counts_HQ: Tensor,
) -> None:
    """Writes column ids of so many best keys of each session, and how many there are; their weights become 0.

    weights: a line of exponentials (`Spans`), where a session's rows begin at places_HQG: its first column there, and
    `lead` numbers before it a multiple of TILE. Those of row q * G + g have the peaks and totals of that row. ids_HQK:
    int32, ascending, ties going to the lower. counts_HQ: int32.
    """
    line = RowsInLine(weights, _NO_TABLE, _NO_NUMBERS)
    _launch(line, spans, best=_best(spans, places_HQG, columns, keeps, ids_HQK, counts_HQ))


def attend_values(
    rows: ScalarRows, logits: RowsInLine, first: int, elsewhere_HR: Tensor | None = None
) -> AttentionState:
    """Attention by logits to the values of rows `first`.., as many as a row of logits has; -inf marks what counts not.

    Logits become weights. elsewhere_HR: log-sum-exp of the logits of keys of these rows that count elsewhere. Returns
    out [H, R, d] and lse [H, R], float32; 0 and -inf where nothing counts.
    """
    heads, queries = logits.places_HR.shape
    shift = shift_of(rows, first)
    spans = Spans.empty(heads, queries, span_count(int(logits.counts_R.max(initial=0)), shift))
    weigh(logits, shift, spans)
    state = AttentionState.empty((heads, queries), rows.head_dim)
    add_values([CodedPass(rows, first, range(queries))], logits, spans, state, elsewhere_HR)
    return state


def add_values(
    passes: Sequence[CodedPass],
    weights: RowsInLine,
    spans: Spans,
    state: AttentionState,
    elsewhere_HR: Tensor | None = None,
    before: tuple[_Part, _Part] = (_NO_KEYS, _NO_BEST),
) -> None:
    """Attention to the values of each pass by exponentials of logits; 0 marks what counts not.

    Rows of queries of several passes may add to one row of results, that of their spans. spans: their totals may hold
    the weights of keys that count elsewhere; those that they do not are in elsewhere_HR, as in `attend_values`, of one
    pass. How keys are divided into parts depends on the coded rows alone. state: an empty one, out [H, R, d] and lse
    [H, R], float32 and contiguous, which is written where anything counts. before: what the same launch does first.
    """
    heads, results, _ = spans.peaks_HRS.shape
    coded, counted = passes[0].rows, bool(weights.counts_R.any())
    limits = np.empty((heads, len(weights.counts_R) * counted), np.float32)
    beside = _nothing(2) if elsewhere_HR is None else elsewhere_HR.contiguous().numpy()
    shifts = shifts_of(tuple([(each.shift, len(each.queries)) for each in passes]))
    found = state.out.view(heads, results, coded.head_dim).numpy(), state.lse.view(heads, results).numpy()
    for first in range(0, results, _MOST_ROWS):
        some = passes
        if results > _MOST_ROWS:
            some = passes_among(passes, spans.rows_R, range(first, first + _MOST_ROWS))
        table = PassTable.of_values(some, weights.counts_R, spans.rows_R, _MOST_PARTS)
        shape = (heads, table.slots, min(_MOST_ROWS, results - first))
        outs = np.empty((*shape, found[0].shape[2]), np.float32)
        peaks, totals = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
        values = _Part(
            (limits.size if first == 0 else 0, table.tasks, shape[0] * shape[2] * (table.tasks > 0)),
            (
                table.numbers, table.tasks, table.stride, coded.value_codes_HNC.shape[2],
                coded.value_scales_HNV.shape[2], coded.value_bits, shifts, beside, limits, first, outs, peaks, totals,
                *found,
            ),
            heads * coded.head_dim * (0.04 * table.most + 0.01 * table.weights),
        )  # fmt: skip
        keys, best = before if first == 0 else (_NO_KEYS, _NO_BEST)
        _launch(weights, spans, keys, best, values)


def attend_best_passes(
    passes: Sequence[CodedPass],
    queries_HXD: Tensor,
    weights: RowsInLine,
    spans: Spans,
    places_HQG: I8,
    columns: Sequence[Columns],
    keeps: Sequence[int],
    ids_HQK: Tensor,
    counts_HQ: Tensor,
    state: AttentionState,
) -> None:
    """`score_keys`, `take_best` and `add_values`, one behind the other."""
    keys = _keys(passes, queries_HXD, weights)
    best = _best(spans, places_HQG, columns, keeps, ids_HQK, counts_HQ)
    add_values(passes, weights, spans, state, before=(keys, best))


def _keys(passes: Sequence[CodedPass], queries_HXD: Tensor, out: RowsInLine) -> _Part:
    heads, _, head_dim = queries_HXD.shape
    table = PassTable.of_keys(passes, out.counts_R)
    coded = passes[0].rows
    return _Part(
        (table.tasks,),
        (
            table.numbers, table.tasks, table.stride, coded.key_codes_HNC.shape[2], coded.key_bits,
            queries_HXD.contiguous().numpy(),
        ),
        heads * head_dim * (0.03 * table.most + 0.008 * table.weights),
    )  # fmt: skip


def _best(
    spans: Spans,
    places_HQG: I8,
    columns: Sequence[Columns],
    keeps: Sequence[int],
    ids_HQK: Tensor,
    counts_HQ: Tensor,
) -> _Part:
    if ids_HQK.numel() == 0:
        return _NO_BEST
    (heads, queries, group), (_, rows, each) = places_HQG.shape, spans.peaks_HRS.shape
    # A thread that has whole rows finds what their keys are chosen from while it is near.
    whole = heads * queries >= _ROWS_EACH * thread_count()
    return _Part(
        (0 if whole else heads * rows, 0 if whole else heads * queries * each, heads * queries),
        (
            places_HQG.reshape(heads * queries, -1),
            np.empty(spans.peaks_HRS.shape, np.float32),
            np.empty((heads * queries, each * SPAN_MAXIMA), np.float32),
            *column_tables(tuple(columns), tuple(keeps)),
            whole,
            ids_HQK.numpy(),
            counts_HQ.numpy(),
        ),
        0.08 * heads * group * sum([each.room for each in columns]),
    )


def _launch(
    line: RowsInLine, spans: Spans, keys: _Part = _NO_KEYS, best: _Part = _NO_BEST, values: _Part = _NO_VALUES
) -> None:
    tasks = np.array((*keys.tasks, *best.tasks, *values.tasks), np.int64)
    if not tasks.any():
        return
    launch(
        go_over_rows,
        thread_count(),
        tasks,
        line.numbers,
        line.places_HR,
        line.counts_R,
        spans.peaks_HRS,
        spans.totals_HRS,
        spans.rows_R,
        spans.first_R,
        *keys.arguments,
        *best.arguments,
        *values.arguments,
        work=(keys.work + best.work + values.work) / 2,  # threads meet behind every phase
    )


_score_all = phase_of(score_some)
_find_all_factors = phase_of(find_row_factors)
_find_all_maxima = phase_of(find_span_maxima)
_take_all = phase_of(take_row)
_find_all_limits = phase_of(find_limit)
_attend_all = phase_of(attend_some)
_merge_all = phase_of(merge_some)


@njit()
def _take_part(
    thread: int, counters: I8, tasks: I8, keys: Any, factors: Any, maxima: Any, best: Any, limits: Any,
    values: Any, merged: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    _score_all(counters, 0, tasks[0], keys)
    _find_all_factors(counters, 2, tasks[1], factors)
    _find_all_maxima(counters, 4, tasks[2], maxima)
    _take_all(counters, 6, tasks[3], best)
    _find_all_limits(counters, 8, tasks[4], limits)
    _attend_all(counters, 10, tasks[5], values)
    _merge_all(counters, 12, tasks[6], merged)


@njit(
    "i8 i8x1 f4x1 i8x2 i8x1 f4x3 f4x3 i8x1 i8x1 "
    "i8x2 i8 i8 i8 i8 f4x3 "
    "i8x2 f4x3 f4x2 i8x2 i8x2 i8x1 b1 i4x3 i4x2 "
    "i8x2 i8 i8 i8 i8 i8 i8x1 f4x2 f4x2 i8 f4x4 f4x3 f4x3 f4x3 f4x2"
)
def go_over_rows(
    threads: int, tasks: I8, line: F4, places: I8, counts: I8, peaks: F4, totals: F4, span_rows: I8,
    span_first: I8,
    key_table: I8, key_tasks: int, key_stride: int, key_width: int, key_bits: int, queries: F4,
    session_places: I8, factors: F4, maxima: F4, columns: I8, column_parts: I8, keeps: I8, whole: bool, ids: I4,
    found: I4,
    value_table: I8, value_tasks: int, value_stride: int, value_width: int, groups: int, value_bits: int,
    shifts: I8, beside: F4, limits: F4, first: int, outs: F4, part_peaks: F4, part_totals: F4, out: F4, lse: F4,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """All phases, each of so many tasks. line, places, counts: of rows of weights (`RowsInLine`)."""
    heads, rows, each = factors.shape
    weights = Weights(line.reshape(1, line.size), places, counts)
    spans, parts = SpanTable(peaks, totals, span_rows, span_first), Parts(outs, part_peaks, part_totals)
    factor_of = factors.reshape(heads * rows, each)
    search = SearchTable(weights.line, session_places, factor_of, maxima, columns, column_parts)
    counters = np.zeros((14, LINE), np.int64)
    spread(
        _take_part, threads,
        (
            counters, tasks,
            (PassTasks(key_table, key_tasks, key_stride, key_width, queries.shape[2], key_bits), queries, weights,
             spans),
            (peaks, totals, factors, rows),
            (search,),
            (search, peaks, totals, factors, keeps, ids, found, whole),
            (spans, counts, shifts, beside, limits),
            (PassTasks(value_table, value_tasks, value_stride, value_width, groups, value_bits), weights, spans, limits,
             first, parts),
            (parts, out, lse, first),
        ),
    )  # fmt: skip
