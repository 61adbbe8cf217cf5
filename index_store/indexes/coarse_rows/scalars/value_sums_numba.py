"""Attention to coded values on a host, by weights that are exponentials of logits.

Products are of 8-bit integers: a row's weights are folded with the values' scales and rounded with one unit for 128
keys. A row's result depends neither on the rows beside it nor on the number of threads. Blocks of next to no weight
are left out (`negligible_runs_numba`).

Shape legend: H KV heads, N keys, R rows of queries, S spans, g groups of a value's channels, d head dim, P parts of the
keys.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line import RowsInLine
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import add_weighted, make_scaling
from index_store.attention.vectors.folding_numba import FOLDED, fold_rows
from index_store.indexes.coarse_rows.scalars.coded_tables_numba import (
    at_cache_line,
    half_table,
    row_table,
    widen_groups,
)
from index_store.indexes.coarse_rows.scalars.key_scores_numba import weigh
from index_store.indexes.coarse_rows.scalars.negligible_runs_numba import choose_rows, find_limits
from index_store.indexes.coarse_rows.scalars.packed_codes_numba import multiply, pack_values
from index_store.indexes.coarse_rows.scalars.scalar_rows import BLOCK, ScalarRows
from index_store.indexes.coarse_rows.scalars.spans import SPAN, Spans, shift_of, span_count
from index_store.launch import launch, njit, prange

_ROWS_AT_ONCE = 16
_MOST_PARTS = 16
_MOST_ROWS = 256  # of one launch, whose parts' outputs are all in memory
_add_scaled = make_scaling(add=True)


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
    return add_values(rows, logits, spans, first, elsewhere_HR)


def add_values(
    rows: ScalarRows,
    weights: RowsInLine,
    spans: Spans,
    first: int,
    elsewhere_HR: Tensor | None = None,
) -> AttentionState:
    """Attention to the values of rows `first`.. by exponentials of logits; 0 marks what counts not.

    spans: their totals may hold the weights of keys that count elsewhere; those that they do not are in elsewhere_HR,
    as in `attend_values`. How keys are divided into parts depends on the coded rows alone. Returns out [H, R, d] and
    lse [H, R], float32; 0 and -inf where nothing counts.
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
    limits = np.empty((heads, queries), np.float32)
    beside = np.empty((0, 0), np.float32) if elsewhere_HR is None else elsewhere_HR.contiguous().numpy()
    launch(
        find_limits,
        spans.peaks_HRS,
        spans.totals_HRS,
        spans.rows_R,
        spans.first_R,
        weights.counts_R,
        shift,
        beside,
        limits,
        work=14 * limits.size * spans.peaks_HRS.shape[2],
    )
    for begin in range(0, queries, _MOST_ROWS):
        some = slice(begin, begin + _MOST_ROWS)
        places, counts = np.ascontiguousarray(weights.places_HR[:, some]), weights.counts_R[some]
        shape = (heads, parts, len(counts))
        outs = torch.empty(*shape, rows.head_dim, device="cpu")
        peaks, totals = (torch.empty(shape, device="cpu") for _ in range(2))
        partial = (outs.numpy(), peaks.numpy(), totals.numpy())
        known = (spans.peaks_HRS, spans.rows_R[some], spans.first_R[some], limits[:, some])
        work = heads * rows.head_dim * (0.04 * counts.max() + 0.01 * counts.sum())
        numbers = (weights.numbers, places, counts)
        launch(_attend_parts, *values, *numbers, *known, first, shift, each, *partial, work=work)
        launch(_merge_parts, *partial, state.out.numpy(), state.lse.numpy(), begin, work=0.25 * outs.numel())
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
    limits: NDArray[np.float32],
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
            limits[head],
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
    limits: NDArray[np.float32],
    shift: int,
    first: int,
    end: int,
    out: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Sums of weighted values [R, d] of one head's first keys, the weights' peaks and their totals.

    weights: of a row those in columns of spans first..end-1, as far as it has any; beyond the longest row there is
    nothing. limits: see `find_limits`.
    """
    rows, dim, groups = places.shape[0], out.shape[1], scales.shape[1]
    width = dim // groups
    vectors = (width + LANES - 1) // LANES
    raw = np.empty((1, codes.shape[1]), np.uint32)
    packed = at_cache_line(BLOCK // 4, (dim + 2 * LANES - 1) // LANES * LANES).view(np.uint32)
    line_of = weights.reshape(1, weights.size)
    halves, line = np.zeros((1, LANES), np.int16), np.zeros((1, BLOCK * groups), np.float32)
    scale, offset = at_cache_line(groups, BLOCK), at_cache_line(groups, BLOCK)
    few, folded = at_cache_line(1, FOLDED * BLOCK), at_cache_line(FOLDED, BLOCK)
    columns = np.empty((1, FOLDED), np.int64)
    rounded = np.zeros((groups * _ROWS_AT_ONCE, BLOCK), np.int8)
    room = groups * _ROWS_AT_ONCE
    units, shifts = np.empty((1, room), np.float32), np.empty((1, room), np.float32)
    added = np.empty((1, room), np.float32)
    sums = at_cache_line(_ROWS_AT_ONCE, (vectors + 1) * LANES).view(np.int32)
    gathered = at_cache_line(rows * groups, vectors * LANES)
    factors, least = np.empty(rows, np.float32), np.empty(rows, np.float32)
    chosen = np.empty(rows, np.int64)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    totals[:] = 0
    longest = counts.max()
    _find_peaks(counts, span_peaks, span_rows, span_first, shift, first, end, peaks)
    begin_at = max(0, first * SPAN - shift)
    # Blocks begin at multiples of BLOCK positions, so weights that begin at a cache line go on to.
    for block in range((shift + begin_at) // BLOCK, (min(end * SPAN, shift + longest) + BLOCK - 1) // BLOCK):
        low = max(block * BLOCK - shift, begin_at)
        keys = min((block + 1) * BLOCK - shift, longest) - low
        if low == begin_at or (shift + low) % SPAN == 0:
            span = (shift + low) // SPAN
            for r in range(rows):
                peak = span_peaks[span_rows[r], span_first[r] + span] if low < counts[r] else -np.inf
                factors[r] = np.exp(peak - peaks[r]) if peak > -np.inf else 0
                least[r] = np.exp(limits[r] - peak) if peak > -np.inf else np.inf
        some_rows = choose_rows(line_of, places, counts, low, keys, least, chosen)
        if some_rows == 0:
            continue
        widen_groups(scales, low - begin_at, keys, halves, line, scale)
        widen_groups(offsets, low - begin_at, keys, halves, line, offset)
        for g in range(groups):
            add_weighted(middle, scale, g, 0, offset, g, 0, BLOCK // LANES)
        pack_values(codes, low - begin_at, keys, bits, raw, packed)
        for begin in range(0, some_rows, _ROWS_AT_ONCE):
            some = min(_ROWS_AT_ONCE, some_rows - begin)
            _fold_rows(
                line_of,
                places,
                counts,
                low,
                keys,
                chosen[begin : begin + some],
                few,
                columns,
                scale,
                offset,
                middle,
                folded,
                rounded,
                units,
                shifts,
                added,
            )
            for g in range(groups):
                multiply(packed, g * width, width, rounded, g * _ROWS_AT_ONCE, some, (keys + 3) // 4, sums)
                for r in range(some):
                    row, place = chosen[begin + r], g * _ROWS_AT_ONCE + r
                    unit, addend = factors[row] * units[0, place], factors[row] * shifts[0, place]
                    _add_scaled(sums, r, 0, unit, addend, gathered, row * groups + g, 0, vectors)
            for r in range(some):
                totals[chosen[begin + r]] += factors[chosen[begin + r]] * added[0, r]
    for r in range(rows):
        for g in range(groups):
            out[r, g * width : (g + 1) * width] = gathered[r * groups + g, :width]


@njit(cache=True, nogil=True, _nrt=False)
def _find_peaks(
    counts: NDArray[np.int64],
    span_peaks: NDArray[np.float32],
    span_rows: NDArray[np.int64],
    span_first: NDArray[np.int64],
    shift: int,
    first: int,
    end: int,
    peaks: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """The largest peak of spans first..end-1 of every row, as far as it has any."""
    for r in range(counts.shape[0]):
        peaks[r] = -np.inf
        for span in range(first, min(end, (shift + counts[r] + SPAN - 1) // SPAN)):
            peaks[r] = max(peaks[r], span_peaks[span_rows[r], span_first[r] + span])


@njit(cache=True, nogil=True, _nrt=False)
def _fold_rows(
    weights: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    low: int,
    keys: int,
    chosen: NDArray[np.int64],
    few: NDArray[np.float32],
    columns: NDArray[np.int64],
    scale: NDArray[np.float32],
    centre: NDArray[np.float32],
    middle: np.float32,
    folded: NDArray[np.float32],
    rounded: NDArray[np.int8],
    units: NDArray[np.float32],
    shifts: NDArray[np.float32],
    added: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Rounds weights of `keys` keys from column low on, of chosen rows, and adds them up.

    For every group of channels. few: scratch for rows that end before the block does.
    """
    last = chosen.shape[0] - 1
    for r in range(0, last + 1, FOLDED):
        whole = keys == BLOCK
        for i in range(FOLDED):
            row = chosen[min(r + i, last)]
            columns[0, i] = places[row] + low
            whole = whole and counts[row] - low >= BLOCK
        if not whole:
            few[:] = 0
            for i in range(FOLDED):
                for x in range(min(keys, counts[chosen[min(r + i, last)]] - low)):
                    few[0, i * BLOCK + x] = weights[0, columns[0, i] + x]
                columns[0, i] = i * BLOCK
        for g in range(scale.shape[0]):
            place = g * _ROWS_AT_ONCE + r
            numbers = weights if whole else few
            fold_rows(
                numbers,
                columns,
                scale,
                centre,
                g,
                middle,
                folded,
                rounded,
                place,
                units,
                shifts,
                added,
                BLOCK // LANES,
            )


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
