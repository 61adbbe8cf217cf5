"""Coded rows as tables that compiled loops read, and rows of numbers folded with their scales.

Shape legend: H KV heads, N rows, J numbers of a row, g groups of a value's channels.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import fold, make_widening, round_row
from index_store.launch import njit

_widen_halves = make_widening("float16")


def row_table(rows_HNJ: Tensor) -> tuple[NDArray[np.generic], int]:
    """All heads' rows as one contiguous table, and how many of its rows lie between the first ones of two heads.

    So loops are compiled once, whether or not there is room behind the rows of a head.
    """
    heads, count, width = rows_HNJ.shape
    if rows_HNJ.stride()[1:] != (width, 1) or rows_HNJ.stride(0) % width:
        rows_HNJ = rows_HNJ.contiguous()
    stride = rows_HNJ.stride(0) // width if heads > 1 else count
    size = ((heads - 1) * stride + count, width)
    return rows_HNJ.as_strided(size, (width, 1), rows_HNJ.storage_offset()).numpy(), stride


def half_table(rows_HNJ: Tensor) -> tuple[NDArray[np.generic], int]:
    """`row_table` of float16, as the words that compiled loops can read."""
    return row_table(rows_HNJ.view(torch.int16))


@njit(cache=True, nogil=True, _nrt=False)
def widen(
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
def widen_groups(
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
        widen(halves, row, count, scratch, floats)
        return
    widen(halves, row, count * groups, scratch, line)
    for n in range(count):
        for g in range(groups):
            floats[g, n] = line[0, n * groups + g]


@njit(cache=True, nogil=True, _nrt=False)
def fold_and_round(
    numbers: NDArray[np.float32],
    row: int,
    column: int,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    group: int,
    middle: np.float32,
    scratch: NDArray[np.float32],
    rounded: NDArray[np.int8],
    to_row: int,
    vectors: int,
) -> tuple[np.float32, np.float32]:  # pragma: no cover - compiled
    """Rounds numbers[row, column..] * scale to multiples of the 127th part of its largest magnitude.

    Returns that unit and a shift: unit * (multiples . codes) + shift is the product of the numbers and what the codes
    stand for. scratch: [1, as many numbers].
    """
    shift, peak = fold(numbers, row, column, scale, offset, group, middle, scratch, vectors)
    factor = np.float32(127) / peak if peak > np.float32(1e-30) else np.float32(0)
    total = round_row(scratch, factor, rounded, to_row, vectors)
    unit = peak / np.float32(127)
    return unit, shift - unit * middle * np.float32(total)
