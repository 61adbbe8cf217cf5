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
from index_store.indexes.coarse_rows.packed_codes_numba import ROWS, ask_for, multiply, pack_keys, pack_values
from index_store.indexes.coarse_rows.rounding_numba import fold, read_halves, round_to_unit
from index_store.indexes.coarse_rows.scalar_rows import BLOCK, ScalarRows
from index_store.indexes.coarse_rows.vectors_numba import LANES
from index_store.launch import launch, njit, prange

_SCORED_AT_ONCE = 64  # keys, so that what is unpacked stays in the first-level cache
_BLOCKS_PER_TASK = 16
_ROWS_AT_ONCE = 16
_MOST_PARTS = 16
_MOST_ROWS = 256  # of one launch of the attention, whose parts' outputs are all in memory


def score_keys(rows: ScalarRows, queries_HRD: Tensor, first: int, out: RowsInLine) -> None:
    """Writes the products of queries [H, R, d] float32 with keys: of rows `first`.., as many as a row of out has."""
    if not out.counts_R.any():
        return
    launch(
        _score_keys,
        *_table(rows.key_codes_HNC),
        *_halves(rows.key_scales_HBD),
        *_halves(rows.key_offsets_HBD),
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
        *_table(rows.value_codes_HNC),
        *_halves(rows.value_scales_HNV),
        *_halves(rows.value_offsets_HNV),
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


def _table(rows_HNC: Tensor) -> tuple[NDArray[np.generic], int]:
    """All heads' rows as one contiguous table, and how many of its rows lie between the first ones of two heads.

    So loops are compiled once, whether or not there is room behind the rows of a head.
    """
    heads, count, width = rows_HNC.shape
    if rows_HNC.stride()[1:] != (width, 1) or rows_HNC.stride(0) % width:
        rows_HNC = rows_HNC.contiguous()
    stride = rows_HNC.stride(0) // width if heads > 1 else count
    size = ((heads - 1) * stride + count, width)
    return rows_HNC.as_strided(size, (width, 1), rows_HNC.storage_offset()).numpy(), stride


def _halves(rows_HNC: Tensor) -> tuple[NDArray[np.generic], int]:
    """`_table` of float16, as the words that compiled loops can read."""
    return _table(rows_HNC.view(torch.int16))


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
    weights = np.zeros((rows + ROWS, dim), np.int8)
    units, shifts = np.empty(rows, np.float32), np.empty(rows, np.float32)
    words, folded = np.empty(dim, np.uint32), np.empty(dim, np.float32)
    scale, offset = np.empty((1, dim), np.float32), np.empty((1, dim), np.float32)
    raw = np.empty((max(1, codes.shape[1] // 4), _SCORED_AT_ONCE), np.uint32)
    packed = np.empty((dim // 4, _SCORED_AT_ONCE), np.uint32)
    sums = np.empty((_ROWS_AT_ONCE, _SCORED_AT_ONCE), np.int32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    low = first
    while low < end:
        block = (lead + low) // BLOCK
        high = min(end, (block + 1) * BLOCK - lead)
        read_halves(scales[block].reshape(dim, 1), words, scale)
        read_halves(offsets[block].reshape(dim, 1), words, offset)
        for r in range(rows):
            shift = fold(queries, r, dim, scale, offset, 0, middle, folded)
            unit, total = round_to_unit(folded, weights, r)
            units[r], shifts[r] = unit, shift - unit * middle * np.float32(total)
        for part in range(low, high, _SCORED_AT_ONCE):
            count = min(_SCORED_AT_ONCE, high - part)
            pack_keys(codes, part, count, bits, raw, packed)
            ask_for(codes, part + count, _SCORED_AT_ONCE)
            for begin in range(0, rows, _ROWS_AT_ONCE):
                some = min(_ROWS_AT_ONCE, rows - begin)
                multiply(packed, 0, count, weights, begin, some, dim // 4, sums)
                for r in range(some):
                    unit, shift = units[begin + r], shifts[begin + r]
                    wanted = min(count, counts[begin + r] - (part - origin))
                    place = places[begin + r] + part - origin
                    line = out[place : place + max(0, wanted)]
                    for x in range(line.shape[0]):
                        line[x] = unit * np.float32(sums[r, x]) + shift
        low = high


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
            min((part + 1) * span, counts.max()),
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

    logits: of a row those of the keys in columns first..end-1 behind its place, as far as it has any.
    """
    rows, dim, groups = places.shape[0], out.shape[1], scales.shape[1]
    width = dim // groups
    raw = np.empty((1, codes.shape[1]), np.uint32)
    packed = np.empty((BLOCK // 4, dim + LANES), np.uint32)
    words = np.empty(BLOCK * groups, np.uint32)
    scale, offset = np.empty((groups, BLOCK), np.float32), np.empty((groups, BLOCK), np.float32)
    line_of = logits.reshape(1, logits.size)
    exponentials, exponents = np.empty((1, BLOCK), np.float32), np.empty(BLOCK, np.int32)
    folded = np.empty(BLOCK, np.float32)
    weights = np.zeros((groups * _ROWS_AT_ONCE, BLOCK), np.int8)
    units, shifts = np.empty(groups * _ROWS_AT_ONCE, np.float32), np.empty(groups * _ROWS_AT_ONCE, np.float32)
    sums = np.empty((_ROWS_AT_ONCE, width + LANES), np.int32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    out[:] = 0
    totals[:] = 0
    for r in range(rows):
        stop = min(end, counts[r])
        peaks[r] = largest(line_of, 0, places[r] + first, places[r] + stop) if stop > first else -np.inf
    for low in range(first, end, BLOCK):
        keys = min(BLOCK, end - low)
        read_halves(scales[low - first : low - first + keys], words, scale)
        read_halves(offsets[low - first : low - first + keys], words, offset)
        pack_values(codes, low - first, keys, bits, raw, packed)
        ask_for(codes, low - first + keys, BLOCK)
        for begin in range(0, rows, _ROWS_AT_ONCE):
            some = min(_ROWS_AT_ONCE, rows - begin)
            for r in range(some):
                base = peaks[begin + r] if peaks[begin + r] > -np.inf else np.float32(0)
                own = max(0, min(keys, counts[begin + r] - low))
                place = places[begin + r] + low
                totals[begin + r] += exponentiate(line_of, 0, place, own, base, exponents, exponentials)
                folded[own:] = 0
                for g in range(groups):
                    place = g * _ROWS_AT_ONCE + r
                    shift = fold(exponentials, 0, own, scale, offset, g, middle, folded)
                    unit, total = round_to_unit(folded, weights, place)
                    units[place], shifts[place] = unit, shift - unit * middle * np.float32(total)
            for g in range(groups):
                multiply(packed, g * width, width, weights, g * _ROWS_AT_ONCE, some, (keys + 3) // 4, sums)
                for r in range(some):
                    unit, shift = units[g * _ROWS_AT_ONCE + r], shifts[g * _ROWS_AT_ONCE + r]
                    line = out[begin + r, g * width : (g + 1) * width]
                    for c in range(width):
                        line[c] += unit * np.float32(sums[r, c]) + shift


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
