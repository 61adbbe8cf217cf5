"""Coded rows as tables that compiled loops read.

Shape legend: H KV heads, N rows, J numbers of a row, g groups of a value's channels.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import make_widening
from index_store.compiled.launch import njit

_widen_halves = make_widening("float16")


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


def half_table(rows_HNJ: Tensor) -> tuple[NDArray[np.generic], int]:
    """`row_table` of float16, as the words that compiled loops can read."""
    return row_table(rows_HNJ.view(torch.int16))


@njit()
def at_cache_line(rows: int, width: int) -> NDArray[np.float32]:  # pragma: no cover - compiled
    """[rows, width] zeros that begin at a cache line, for widths that are multiples of LANES.

    A vector that lies across two lines is loaded, and stored, in two halves.
    """
    room = np.zeros(rows * width + LANES, np.float32)
    first = -(room.ctypes.data // 4) % LANES
    return room[first : first + rows * width].reshape(rows, width)


@njit(_nrt=False)
def largest_count(counts: NDArray[np.int64]) -> int:  # pragma: no cover - compiled
    """0 where there is none."""
    most = 0
    for r in range(counts.shape[0]):
        most = max(most, counts[r])
    return most


@njit(_nrt=False)
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


@njit(_nrt=False)
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
