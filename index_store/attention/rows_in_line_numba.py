"""Rows of numbers in one line of memory: their exponentials, and attention weights pooled over heads.

Shape legend: H KV heads, T query positions, G group heads, M keys, Q = H*T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import add_weighted, exponentials, highest
from index_store.compiled.launch import F4, I8, launch, njit, on_host, spread


@dataclass(frozen=True, slots=True)
class RowsInLine:
    """Rows of numbers in one line of them: row r of head h has counts_R[r] of them from places_HR[h, r] on.

    numbers: float32. places_HR, counts_R: int64.
    """

    numbers: F4
    places_HR: I8
    counts_R: I8

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> RowsInLine:
        """The rows [H, R, X] of tensors in one piece of memory, each with a number of rows and columns of its own.

        Raises ValueError for tensors of several, and for rows whose numbers are not neighbours.
        """
        pieces = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if len(pieces) != 1 or any(tensor.stride(2) != 1 and tensor.shape[2] > 1 for tensor in tensors):
            strides = [tensor.stride() for tensor in tensors]
            raise ValueError(
                f"rows are {strides} apart in {len(pieces)} pieces of memory, expected rows in one"
            )
        numbers = [(tensor.storage_offset(), *tensor.stride()[:2], *tensor.shape[1:]) for tensor in tensors]
        first, head_stride, stride, rows, count = np.array(numbers, np.int64).T
        first, head_stride, stride, counts = (
            np.repeat(each, rows) for each in (first, head_stride, stride, count)
        )
        row = np.arange(len(counts)) - np.repeat(rows.cumsum() - rows, rows)
        places = first + stride * row + np.arange(len(tensors[0]))[:, None] * head_stride
        whole = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
        line = tensors[0].as_strided((whole,), (1,), 0)
        return cls(line.numpy(), places, counts)


def rows_in_line(rows_HNJ: Tensor) -> Tensor:
    """The rows, each head's one behind the other, and heads whole rows apart: a copy where they are not."""
    width = rows_HNJ.shape[2]
    fits = rows_HNJ.stride()[1:] == (width, 1) and rows_HNJ.stride(0) % width == 0
    return rows_HNJ if fits else rows_HNJ.contiguous()


def row_table(rows_HNJ: Tensor) -> tuple[NDArray[np.generic], int]:
    """All heads' rows as one contiguous table, and how many of its rows lie between the first ones of two heads.

    So loops are compiled once, whether or not there is room behind the rows of a head.
    """
    heads, count, width = rows_HNJ.shape
    rows_HNJ = rows_in_line(rows_HNJ)
    stride = rows_HNJ.stride(0) // width if heads > 1 else count
    size = ((heads - 1) * stride + count, width)
    return rows_HNJ.as_strided(size, (width, 1), rows_HNJ.storage_offset()).numpy(), stride


@njit(_nrt=False)
def largest(numbers: F4, row: int, first: int, end: int) -> np.float32:
    """The maximum; -inf of nothing."""
    vectors = (end - first) // LANES
    most = highest(numbers, row, first, vectors)
    for i in range(first + vectors * LANES, end):
        most = max(most, numbers[row, i])
    return most  # type: ignore[no-any-return]


@njit(_nrt=False)
def exponentiate(
    logits: F4, row: int, first: int, count: int, base: np.float32, scratch: F4, out: F4
) -> np.float32:
    """out[0] = exp(logits - base) for logits up to base, and 0 below 2^-125; returns their sum.

    Relative error 4e-6 at most, 1e-6 down to 2^-20. scratch: [1, LANES]. out: [., count rounded up to a multiple of
    LANES]; what is beyond count becomes 0.
    """
    vectors = count // LANES
    total = exponentials(logits, row, first, base, out, 0, 0, vectors)
    if vectors * LANES < count:
        scratch[:] = -np.inf
        for i in range(vectors * LANES, count):
            scratch[0, i - vectors * LANES] = logits[row, first + i]
        total += exponentials(scratch, 0, 0, base, out, 0, vectors * LANES, 1)
    return total  # type: ignore[no-any-return]


@njit(_nrt=False)
def exponentiate_in_place(
    numbers: F4, row: int, first: int, count: int, base: np.float32, scratch: F4
) -> np.float32:
    """`exponentiate` of numbers[row, first..first+count-1], which are replaced, and no others."""
    vectors = count // LANES
    total = exponentials(numbers, row, first, base, numbers, row, first, vectors)
    begin = first + vectors * LANES
    if vectors * LANES < count:
        scratch[:] = -np.inf
        for i in range(begin, first + count):
            scratch[0, i - begin] = numbers[row, i]
        total += exponentials(scratch, 0, 0, base, scratch, 0, 0, 1)
        for i in range(begin, first + count):
            numbers[row, i] = scratch[0, i - begin]
    return total  # type: ignore[no-any-return]


_TILE = 8192
_PIECE = 1024  # logits that are in the first-level cache while all heads are added up


def pooled_weights(logits_HTGM: Tensor) -> Tensor:
    """[H, T, M] float32: the softmax of logits over M, summed over G; -inf where all of a key's logits are.

    Two passes over the logits, and no copy of them.
    """
    if not on_host(logits_HTGM):
        return pooled_weights_reference(logits_HTGM)
    heads, positions, group, count = logits_HTGM.shape
    out = torch.empty(heads, positions, count, device="cpu")
    if out.numel() and group:
        queries, tiles = heads * positions, -(-count // _TILE)
        rows, own = RowsInLine.of([logits_HTGM.flatten(1, 2)]), RowsInLine.of([out])
        launch(
            _pooled_weights,
            rows.numbers.reshape(1, -1),
            rows.places_HR.reshape(queries, group),
            np.full(queries, count),
            np.empty((queries, group, tiles), np.float32),
            np.empty((queries, group, tiles), np.float32),
            own.numbers,
            own.places_HR.reshape(queries),
            work=0.15 * logits_HTGM.numel(),
        )
    return out


def pooled_weights_reference(logits_HTGM: Tensor) -> Tensor:
    """The same by torch's softmax, on any device."""
    missing = torch.isneginf(logits_HTGM)
    # A head without any logit has no weights instead of nan.
    weights = logits_HTGM.masked_fill(missing.all(-1, keepdim=True), 0.0).softmax(-1)
    return weights.masked_fill_(missing, 0.0).sum(2).masked_fill_(missing.all(2), -torch.inf)


@njit()
def _sum_tile(task: int, logits: F4, places: I8, counts: I8, peaks: F4, totals: F4, tiles: int) -> None:
    """Peaks of a tile's logits for every head, and the sums of their exponentials."""
    query, tile = task // tiles, task % tiles
    low, high = tile * _TILE, min((tile + 1) * _TILE, counts[query])
    if low >= high:
        return
    scratch, exponentials = np.empty((1, LANES), np.float32), np.empty((1, _PIECE), np.float32)
    for g in range(places.shape[1]):
        place = places[query, g]
        peak, total = largest(logits, 0, place + low, place + high), np.float32(0)
        if peak > -np.inf:
            for begin in range(low, high, _PIECE):
                count = min(_PIECE, high - begin)
                total += exponentiate(logits, 0, place + begin, count, peak, scratch, exponentials)
        peaks[query, g, tile], totals[query, g, tile] = peak, total


@njit()
def _find_lse(row: int, counts: I8, peaks: F4, totals: F4, group: int) -> None:
    query, g = row // group, row % group
    used = (counts[query] + _TILE - 1) // _TILE
    peak, total = np.float32(-np.inf), np.float32(0)
    for tile in range(used):
        peak = max(peak, peaks[query, g, tile])
    for tile in range(used):
        if peak > -np.inf:
            total += totals[query, g, tile] * np.exp(peaks[query, g, tile] - peak)
    # From here on the first peak of a row is its log-sum-exp.
    peaks[query, g, 0] = peak + np.log(total) if peak > -np.inf else np.float32(0)


@njit()
def _pool_tile(
    task: int, logits: F4, places: I8, counts: I8, peaks: F4, out: F4, out_places: I8, tiles: int
) -> None:
    """Weights of a tile's keys, of whose heads the first peak is the log-sum-exp."""
    query, tile = task // tiles, task % tiles
    low, high = tile * _TILE, min((tile + 1) * _TILE, counts[query])
    scratch, exponentials = np.empty((1, LANES), np.float32), np.empty((1, _PIECE), np.float32)
    sums = np.empty((1, _PIECE), np.float32)
    for begin in range(low, high, _PIECE):
        count = min(_PIECE, high - begin)
        vectors = (count + LANES - 1) // LANES
        exponentiate(logits, 0, places[query, 0] + begin, count, peaks[query, 0, 0], scratch, sums)
        for g in range(1, places.shape[1]):
            place = places[query, g] + begin
            exponentiate(logits, 0, place, count, peaks[query, g, 0], scratch, exponentials)
            add_weighted(np.float32(1), exponentials, 0, 0, sums, 0, 0, vectors)
        _put(sums, count, logits, places[query], begin, out, out_places[query] + begin)


@njit("f4x2 i8x2 i8x1 f4x3 f4x3 f4x1 i8x1")
def _pooled_weights(
    logits: F4, places: I8, counts: I8, peaks: F4, totals: F4, out: F4, out_places: I8
) -> None:
    """logits: [1, .], where a query's rows of so many numbers have their places; its weights have one in the out."""
    queries, group, tiles = peaks.shape
    spread(_sum_tile, queries * tiles, (logits, places, counts, peaks, totals, tiles))
    spread(_find_lse, queries * group, (counts, peaks, totals, group))
    spread(_pool_tile, queries * tiles, (logits, places, counts, peaks, out, out_places, tiles))


@njit(_nrt=False)
def _put(sums: F4, count: int, logits: F4, places: I8, begin: int, out: F4, place: int) -> None:
    """Writes sums of weights to out[place..]; -inf where all logits, from `begin` behind their places on, are."""
    line, source = out[place : place + count], sums[0, :count]
    empty = 0
    for i in range(count):
        line[i] = source[i]
        empty += source[i] == np.float32(0)  # too small for a float, or of a key without logits
    if empty == 0:
        return
    for i in range(count):
        if line[i] == 0:
            highest = logits[0, places[0] + begin + i]
            for g in range(1, places.shape[0]):
                highest = max(highest, logits[0, places[g] + begin + i])
            if highest == -np.inf:
                line[i] = -np.inf
