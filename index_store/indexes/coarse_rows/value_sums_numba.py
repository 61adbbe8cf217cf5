"""Attention to coded values on a host, by weights that are exponentials of logits.

Products are of 8-bit integers: a row's weights are folded with the values' scales and rounded with one unit for 128
keys. A row's result depends neither on the rows beside it nor on the number of threads.

Runs of keys are not read where next to no weight is on them. A run is a block of 128 keys. It is left out for a row of
queries where its weight is less than `NEGLIGIBLE` of its even share of all searched keys' weight; keys that are
attended exactly count in the latter alone. So whatever is left out has less than `NEGLIGIBLE` of the weight: of flat
attention nothing is. What is attended to shares its weight, as attention states merge.

Shape legend: H KV heads, N keys, R rows of queries, S spans, g groups of a value's channels, d head dim, P parts of the
keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import FOLDED, add_weighted, fold_rows, make_scaling, total_of
from index_store.compiled.launch import F4, I1, I8, njit
from index_store.indexes.coarse_rows.coded_passes_numba import (
    BEGIN,
    COUNT,
    EACH,
    END,
    FIRST,
    SHIFT,
    SLOT,
    SPAN,
    CodedTable,
    PassTasks,
    SpanTable,
    Weights,
    at_cache_line,
    coded_table,
    largest_count,
    task_of,
    widen_groups,
)
from index_store.indexes.coarse_rows.packed_codes_numba import multiply, pack_values
from index_store.indexes.coarse_rows.parameters import BLOCK

NEGLIGIBLE = 0.02


class Parts(NamedTuple):
    """Sums of weighted values of parts of the keys, the weights' peaks and totals. Of one part [R, d] and [R]."""

    outs: F4
    peaks: F4
    totals: F4


@njit()
def find_limit(
    task: int, spans: SpanTable, counts: I8, shifts: I8, beside: F4, limits: F4
) -> None:  # pragma: no cover - compiled
    """Log of the weight a key, on average, below which runs are left out, of every row: [H, R].

    spans: of the rows' counts of weights, the first of which begins so many positions as its shift behind a span.
    beside: [H, R] log-sum-exp of logits that the totals lack, or nothing.
    """
    rows = limits.shape[1]
    head, r = task // rows, task % rows
    row, first = spans.rows[r], spans.first[r]
    count = (shifts[r] + counts[r] + SPAN - 1) // SPAN if counts[r] > 0 else 0
    peaks, totals = spans.peaks[head, row], spans.totals[head, row]
    peak = beside[head, r] if beside.size else np.float32(-np.inf)
    for span in range(first, first + count):
        peak = max(peak, peaks[span])
    limits[head, r] = -np.inf
    if peak > -np.inf:
        total = np.exp(beside[head, r] - peak) if beside.size else np.float32(0)
        for span in range(first, first + count):
            total += np.exp(peaks[span] - peak) * totals[span]
        limits[head, r] = peak + np.log(total * np.float32(NEGLIGIBLE) / np.float32(counts[r]))


@njit(_nrt=False)
def choose_rows(
    weights: Weights, low: int, keys: int, least: F4, chosen: I8
) -> int:  # pragma: no cover - compiled
    """Fills in the rows to which a run of so many keys from column `low` on counts; returns how many these are.

    least: of each row, its weight a key that is enough.
    """
    count = 0
    for r in range(weights.counts.shape[0]):
        own = min(keys, weights.counts[r] - low)
        if own > 0 and _add_up(weights.line, weights.places[r] + low, own) >= least[r] * np.float32(own):
            chosen[count] = r
            count += 1
    return count


@njit(_nrt=False)
def _add_up(line: F4, first: int, count: int) -> np.float32:  # pragma: no cover - compiled
    """Sum of so many weights."""
    whole = count // LANES
    total = total_of(line, 0, first, whole)
    for x in range(first + whole * LANES, first + count):
        total += line[0, x]
    return total  # type: ignore[no-any-return]


_ROWS_AT_ONCE = 16
_add_scaled = make_scaling(add=True)


@lru_cache(maxsize=64)
def shifts_of(passes: tuple[tuple[int, int], ...]) -> I8:
    """Each pass's shift, as often as it has rows of queries."""
    return np.repeat(*np.array(passes, np.int64).reshape(-1, 2).T)


@njit()
def attend_some(
    number: int, passes: PassTasks, weights: Weights, spans: SpanTable, limits: F4, result: int, parts: Parts
) -> None:  # pragma: no cover - compiled
    own, head, part = task_of(number, passes)
    begin = own[FIRST] + max(0, part * own[EACH] * SPAN - own[SHIFT])
    rows, slot, left = slice(own[BEGIN], own[END]), own[SLOT] + part, own[COUNT] - begin
    _attend_part(
        coded_table(own, passes, head, begin, begin, left, left),
        Weights(weights.line, weights.places[head, rows], weights.counts[rows]),
        SpanTable(spans.peaks[head], spans.totals[head], spans.rows[rows], spans.first[rows]),
        limits[head, rows],
        own[SHIFT],
        part * own[EACH],
        (part + 1) * own[EACH],
        result,
        Parts(parts.outs[head, slot], parts.peaks[head, slot], parts.totals[head, slot]),
    )


@njit()
def _attend_part(
    values: CodedTable,
    weights: Weights,
    spans: SpanTable,
    limits: F4,
    shift: int,
    first: int,
    end: int,
    result: int,
    part: Parts,
) -> None:  # pragma: no cover - compiled
    """Sums of weighted values [R, d] of one head's first keys, the weights' peaks and their totals.

    weights: of a row those in columns of spans first..end-1, as far as it has any; beyond the longest row there is
    nothing. limits: see `find_limit`. result: number of the first row of results among those of the spans.
    """
    rows, dim, groups, bits = weights.places.shape[0], part.outs.shape[1], values.scales.shape[1], values.bits
    width = dim // groups
    vectors = (width + LANES - 1) // LANES
    raw = np.empty((1, values.codes.shape[1]), np.uint32)
    packed = at_cache_line(BLOCK // 4, (dim + 2 * LANES - 1) // LANES * LANES).view(np.uint32)
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
    peaks, totals = np.empty(rows, np.float32), np.zeros(rows, np.float32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    longest = largest_count(weights.counts)
    _find_peaks(weights.counts, spans, shift, first, end, peaks)
    begin_at = max(0, first * SPAN - shift)
    # Blocks begin at multiples of BLOCK positions, so weights that begin at a cache line go on to.
    for block in range((shift + begin_at) // BLOCK, (min(end * SPAN, shift + longest) + BLOCK - 1) // BLOCK):
        low = max(block * BLOCK - shift, begin_at)
        keys = min((block + 1) * BLOCK - shift, longest) - low
        if low == begin_at or (shift + low) % SPAN == 0:
            span = (shift + low) // SPAN
            for r in range(rows):
                inside = low < weights.counts[r]
                peak = spans.peaks[spans.rows[r], spans.first[r] + span] if inside else -np.inf
                factors[r] = np.exp(peak - peaks[r]) if peak > -np.inf else 0
                least[r] = np.exp(limits[r] - peak) if peak > -np.inf else np.inf
        some_rows = choose_rows(weights, low, keys, least, chosen)
        if some_rows == 0:
            continue
        widen_groups(values.scales, low - begin_at, keys, halves, line, scale)
        widen_groups(values.offsets, low - begin_at, keys, halves, line, offset)
        for g in range(groups):
            add_weighted(middle, scale, g, 0, offset, g, 0, BLOCK // LANES)
        pack_values(values.codes, low - begin_at, keys, bits, raw, packed)
        for begin in range(0, some_rows, _ROWS_AT_ONCE):
            some = min(_ROWS_AT_ONCE, some_rows - begin)
            _fold_rows(
                weights,
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
        row = spans.rows[r] - result
        part.peaks[row], part.totals[row] = peaks[r], totals[r]
        for g in range(groups):
            for i in range(width):
                part.outs[row, g * width + i] = gathered[r * groups + g, i]


@njit(_nrt=False)
def _find_peaks(
    counts: I8, spans: SpanTable, shift: int, first: int, end: int, peaks: F4
) -> None:  # pragma: no cover - compiled
    """The largest peak of spans first..end-1 of every row, as far as it has any."""
    for r in range(counts.shape[0]):
        peaks[r] = -np.inf
        for span in range(first, min(end, (shift + counts[r] + SPAN - 1) // SPAN)):
            peaks[r] = max(peaks[r], spans.peaks[spans.rows[r], spans.first[r] + span])


@njit(_nrt=False)
def _fold_rows(
    weights: Weights,
    low: int,
    keys: int,
    chosen: I8,
    few: F4,
    columns: I8,
    scale: F4,
    centre: F4,
    middle: np.float32,
    folded: F4,
    rounded: I1,
    units: F4,
    shifts: F4,
    added: F4,
) -> None:  # pragma: no cover - compiled
    """Rounds weights of `keys` keys from column low on, of chosen rows, and adds them up.

    For every group of channels. few: scratch for rows that end before the block does.
    """
    last = chosen.shape[0] - 1
    for r in range(0, last + 1, FOLDED):
        whole = keys == BLOCK
        for i in range(FOLDED):
            row = chosen[min(r + i, last)]
            columns[0, i] = weights.places[row] + low
            whole = whole and weights.counts[row] - low >= BLOCK
        if not whole:
            few[:] = 0
            for i in range(FOLDED):
                for x in range(min(keys, weights.counts[chosen[min(r + i, last)]] - low)):
                    few[0, i * BLOCK + x] = weights.line[0, columns[0, i] + x]
                columns[0, i] = i * BLOCK
        for g in range(scale.shape[0]):
            place = g * _ROWS_AT_ONCE + r
            numbers = weights.line if whole else few
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


@njit()
def merge_some(task: int, found: Parts, out: F4, lse: F4, first: int) -> None:  # pragma: no cover - compiled
    """Merges the parts of all rows, the first of which is row `first` of the out. Those with peak -inf hold nothing."""
    outs, peaks, totals = found.outs, found.peaks, found.totals
    _, parts, rows, _ = outs.shape
    head, r = task // rows, task % rows
    peak = peaks[head, 0, r]
    for part in range(parts):
        peak = max(peak, peaks[head, part, r])
    if peak == -np.inf:
        return  # nothing was attended: the state is that already
    line, total = out[head, first + r], np.float32(0)
    for part in range(parts):
        if peaks[head, part, r] > -np.inf:
            total += np.exp(peaks[head, part, r] - peak) * totals[head, part, r]
    if total == 0:
        return  # all that counted is attended elsewhere
    for part in range(parts):
        if peaks[head, part, r] > -np.inf:
            share = np.exp(peaks[head, part, r] - peak)
            for i in range(line.shape[0]):
                line[i] += share * outs[head, part, r, i]
    for i in range(line.shape[0]):
        line[i] /= total
    lse[head, first + r] = peak + np.log(total)
