"""Attention to coded values on a host, by weights that are exponentials of logits.

Products are of 8-bit integers: a row's weights are folded with the values' scales and rounded with one unit for 128
keys. A row's result depends neither on the rows beside it nor on the number of threads.

Shape legend: H KV heads, N keys, R rows of queries, S spans, g groups of a value's channels, d head dim, P parts of the
keys.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line import RowsInLine
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import add_up, make_scaling
from index_store.indexes.coarse_rows.loops.coded_tables_numba import (
    fold_and_round,
    half_table,
    row_table,
    widen_groups,
)
from index_store.indexes.coarse_rows.loops.key_scores_numba import weigh
from index_store.indexes.coarse_rows.loops.packed_codes_numba import multiply, pack_values
from index_store.indexes.coarse_rows.loops.spans import SPAN, Spans, shift_of, span_count
from index_store.indexes.coarse_rows.scalar_rows import BLOCK, ScalarRows
from index_store.launch import launch, njit, prange

_ROWS_AT_ONCE = 16
_MOST_PARTS = 16
_MOST_ROWS = 256  # of one launch, whose parts' outputs are all in memory
_add_scaled = make_scaling(add=True)


def attend_values(rows: ScalarRows, logits: RowsInLine, first: int) -> AttentionState:
    """Attention by logits to the values of rows `first`.., as many as a row of logits has; -inf marks what counts not.

    Logits become weights. Returns out [H, R, d] and lse [H, R], float32; 0 and -inf where nothing counts.
    """
    heads, queries = logits.places_HR.shape
    shift = shift_of(rows, first)
    spans = Spans.empty(heads, queries, span_count(int(logits.counts_R.max(initial=0)), shift))
    weigh(logits, shift, spans)
    return add_values(rows, logits, spans, first)


def add_values(rows: ScalarRows, weights: RowsInLine, spans: Spans, first: int) -> AttentionState:
    """Attention to the values of rows `first`.. by exponentials of logits; 0 marks what counts not.

    How keys are divided into parts depends on the coded rows alone. Returns out [H, R, d] and lse [H, R], float32; 0
    and -inf where nothing counts.
    """
    heads, queries = weights.places_HR.shape
    shift = shift_of(rows, first)
    each = max(1, -(-span_count(rows.count - first, shift) // _MOST_PARTS))
    parts = -(-span_count(int(weights.counts_R.max(initial=0)), shift) // each)
    values = (
        *row_table(rows.value_codes_HNC),
        *half_table(rows.value_scales_HNV),
        *half_table(rows.value_offsets_HNV),
        rows.value_bits,
    )
    state = AttentionState.empty((heads, queries), rows.head_dim)
    if parts == 0:
        return state
    for begin in range(0, queries, _MOST_ROWS):
        some = slice(begin, begin + _MOST_ROWS)
        places, counts = np.ascontiguousarray(weights.places_HR[:, some]), weights.counts_R[some]
        shape = (heads, parts, len(counts))
        outs = torch.empty(*shape, rows.head_dim, device="cpu")
        peaks, totals = (torch.empty(shape, device="cpu") for _ in range(2))
        partial = (outs.numpy(), peaks.numpy(), totals.numpy())
        known = (spans.peaks_HRS, spans.rows_R[some], spans.first_R[some])
        launch(_attend_parts, *values, weights.numbers, places, counts, *known, first, shift, each, *partial)
        launch(_merge_parts, *partial, state.out.numpy(), state.lse.numpy(), begin)
    return state


@njit(cache=True, nogil=True, parallel=True)
def _attend_parts(
    codes: NDArray[np.uint8],
    codes_stride: int,
    scales: NDArray[np.int16],
    scales_stride: int,
    offsets: NDArray[np.int16],
    offsets_stride: int,
    bits: int,
    weights: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    span_peaks: NDArray[np.float32],
    span_rows: NDArray[np.int64],
    span_first: NDArray[np.int64],
    first: int,
    shift: int,
    each: int,
    outs: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    heads, parts = outs.shape[:2]
    for task in prange(heads * parts):
        head, part = task // parts, task % parts
        begin = first + max(0, part * each * SPAN - shift)
        _attend_part(
            codes[head * codes_stride + begin :],
            scales[head * scales_stride + begin :],
            offsets[head * offsets_stride + begin :],
            bits,
            weights,
            places[head],
            counts,
            span_peaks[head],
            span_rows,
            span_first,
            shift,
            part * each,
            (part + 1) * each,
            outs[head, part],
            peaks[head, part],
            totals[head, part],
        )


@njit(cache=True, nogil=True)
def _attend_part(
    codes: NDArray[np.uint8],
    scales: NDArray[np.int16],
    offsets: NDArray[np.int16],
    bits: int,
    weights: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    span_peaks: NDArray[np.float32],
    span_rows: NDArray[np.int64],
    span_first: NDArray[np.int64],
    shift: int,
    first: int,
    end: int,
    out: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Sums of weighted values [R, d] of one head's first keys, the weights' peaks and their totals.

    weights: of a row those in columns of spans first..end-1, as far as it has any; beyond the longest row there is
    nothing.
    """
    rows, dim, groups = places.shape[0], out.shape[1], scales.shape[1]
    width = dim // groups
    vectors = (width + LANES - 1) // LANES
    raw = np.empty((1, codes.shape[1]), np.uint32)
    packed = np.empty((BLOCK // 4, dim + LANES), np.uint32)
    line_of = weights.reshape(1, weights.size)
    halves, line = np.zeros((1, LANES), np.int16), np.zeros((1, BLOCK * groups), np.float32)
    scale, offset = np.zeros((groups, BLOCK), np.float32), np.zeros((groups, BLOCK), np.float32)
    few, folded = np.zeros((1, BLOCK), np.float32), np.empty((1, BLOCK), np.float32)
    rounded = np.zeros((groups * _ROWS_AT_ONCE, BLOCK), np.int8)
    units, shifts = np.empty(groups * _ROWS_AT_ONCE, np.float32), np.empty(groups * _ROWS_AT_ONCE, np.float32)
    sums = np.empty((_ROWS_AT_ONCE, width + LANES), np.int32)
    gathered = np.zeros((rows * groups, vectors * LANES), np.float32)
    factors = np.empty(rows, np.float32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    totals[:] = 0
    longest = 0
    for r in range(rows):
        longest = max(longest, counts[r])
        peaks[r] = -np.inf
        for span in range(first, min(end, (shift + counts[r] + SPAN - 1) // SPAN)):
            peaks[r] = max(peaks[r], span_peaks[span_rows[r], span_first[r] + span])
    begin_at = max(0, first * SPAN - shift)
    # Blocks begin at multiples of BLOCK positions, so weights that begin at a cache line go on to.
    for block in range((shift + begin_at) // BLOCK, (min(end * SPAN, shift + longest) + BLOCK - 1) // BLOCK):
        low = max(block * BLOCK - shift, begin_at)
        keys = min((block + 1) * BLOCK - shift, longest) - low
        if low == begin_at or (shift + low) % SPAN == 0:
            for r in range(rows):
                factors[r] = 0
                if low < counts[r] and peaks[r] > -np.inf:
                    peak = span_peaks[span_rows[r], span_first[r] + (shift + low) // SPAN]
                    factors[r] = np.exp(peak - peaks[r])
        widen_groups(scales, low - begin_at, keys, halves, line, scale)
        widen_groups(offsets, low - begin_at, keys, halves, line, offset)
        pack_values(codes, low - begin_at, keys, bits, raw, packed)
        for begin in range(0, rows, _ROWS_AT_ONCE):
            some = min(_ROWS_AT_ONCE, rows - begin)
            for r in range(some):
                own = max(0, min(keys, counts[begin + r] - low))
                column, factor = places[begin + r] + low, factors[begin + r]
                if own == BLOCK:
                    total = _fold_weights(
                        line_of, column, scale, offset, middle, folded, rounded, r, units, shifts
                    )
                else:
                    few[0, :own] = line_of[0, column : column + own]
                    few[0, own:] = 0
                    total = _fold_weights(few, 0, scale, offset, middle, folded, rounded, r, units, shifts)
                totals[begin + r] += factor * total
                for g in range(groups):
                    units[g * _ROWS_AT_ONCE + r] *= factor
                    shifts[g * _ROWS_AT_ONCE + r] *= factor
            for g in range(groups):
                multiply(packed, g * width, width, rounded, g * _ROWS_AT_ONCE, some, (keys + 3) // 4, sums)
                for r in range(some):
                    unit, addend = units[g * _ROWS_AT_ONCE + r], shifts[g * _ROWS_AT_ONCE + r]
                    _add_scaled(sums, r, 0, unit, addend, gathered, (begin + r) * groups + g, 0, vectors)
    for r in range(rows):
        for g in range(groups):
            out[r, g * width : (g + 1) * width] = gathered[r * groups + g, :width]


@njit(cache=True, nogil=True, _nrt=False)
def _fold_weights(
    weights: NDArray[np.float32],
    column: int,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    middle: np.float32,
    folded: NDArray[np.float32],
    rounded: NDArray[np.int8],
    row: int,
    units: NDArray[np.float32],
    shifts: NDArray[np.float32],
) -> np.float32:  # pragma: no cover - compiled
    """Rounds a block's weights weights[0, column..] for every group of channels; returns their sum."""
    for g in range(scale.shape[0]):
        place = g * _ROWS_AT_ONCE + row
        units[place], shifts[place] = fold_and_round(
            weights, 0, column, scale, offset, g, middle, folded, rounded, place, BLOCK // LANES
        )
    return add_up(weights, 0, column, BLOCK // LANES)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True, parallel=True)
def _merge_parts(
    outs: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
    first: int,
) -> None:  # pragma: no cover - compiled
    """Merges the parts of all rows; the first is row `first` of the out."""
    heads, parts, rows, _ = outs.shape
    for task in prange(heads * rows):
        head, r = task // rows, task % rows
        peak = peaks[head, 0, r]
        for part in range(parts):
            peak = max(peak, peaks[head, part, r])
        if peak == -np.inf:
            continue  # nothing was attended: the state is that already
        line, total = out[head, first + r], np.float32(0)
        for part in range(parts):
            total += np.exp(peaks[head, part, r] - peak) * totals[head, part, r]
        if total == 0:
            continue  # all that counted is attended elsewhere
        for part in range(parts):
            share = np.exp(peaks[head, part, r] - peak)
            for i in range(line.shape[0]):
                line[i] += share * outs[head, part, r, i]
        for i in range(line.shape[0]):
            line[i] /= total
        lse[head, first + r] = peak + np.log(total)
