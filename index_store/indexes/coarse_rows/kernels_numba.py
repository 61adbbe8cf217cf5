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
from index_store.indexes.coarse_rows.packed_codes_numba import ROWS, ask_for, multiply, pack_keys, pack_values
from index_store.indexes.coarse_rows.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.rounding_numba import fold, read_halves, round_to_unit
from index_store.indexes.coarse_rows.scalar_rows import BLOCK, ScalarRows
from index_store.indexes.coarse_rows.vectors_numba import LANES
from index_store.launch import launch, njit, on_host, prange

_SCORED_AT_ONCE = 64  # keys, so that what is unpacked stays in the first-level cache
_BLOCKS_PER_TASK = 16
_ROWS_AT_ONCE = 16
_MOST_PARTS = 16
_MOST_ROWS = 256  # of one launch of the attention, whose parts' outputs are all in memory


def score_keys(rows: ScalarRows, queries_HRD: Tensor, first: int, end: int, out_HRX: Tensor) -> None:
    """Writes the products of queries [H, R, d] float32 with the keys of rows first..end-1, [H, R, end - first] float32.

    out_HRX may be columns of a larger contiguous tensor.
    """
    if not on_host(rows.key_codes_HNC):
        score_keys_reference(rows, queries_HRD, first, end, out_HRX)
        return
    if out_HRX.numel() == 0:
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
        end,
        *_lines(out_HRX),
    )


def attend_values(rows: ScalarRows, logits_HRX: Tensor, first: int) -> AttentionState:
    """Attention by logits [H, R, X] float32 to the values of rows first..first+X-1; -inf marks what does not count.

    Returns out [H, R, d] and lse [H, R], float32; 0 and -inf where nothing counts.
    """
    if not on_host(rows.value_codes_HNC):
        return attend_values_reference(rows, logits_HRX, first)
    heads, queries, count = logits_HRX.shape
    state = AttentionState.empty((heads, queries), rows.head_dim)
    if logits_HRX.numel() == 0:
        return state
    span = BLOCK * max(_BLOCKS_PER_TASK, -(-count // (BLOCK * _MOST_PARTS)))
    values = (
        *_table(rows.value_codes_HNC),
        *_halves(rows.value_scales_HNV),
        *_halves(rows.value_offsets_HNV),
        rows.value_bits,
    )
    for begin in range(0, queries, _MOST_ROWS):
        logits = logits_HRX[:, begin : begin + _MOST_ROWS].contiguous()
        shape = (heads, -(-count // span), logits.shape[1])
        outs = logits.new_empty(*shape, rows.head_dim)
        peaks, totals = (logits.new_empty(shape) for _ in range(2))
        partial = (outs.numpy(), peaks.numpy(), totals.numpy())
        out = logits.new_zeros(heads, shape[2], rows.head_dim)
        lse = logits.new_full((heads, shape[2]), -torch.inf)
        launch(_attend_parts, *values, logits.numpy(), first, span, *partial)
        launch(_merge_parts, *partial, out.numpy(), lse.numpy())
        state.out[:, begin : begin + _MOST_ROWS] = out
        state.lse[:, begin : begin + _MOST_ROWS] = lse
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


def _lines(out_HRX: Tensor) -> tuple[NDArray[np.float32], int]:
    """All heads' rows in one line of numbers, and how many of them lie between the first ones of two rows.

    Raises ValueError for rows that are not evenly spaced.
    """
    heads, rows, count = out_HRX.shape
    stride = out_HRX.stride(1) if rows > 1 else (out_HRX.stride(0) if heads > 1 else count)
    if out_HRX.stride(2) != 1 or (heads > 1 and out_HRX.stride(0) != rows * stride):
        raise ValueError(f"rows are {out_HRX.stride()} apart, expected columns of a contiguous tensor")
    size = (heads * rows - 1) * stride + count
    return out_HRX.as_strided((size,), (1,), out_HRX.storage_offset()).numpy(), stride


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
    out_stride: int,
) -> None:  # pragma: no cover - compiled
    heads, rows, _ = queries.shape
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
            out[head * rows * out_stride + begin - first :],
            out_stride,
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
    out_stride: int,
) -> None:  # pragma: no cover - compiled
    """Logits of one head's keys first..end-1, a row of queries every `out_stride` numbers."""
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
                    place, unit, shift = (
                        (begin + r) * out_stride + part - first,
                        units[begin + r],
                        shifts[begin + r],
                    )
                    line = out[place : place + count]
                    for x in range(count):
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
            logits[head],
            part * span,
            min((part + 1) * span, logits.shape[2]),
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
    first: int,
    end: int,
    out: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Sums of weighted values [R, d] of one head's first keys, the weights' peaks and their totals.

    logits: [R, .], those of the keys in columns first..end-1.
    """
    rows, dim, groups = logits.shape[0], out.shape[1], scales.shape[1]
    width = dim // groups
    raw = np.empty((1, codes.shape[1]), np.uint32)
    packed = np.empty((BLOCK // 4, dim + LANES), np.uint32)
    words = np.empty(BLOCK * groups, np.uint32)
    scale, offset = np.empty((groups, BLOCK), np.float32), np.empty((groups, BLOCK), np.float32)
    exponentials, exponents = np.empty((1, BLOCK), np.float32), np.empty(BLOCK, np.int32)
    folded = np.empty(BLOCK, np.float32)
    weights = np.zeros((groups * _ROWS_AT_ONCE, BLOCK), np.int8)
    units, shifts = np.empty(groups * _ROWS_AT_ONCE, np.float32), np.empty(groups * _ROWS_AT_ONCE, np.float32)
    sums = np.empty((_ROWS_AT_ONCE, width + LANES), np.int32)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    out[:] = 0
    totals[:] = 0
    for r in range(rows):
        peaks[r] = largest(logits, r, first, end)
    for low in range(first, end, BLOCK):
        keys = min(BLOCK, end - low)
        read_halves(scales[low - first : low - first + keys], words, scale)
        read_halves(offsets[low - first : low - first + keys], words, offset)
        pack_values(codes, low - first, keys, bits, raw, packed)
        ask_for(codes, low - first + keys, BLOCK)
        folded[keys:] = 0
        for begin in range(0, rows, _ROWS_AT_ONCE):
            some = min(_ROWS_AT_ONCE, rows - begin)
            for r in range(some):
                base = peaks[begin + r] if peaks[begin + r] > -np.inf else np.float32(0)
                totals[begin + r] += exponentiate(logits, begin + r, low, keys, base, exponents, exponentials)
                for g in range(groups):
                    place = g * _ROWS_AT_ONCE + r
                    shift = fold(exponentials, 0, keys, scale, offset, g, middle, folded)
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
) -> None:  # pragma: no cover - compiled
    heads, parts, rows, _ = outs.shape
    for task in prange(heads * rows):
        head, r = task // rows, task % rows
        peak = peaks[head, 0, r]
        for part in range(parts):
            peak = max(peak, peaks[head, part, r])
        if peak == -np.inf:
            continue  # nothing was attended: the state is that already
        line, total = out[head, r], np.float32(0)
        for part in range(parts):
            share = np.exp(peaks[head, part, r] - peak)
            total += share * totals[head, part, r]
            for i in range(line.shape[0]):
                line[i] += share * outs[head, part, r, i]
        for i in range(line.shape[0]):
            line[i] /= total
        lse[head, r] = peak + np.log(total)
