"""Logits of all coded keys on a host, and their exponentials, span by span.

Products are of 8-bit integers: a row of queries is folded with a block's scales and rounded with one unit for the
block. A unit is the 127th part of the largest magnitude, so a logit is off by at most d * (2^bits - 1) / 4 units, about
a seventh of what coding itself does at 4 bits; codes count from their middle, which halves it. A row's logits depend
neither on the rows beside it nor on the number of threads.

Shape legend: H KV heads, N keys, B blocks of 128 keys, R rows of queries, X those of all passes, S spans, d head dim.
"""

from __future__ import annotations

import numpy as np

from index_store.attention.rows_in_line_numba import RowsInLine, exponentiate_in_place, largest
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import FOLDED, add_weighted, fold_rows, make_scaling
from index_store.compiled.launch import F4, I8, launch, njit, task_loop
from index_store.indexes.coarse_rows.coded_passes_numba import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    LEAD,
    MOST,
    SHIFT,
    SPAN,
    CodedTable,
    PassTasks,
    Spans,
    SpanTable,
    Weights,
    at_cache_line,
    coded_table,
    largest_count,
    task_of,
    widen,
)
from index_store.indexes.coarse_rows.packed_codes_numba import multiply, pack_keys
from index_store.indexes.coarse_rows.parameters import BLOCK

_LEAST_AT_ONCE, _CODES_AT_ONCE = 64, 8192
"""Keys scored at once, at least, and their codes: what is unpacked stays in the first-level cache."""
_ROWS_AT_ONCE = 16
_NO_SPANS = Spans.empty(0, 0, 0)
_write_scaled = make_scaling(add=False)


def weigh(logits: RowsInLine, shift: int, spans: Spans) -> None:
    """Replaces logits by their exponentials, as `score_keys` does; those of -inf become 0. shift: see `Spans`."""
    if logits.counts_R.any():
        launch(
            _weigh,
            len(logits.places_HR) * -(-(shift + int(logits.counts_R.max())) // SPAN),
            shift,
            logits.numbers,
            logits.places_HR,
            logits.counts_R,
            spans.peaks_HRS,
            spans.totals_HRS,
            spans.rows_R,
            spans.first_R,
        )


@njit()
def score_some(
    number: int, passes: PassTasks, queries: F4, out: Weights, spans: SpanTable
) -> None:  # pragma: no cover - compiled
    own, head, span = task_of(number, passes)
    low, high = max(0, span * SPAN - own[SHIFT]), min(own[MOST], (span + 1) * SPAN - own[SHIFT])
    blocks = (own[LEAD] + own[COUNT] + BLOCK - 1) // BLOCK
    rows = slice(own[BEGIN], own[END])
    keys = coded_table(own, passes, head, 0, 0, own[COUNT], blocks)
    some = Weights(out.line, out.places[head, rows], out.counts[rows])
    _score_span(keys, own[LEAD], queries[head, rows], own[FIRST] + low, own[FIRST] + high, some, own[FIRST])
    if spans.peaks.shape[0] > 0:
        own_spans = SpanTable(spans.peaks[head], spans.totals[head], spans.rows[rows], spans.first[rows])
        _weigh_span(some, low, high, span, own_spans)


@njit()
def _score_span(
    keys: CodedTable, lead: int, queries: F4, first: int, end: int, out: Weights, origin: int
) -> None:  # pragma: no cover - compiled
    """Logits of one head's keys first..end-1; those of a row of queries have the place of key `origin`."""
    (rows, dim), bits = queries.shape, keys.bits
    width = (dim + LANES - 1) // LANES * LANES
    room = rows + FOLDED  # rows are folded, and multiplied, by fours
    padded = at_cache_line(1, room * width)
    for r in range(rows):
        for i in range(dim):
            padded[0, r * width + i] = queries[r, i]
    columns = np.empty((1, FOLDED), np.int64)
    weights, folded = np.zeros((room, width), np.int8), at_cache_line(FOLDED, width)
    units, shifts = np.empty((1, room), np.float32), np.empty((1, room), np.float32)
    unused = np.empty((1, room), np.float32)
    scratch, halves = np.zeros((1, LANES), np.float32), np.zeros((1, LANES), np.int16)
    scale, offset = at_cache_line(1, width), at_cache_line(1, width)
    at_once = min(BLOCK, max(_LEAST_AT_ONCE, _CODES_AT_ONCE // dim))
    at_once -= at_once % LANES
    raw = np.empty((max(1, keys.codes.shape[1] // 4), at_once), np.uint32)
    packed = at_cache_line(dim // 4, at_once).view(np.uint32)
    sums = at_cache_line(_ROWS_AT_ONCE, at_once).view(np.int32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    low = first
    while low < end:
        block = (lead + low) // BLOCK
        high = min(end, (block + 1) * BLOCK - lead)
        widen(keys.scales, block, dim, halves, scale)
        widen(keys.offsets, block, dim, halves, offset)
        add_weighted(middle, scale, 0, 0, offset, 0, 0, width // LANES)
        for r in range(0, rows, FOLDED):
            for i in range(FOLDED):
                columns[0, i] = (r + i) * width
            fold_rows(
                padded,
                columns,
                scale,
                offset,
                0,
                middle,
                folded,
                weights,
                r,
                units,
                shifts,
                unused,
                width // LANES,
            )
        for part in range(low, high, at_once):
            count = min(at_once, high - part)
            pack_keys(keys.codes, part, count, bits, raw, packed)
            for begin in range(0, rows, _ROWS_AT_ONCE):
                some = min(_ROWS_AT_ONCE, rows - begin)
                multiply(packed, 0, count, weights, begin, some, dim // 4, sums)
                for r in range(some):
                    unit, shift = units[0, begin + r], shifts[0, begin + r]
                    wanted = max(0, min(count, out.counts[begin + r] - (part - origin)))
                    place = out.places[begin + r] + part - origin
                    whole = wanted // LANES
                    _write_scaled(sums, r, 0, unit, shift, out.line, 0, place, whole)
                    if whole * LANES < wanted:
                        _write_scaled(sums, r, whole * LANES, unit, shift, scratch, 0, 0, 1)
                        for x in range(whole * LANES, wanted):
                            out.line[0, place + x] = scratch[0, x - whole * LANES]
        low = high


@task_loop("i8 f4x1 i8x2 i8x1 f4x3 f4x3 i8x1 i8x1")
def _weigh(
    task: int,
    shift: int,
    logits: F4,
    places: I8,
    counts: I8,
    peaks: F4,
    totals: F4,
    span_rows: I8,
    span_first: I8,
) -> None:  # pragma: no cover - compiled
    most = largest_count(counts)
    spans = (shift + most + SPAN - 1) // SPAN
    head, span = task // spans, task % spans
    low, high = max(0, span * SPAN - shift), min(most, (span + 1) * SPAN - shift)
    own = Weights(logits.reshape(1, logits.size), places[head], counts)
    _weigh_span(own, low, high, span, SpanTable(peaks[head], totals[head], span_rows, span_first))


@njit()
def _weigh_span(
    weights: Weights, low: int, high: int, span: int, spans: SpanTable
) -> None:  # pragma: no cover - compiled
    """Exponentiates columns low..high-1 of every row, one span, as far as a row has them."""
    line, places = weights.line, weights.places
    scratch = np.empty((1, LANES), np.float32)
    for r in range(places.shape[0]):
        stop = min(high, weights.counts[r])
        if stop <= low:
            continue
        peak, total = largest(line, 0, places[r] + low, places[r] + stop), np.float32(0)
        if peak > -np.inf:
            total = exponentiate_in_place(line, 0, places[r] + low, stop - low, peak, scratch)
        else:
            line[0, places[r] + low : places[r] + stop] = 0
        row, place = spans.rows[r], spans.first[r] + span
        spans.peaks[row, place], spans.totals[row, place] = peak, total
