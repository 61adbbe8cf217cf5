"""The best keys of sessions by exponentials of their logits, which are taken out of these.

A key's weight is the softmax of its logit, summed over the heads of a group. Of 16 neighbours only the largest weight
is kept; the others are found again where it reaches a lower bound of the least weight that is kept.

Shape legend: H KV heads, Q sessions, G group heads, R = Q * G rows of weights, S spans, K kept keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from index_store.attention.vectors.bytes_numba import instruction_sets, prefetch
from index_store.attention.vectors.code import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    SIZE,
    WORD,
    WORDS,
    Place,
    Rows,
    ask_for,
    call,
    constants,
    emits,
    gathered,
    plus,
    repeated,
    variable,
)
from index_store.attention.vectors.floats_numba import add_product, larger
from index_store.compiled.launch import F4, I4, I8, njit
from index_store.indexes.coarse_rows.coded_passes_numba import SPAN, span_count
from index_store.selection.top_k_numba import lower_bound, top_k_row

_PLACE = (types.intp, types.intp)


def make_sums(vectors: int) -> Any:
    """For so many vectors: 16, of each of which the largest number is found, or one, which is written."""

    @emits(types.void, "rows rows i i i place place")
    def add_rows(
        builder: Any, line: Rows, begins: Rows, row: Any, count: Any, column: Any, factors: Place, out: Place
    ) -> None:
        """out, 16 numbers: with n[i] = the sum over r < count of line[0, begins[row, r] + column + i] * the first of
        `factors`, r rows below, these n of one vector, or of every vector the largest. begins: int64. Both find the
        same sums.
        """
        totals = [variable(builder, constants(FLOATS, 0.0)) for _ in range(vectors)]
        with cgutils.for_range(builder, count) as loop:
            begin = builder.add(begins.load(row, loop.index, SIZE), column)
            factor = factors.rows.load(builder.add(factors.row, loop.index), factors.column, FLOAT)
            factor = repeated(builder, factor)
            for number, total in enumerate(totals):
                place = plus(builder, begin, LANES * number)
                if vectors > 1:
                    ask_for(builder, line.address(SIZE(0), plus(builder, place, LANES * vectors), BYTE))
                taken = line.load(SIZE(0), place, FLOATS)
                builder.store(add_product(builder, taken, factor, builder.load(total)), total)
        found = gathered(
            builder, [builder.load(total) for total in totals], lambda a, b: larger(builder, a, b)
        )
        out.store(found, SIZE(0))

    return add_rows


@emits(types.int64, "place f i i i i rows rows i")
def take_reaching(
    builder: Any,
    numbers: Place,
    bound: Any,
    low: Any,
    high: Any,
    name: Any,
    step: Any,
    taken: Rows,
    names: Rows,
    to: Any,
) -> Any:
    """take_reaching(numbers, row, column, bound, low, high, name, step, taken, names, to): how many it takes.

    Of numbers i = low..high-1 of 16 those that are not less than the bound: they are written to taken[0, to..], in
    their order, and the names `name` + i * step to names[0, to..]. What is behind them there is undefined, up to 16.
    taken may be the numbers themselves. names: int32.
    """
    low, high, name, step = (repeated(builder, builder.trunc(x, WORD)) for x in (low, high, name, step))
    lanes = ir.Constant(WORDS, list(range(LANES)))
    found = numbers.load(SIZE(0), FLOATS)
    chosen = builder.fcmp_unordered(">=", found, repeated(builder, bound))
    chosen = builder.and_(chosen, builder.icmp_signed(">=", lanes, low))
    chosen = builder.and_(chosen, builder.icmp_signed("<", lanes, high))
    called = builder.add(name, builder.mul(lanes, step))
    for vector, kind, rows in ((found, "v16f32", taken), (called, "v16i32", names)):
        if "avx512f" in instruction_sets():
            undefined = ir.Constant(vector.type, ir.Undefined)
            intrinsic_name = f"llvm.x86.avx512.mask.compress.{kind}"
            rows.store(call(builder, intrinsic_name, vector.type, vector, undefined, chosen), SIZE(0), to)
        else:
            place = rows.address(SIZE(0), to, vector.type.element)
            call(builder, f"llvm.masked.compressstore.{kind}", ir.VoidType(), vector, place, chosen)
    return builder.zext(builder.ctpop(builder.bitcast(chosen, ir.IntType(LANES))), SIZE)


TILE = LANES * LANES
"""Positions whose largest weights fill a vector."""

SPAN_MAXIMA = SPAN // LANES
"""Largest weights of neighbours, of a span."""
_AHEAD = 8  # vectors asked for before they are added up again
_largest_sums, _sums = make_sums(LANES), make_sums(1)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a session's rows of weights, and where they lie: `shared` ones, and then its `own`.

    shift, own_shift: positions of their spans before them (`Spans`). Both begin as far behind a multiple of TILE as
    behind a span's begin, so no vector belongs to two spans. own_begin: numbers from the first column to the first of
    its own. room: numbers that a row takes, whole tiles, of which `lead` are before the first column. shared_spans,
    spans: of the shared ones, and of all.
    """

    shared: int
    own: int
    shift: int
    own_shift: int
    lead: int
    own_begin: int
    room: int
    shared_spans: int
    spans: int

    @classmethod
    @lru_cache(maxsize=256)  # all layers of a step ask for the same ones
    def of(cls, shared: int, own: int, shift: int, own_shift: int) -> Columns:
        lead = shift % TILE
        own_begin = -(-(lead + shared) // TILE) * TILE - lead + own_shift % TILE
        room = -(-(lead + own_begin + own) // TILE) * TILE if own else lead + own_begin - own_shift % TILE
        shared_spans = span_count(shared, shift)
        spans = shared_spans + span_count(own, own_shift)
        return cls(shared, own, shift, own_shift, lead, own_begin, room, shared_spans, spans)


@lru_cache(maxsize=64)  # all layers of a step ask for the same
def column_tables(columns: tuple[Columns, ...], keeps: tuple[int, ...]) -> tuple[I8, I8, I8]:
    """What the loop is told of sessions' columns, of their parts, and how many each keeps."""
    return (
        np.array([(each.shared, each.shift, each.own, each.own_shift) for each in columns], np.int64),
        np.array([(each.shared_spans, each.own_begin) for each in columns], np.int64),
        np.array(keeps, np.int64),
    )


class SearchTable(NamedTuple):
    """What loops are told of sessions' weights, of which each KV head and session has a row of places [G] in the line.

    line: [1, .]. factors: [H * R, S], what makes exponentials of a span weights. maxima: [., SPAN_MAXIMA of every
    span]. columns, parts: see `column_tables`.
    """

    line: F4
    places: I8
    factors: F4
    maxima: F4
    columns: I8
    parts: I8


@njit()
def find_row_factors(
    task: int, peaks: F4, totals: F4, factors: F4, rows: int
) -> None:  # pragma: no cover - compiled
    head, row = task // rows, task % rows
    _find_factors(peaks[head, row], totals[head, row], factors[head, row])


@njit()
def find_span_maxima(task: int, search: SearchTable) -> None:  # pragma: no cover - compiled
    spans = search.factors.shape[1]
    _find_maxima(search, task // spans, task % spans)


@njit()
def take_row(
    row: int,
    search: SearchTable,
    peaks: F4,
    totals: F4,
    factors: F4,
    keeps: I8,
    ids: I4,
    found: I4,
    whole: bool,
) -> None:  # pragma: no cover - compiled
    queries, (_, group) = keeps.shape[0], search.places.shape
    head, query = row // queries, row % queries
    if whole:
        for each in range(query * group, (query + 1) * group):
            _find_factors(peaks[head, each], totals[head, each], factors[head, each])
        for span in range(search.factors.shape[1]):
            _find_maxima(search, row, span)
    if keeps[query] > 0:
        best = ids[head, query, : keeps[query]]
        count = _choose(search, row, best)
        found[head, query] = count
        shared, behind = search.columns[query, 0], search.parts[query, 1] - search.columns[query, 0]
        for g in range(group):
            for k in range(count):
                place = search.places[row, g] + best[k] + (behind if best[k] >= shared else 0)
                search.line[0, place] = 0


@njit()
def _find_factors(peaks: F4, totals: F4, factors: F4) -> None:  # pragma: no cover - compiled
    """What makes every span's exponentials of a row the softmax of its logits."""
    peak, total = np.float32(-np.inf), np.float32(0)
    for span in range(peaks.shape[0]):
        peak = max(peak, peaks[span])
    for span in range(peaks.shape[0]):
        factors[span] = np.exp(peaks[span] - peak) if peaks[span] > -np.inf else np.float32(0)
        total += factors[span] * totals[span]
    if total > 0:
        for span in range(peaks.shape[0]):
            factors[span] /= total


@njit(_nrt=False)
def _extent(span: int, columns: I8, parts: I8) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Where a span begins, and its keys' begin and end, as numbers from a row's first column on."""
    if span < parts[0]:
        begin = span * SPAN - columns[1]
        return begin, max(0, begin), min(columns[0], begin + SPAN)
    begin = parts[1] + (span - parts[0]) * SPAN - columns[3]
    return begin, max(parts[1], begin), min(parts[1] + columns[2], begin + SPAN)


@njit(_nrt=False)
def _find_maxima(search: SearchTable, row: int, span: int) -> None:  # pragma: no cover - compiled
    """The largest weight of every 16 keys of a span; -inf where it has none. What shares their vectors becomes 0."""
    line, places, maxima = search.line, search.places, search.maxima
    group, query = places.shape[1], row % search.columns.shape[0]
    begin, low, high = _extent(span, search.columns[query], search.parts[query])
    if low >= high:
        low, high = begin, begin
    first, end = (low - begin) // LANES, (high - begin + LANES - 1) // LANES
    for g in range(group):
        for x in range(begin + first * LANES, low):
            line[0, places[row, g] + x] = 0
        for x in range(high, begin + end * LANES):
            line[0, places[row, g] + x] = 0
    at = span * SPAN_MAXIMA
    for tile in range(first // LANES, (end + LANES - 1) // LANES):
        place = begin + tile * TILE
        _largest_sums(
            line, places, row, group, place, search.factors, row * group, span, maxima, row, at + tile * LANES
        )
    for each in range(first):
        maxima[row, at + each] = -np.inf
    for each in range(end, SPAN_MAXIMA):
        maxima[row, at + each] = -np.inf


@njit()
def _choose(search: SearchTable, row: int, best: I4) -> int:  # pragma: no cover - compiled
    """Fills in the best keys' columns; returns how many there are.

    Of keys whose weight reaches the bound, which K of the largest weights of neighbours reach.
    """
    line, places, factors, maxima = search.line, search.places, search.factors, search.maxima
    query = row % search.columns.shape[0]
    columns, parts = search.columns[query], search.parts[query]
    bound, group = lower_bound(maxima[row], best.shape[0]), places.shape[1]
    numbers, opened = (
        np.empty((1, maxima.shape[1] + LANES), np.float32),
        np.empty((1, maxima.shape[1] + LANES), np.int32),
    )
    ends, count = np.empty(factors.shape[1], np.int64), 0
    for span in range(ends.shape[0]):
        begin = _extent(span, columns, parts)[0]
        for each in range(0, SPAN_MAXIMA, LANES):
            place = begin + each * LANES
            count += take_reaching(
                maxima, row, span * SPAN_MAXIMA + each, bound, 0, LANES, place, LANES, numbers, opened, count
            )
        ends[span] = count
    opened[0, count:] = 0
    reached, names = (
        np.empty((1, (count + 1) * LANES), np.float32),
        np.empty((1, (count + 1) * LANES), np.int32),
    )
    found, number = 0, 0
    for span in range(ends.shape[0]):
        _, low, high = _extent(span, columns, parts)
        behind = 0 if span < parts[0] else columns[0] - parts[1]
        while number < ends[span]:
            place = opened[0, number]
            for g in range(group):
                prefetch(line, 0, places[row, g] + opened[0, number + _AHEAD])
            _sums(line, places, row, group, place, factors, row * group, span, reached, 0, found)
            found += take_reaching(
                reached, 0, found, bound, low - place, high - place, place + behind, 1, reached, names, found
            )
            number += 1
    kept = top_k_row(reached[0, :found], best) if found > 0 else 0
    for k in range(kept):
        best[k] = names[0, best[k]]
    return int(kept)
