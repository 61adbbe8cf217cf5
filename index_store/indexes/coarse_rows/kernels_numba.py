"""The step over the coarse copy on a host: logits of all keys, and attention to the values of those that are left.

Both products are of 8-bit integers. A row of queries is folded with a block's scales and rounded with one unit for the
block; a row's weights are folded with the values' scales and rounded with one unit for 128 keys. A unit is the 127th
part of the largest magnitude, so a logit is off by at most d * (2^bits - 1) / 4 units, about a seventh of what coding
itself does at 4 bits; codes count from their middle, which halves it. A row's result depends neither on the rows
beside it nor on the number of threads.

Shape legend: H KV heads, N keys, B blocks of 128 keys, J bytes of a row of codes, R rows of queries, X scored keys, g
groups of a value's channels, d head dim, P parts of the keys.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.exponentials_numba import exponentiate, largest
from index_store.attention.rows_in_line import RowsInLine
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import fold, make_scaling, make_widening, round_row
from index_store.indexes.coarse_rows.packed_codes_numba import ROWS, multiply, pack_keys, pack_values
from index_store.indexes.coarse_rows.scalar_rows import BLOCK, ScalarRows
from index_store.launch import launch, njit, prange

_SCORED_AT_ONCE = 64  # keys, so that what is unpacked stays in the first-level cache
_BLOCKS_PER_TASK = 16
_ROWS_AT_ONCE = 16
_MOST_PARTS = 16
_widen_halves = make_widening("float16")
_write_scaled, _add_scaled = make_scaling(add=False), make_scaling(add=True)
_MOST_ROWS = 256  # of one launch of the attention, whose parts' outputs are all in memory


def score_keys(rows: ScalarRows, queries_HRD: Tensor, first: int, out: RowsInLine) -> None:
    """Writes the products of queries [H, R, d] float32 with keys: of rows `first`.., as many as a row of out has."""
    if not out.counts_R.any():
        return
    launch(
        _score_keys,
        *row_table(rows.key_codes_HNC),
        *half_table(rows.key_scales_HBD),
        *half_table(rows.key_offsets_HBD),
        rows.key_bits,
        rows.lead,
        queries_HRD.contiguous().numpy(),
        first,
        first + int(out.counts_R.max()),
        out.numbers,
        out.places_HR,
        out.counts_R,
    )


def attend_values(rows: ScalarRows, logits: RowsInLine, first: int) -> AttentionState:
    """Attention by logits to the values of rows `first`.., as many as a row of logits has; -inf marks what counts not.

    How keys are divided into parts depends on the coded rows alone. Returns out [H, R, d] and lse [H, R], float32; 0
    and -inf where nothing counts.
    """
    heads, queries = logits.places_HR.shape
    count = rows.count - first
    span = BLOCK * max(_BLOCKS_PER_TASK, -(-count // (BLOCK * _MOST_PARTS)))
    parts = -(-int(logits.counts_R.max(initial=0)) // span)
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
        places, counts = np.ascontiguousarray(logits.places_HR[:, some]), logits.counts_R[some]
        shape = (heads, parts, len(counts))
        outs = torch.empty(*shape, rows.head_dim, device="cpu")
        peaks, totals = (torch.empty(shape, device="cpu") for _ in range(2))
        partial = (outs.numpy(), peaks.numpy(), totals.numpy())
        launch(_attend_parts, *values, logits.numbers, places, counts, first, span, *partial)
        launch(_merge_parts, *partial, state.out.numpy(), state.lse.numpy(), begin)
    return state


def row_table(rows_HNC: Tensor) -> tuple[NDArray[np.generic], int]:
    """All heads' rows as one contiguous table, and how many of its rows lie between the first ones of two heads.

    So loops are compiled once, whether or not there is room behind the rows of a head.
    """
    heads, count, width = rows_HNC.shape
    if rows_HNC.stride()[1:] != (width, 1) or rows_HNC.stride(0) % width:
        rows_HNC = rows_HNC.contiguous()
    stride = rows_HNC.stride(0) // width if heads > 1 else count
    size = ((heads - 1) * stride + count, width)
    return rows_HNC.as_strided(size, (width, 1), rows_HNC.storage_offset()).numpy(), stride


def half_table(rows_HNC: Tensor) -> tuple[NDArray[np.generic], int]:
    """`row_table` of float16, as the words that compiled loops can read."""
    return row_table(rows_HNC.view(torch.int16))


@njit(cache=True, nogil=True, parallel=True)
def _score_keys(
    codes: NDArray[np.uint8],
    codes_stride: int,
    scales: NDArray[np.int16],
    scales_stride: int,
    offsets: NDArray[np.int16],
    offsets_stride: int,
    bits: int,
    lead: int,
    queries: NDArray[np.float32],
    first: int,
    end: int,
    out: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled
    heads = queries.shape[0]
    keys = _BLOCKS_PER_TASK * BLOCK
    skipped = (lead + first) // keys
    tasks = (lead + end - 1) // keys + 1 - skipped
    for task in prange(heads * tasks):
        head, span = task // tasks, skipped + task % tasks
        begin, stop = max(first, span * keys - lead), min(end, (span + 1) * keys - lead)
        _score_span(
            codes[head * codes_stride :],
            scales[head * scales_stride :],
            offsets[head * offsets_stride :],
            bits,
            lead,
            queries[head],
            begin,
            stop,
            out,
            places[head],
            counts,
            first,
        )


@njit(cache=True, nogil=True)
def _score_span(
    codes: NDArray[np.uint8],
    scales: NDArray[np.int16],
    offsets: NDArray[np.int16],
    bits: int,
    lead: int,
    queries: NDArray[np.float32],
    first: int,
    end: int,
    out: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    origin: int,
) -> None:  # pragma: no cover - compiled
    """Logits of one head's keys first..end-1; those of a row of queries have the place of key `origin`."""
    rows, dim = queries.shape
    width = (dim + LANES - 1) // LANES * LANES
    padded = np.zeros((rows, width), np.float32)
    for r in range(rows):
        for i in range(dim):
            padded[r, i] = queries[r, i]
    weights = np.zeros((rows + ROWS, width), np.int8)
    units, shifts = np.empty(rows, np.float32), np.empty(rows, np.float32)
    scratch, halves = np.zeros((1, width), np.float32), np.zeros((1, LANES), np.int16)
    scale, offset = np.zeros((1, width), np.float32), np.zeros((1, width), np.float32)
    raw = np.empty((max(1, codes.shape[1] // 4), _SCORED_AT_ONCE), np.uint32)
    packed = np.empty((dim // 4, _SCORED_AT_ONCE), np.uint32)
    sums = np.empty((_ROWS_AT_ONCE, _SCORED_AT_ONCE), np.int32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    line = out.reshape(1, out.size)
    low = first
    while low < end:
        block = (lead + low) // BLOCK
        high = min(end, (block + 1) * BLOCK - lead)
        _widen(scales, block, dim, halves, scale)
        _widen(offsets, block, dim, halves, offset)
        for r in range(rows):
            units[r], shifts[r] = _fold_and_round(
                padded, r, scale, offset, 0, middle, scratch, weights, r, width // LANES
            )
        for part in range(low, high, _SCORED_AT_ONCE):
            count = min(_SCORED_AT_ONCE, high - part)
            pack_keys(codes, part, count, bits, raw, packed)
            for begin in range(0, rows, _ROWS_AT_ONCE):
                some = min(_ROWS_AT_ONCE, rows - begin)
                multiply(packed, 0, count, weights, begin, some, dim // 4, sums)
                for r in range(some):
                    unit, shift = units[begin + r], shifts[begin + r]
                    wanted = max(0, min(count, counts[begin + r] - (part - origin)))
                    place = places[begin + r] + part - origin
                    whole = wanted // LANES
                    _write_scaled(sums, r, 0, unit, shift, line, 0, place, whole)
                    if whole * LANES < wanted:
                        _write_scaled(sums, r, whole * LANES, unit, shift, scratch, 0, 0, 1)
                        for x in range(whole * LANES, wanted):
                            line[0, place + x] = scratch[0, x - whole * LANES]
        low = high


@njit(cache=True, nogil=True, _nrt=False)
def _widen(
    halves: NDArray[np.int16],
    row: int,
    count: int,
    scratch: NDArray[np.int16],
    floats: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """floats[0, :count] = the finite float16 numbers from halves[row, 0] on, which may go on in the rows that follow.

    scratch: [1, LANES]. Beyond count, up to a multiple of LANES, floats are undefined, but finite.
    """
    vectors, width = count // LANES, halves.shape[1]
    _widen_halves(halves, row, 0, floats, 0, 0, vectors)
    if vectors * LANES < count:
        for i in range(vectors * LANES, count):
            scratch[0, i - vectors * LANES] = halves[row + i // width, i % width]
        _widen_halves(scratch, 0, 0, floats, 0, vectors * LANES, 1)


@njit(cache=True, nogil=True, _nrt=False)
def _widen_groups(
    halves: NDArray[np.int16],
    row: int,
    count: int,
    scratch: NDArray[np.int16],
    line: NDArray[np.float32],
    floats: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """floats[g, n] = the finite float16 number halves[row + n, g]. line: scratch, [1, as many in all]."""
    groups = halves.shape[1]
    if groups == 1:
        _widen(halves, row, count, scratch, floats)
        return
    _widen(halves, row, count * groups, scratch, line)
    for n in range(count):
        for g in range(groups):
            floats[g, n] = line[0, n * groups + g]


@njit(cache=True, nogil=True, _nrt=False)
def _fold_and_round(
    numbers: NDArray[np.float32],
    row: int,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    group: int,
    middle: np.float32,
    scratch: NDArray[np.float32],
    rounded: NDArray[np.int8],
    to_row: int,
    vectors: int,
) -> tuple[np.float32, np.float32]:  # pragma: no cover - compiled
    """Rounds a row of numbers * scale to multiples of the 127th part of its largest magnitude.

    Returns that unit and a shift: unit * (multiples . codes) + shift is the product of the numbers and what the codes
    stand for. scratch: [1, as many numbers].
    """
    shift, peak = fold(numbers, row, scale, offset, group, middle, scratch, vectors)
    factor = np.float32(127) / peak if peak > np.float32(1e-30) else np.float32(0)
    total = round_row(scratch, factor, rounded, to_row, vectors)
    unit = peak / np.float32(127)
    return unit, shift - unit * middle * np.float32(total)


@njit(cache=True, nogil=True, parallel=True)
def _attend_parts(
    codes: NDArray[np.uint8],
    codes_stride: int,
    scales: NDArray[np.int16],
    scales_stride: int,
    offsets: NDArray[np.int16],
    offsets_stride: int,
    bits: int,
    logits: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    first: int,
    span: int,
    outs: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    heads, parts = outs.shape[:2]
    for task in prange(heads * parts):
        head, part = task // parts, task % parts
        begin = first + part * span
        _attend_part(
            codes[head * codes_stride + begin :],
            scales[head * scales_stride + begin :],
            offsets[head * offsets_stride + begin :],
            bits,
            logits,
            places[head],
            counts,
            part * span,
            (part + 1) * span,
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
    logits: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    first: int,
    end: int,
    out: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Sums of weighted values [R, d] of one head's first keys, the weights' peaks and their totals.

    logits: of a row those of the keys in columns first..end-1 behind its place, as far as it has any; beyond the
    longest row there is nothing.
    """
    rows, dim, groups = places.shape[0], out.shape[1], scales.shape[1]
    width = dim // groups
    vectors = (width + LANES - 1) // LANES
    raw = np.empty((1, codes.shape[1]), np.uint32)
    packed = np.empty((BLOCK // 4, dim + LANES), np.uint32)
    line_of = logits.reshape(1, logits.size)
    halves, line = np.zeros((1, LANES), np.int16), np.zeros((1, BLOCK * groups), np.float32)
    scale, offset = np.zeros((groups, BLOCK), np.float32), np.zeros((groups, BLOCK), np.float32)
    exponentials, scratch = np.zeros((1, BLOCK), np.float32), np.empty((1, LANES), np.float32)
    folded = np.empty((1, BLOCK), np.float32)
    weights = np.zeros((groups * _ROWS_AT_ONCE, BLOCK), np.int8)
    units, shifts = np.empty(groups * _ROWS_AT_ONCE, np.float32), np.empty(groups * _ROWS_AT_ONCE, np.float32)
    sums = np.empty((_ROWS_AT_ONCE, width + LANES), np.int32)
    gathered = np.zeros((rows * groups, vectors * LANES), np.float32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    totals[:] = 0
    longest = 0
    for r in range(rows):
        longest = max(longest, counts[r])
    end = min(end, longest)
    for r in range(rows):
        stop = min(end, counts[r])
        peaks[r] = largest(line_of, 0, places[r] + first, places[r] + stop) if stop > first else -np.inf
    for low in range(first, end, BLOCK):
        keys = min(BLOCK, end - low)
        _widen_groups(scales, low - first, keys, halves, line, scale)
        _widen_groups(offsets, low - first, keys, halves, line, offset)
        pack_values(codes, low - first, keys, bits, raw, packed)
        for begin in range(0, rows, _ROWS_AT_ONCE):
            some = min(_ROWS_AT_ONCE, rows - begin)
            for r in range(some):
                base = peaks[begin + r] if peaks[begin + r] > -np.inf else np.float32(0)
                own = max(0, min(keys, counts[begin + r] - low))
                place = places[begin + r] + low
                totals[begin + r] += exponentiate(line_of, 0, place, own, base, scratch, exponentials)
                exponentials[0, own:] = 0
                for g in range(groups):
                    place = g * _ROWS_AT_ONCE + r
                    units[place], shifts[place] = _fold_and_round(
                        exponentials, 0, scale, offset, g, middle, folded, weights, place, BLOCK // LANES
                    )
            for g in range(groups):
                multiply(packed, g * width, width, weights, g * _ROWS_AT_ONCE, some, (keys + 3) // 4, sums)
                for r in range(some):
                    unit, shift = units[g * _ROWS_AT_ONCE + r], shifts[g * _ROWS_AT_ONCE + r]
                    _add_scaled(sums, r, 0, unit, shift, gathered, (begin + r) * groups + g, 0, vectors)
    for r in range(rows):
        for g in range(groups):
            out[r, g * width : (g + 1) * width] = gathered[r * groups + g, :width]


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
            share = np.exp(peaks[head, part, r] - peak)
            total += share * totals[head, part, r]
            for i in range(line.shape[0]):
                line[i] += share * outs[head, part, r, i]
        for i in range(line.shape[0]):
            line[i] /= total
        lse[head, first + r] = peak + np.log(total)
