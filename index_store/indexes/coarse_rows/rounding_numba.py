"""Numbers of queries and weights made ready for products of bytes: scales folded in, and rounded.

For functions that numba compiles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index_store.attention.exponentials_numba import as_float
from index_store.launch import njit


@njit(cache=True, nogil=True)
def read_halves(
    halves: NDArray[np.int16], words: NDArray[np.uint32], floats: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """floats[0, n] = finite float16 numbers [n, 1], or floats[g, n] = [n, g]. words: scratch, as many."""
    count, groups = halves.shape
    line = words.view(np.float32)
    numbers = halves.reshape(halves.size)
    for i in range(numbers.shape[0]):
        half = np.uint32(numbers[i])
        words[i] = ((half & np.uint32(0x7FFF)) << np.uint32(13)) | (
            (half & np.uint32(0x8000)) << np.uint32(16)
        )
    for g in range(groups):
        for n in range(count):
            floats[g, n] = line[n * groups + g] * np.float32(2.0**112)  # the exponents' biases are 127 and 15


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def fold(
    numbers: NDArray[np.float32],
    row: int,
    count: int,
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    group: int,
    middle: np.float32,
    folded: NDArray[np.float32],
) -> np.float32:  # pragma: no cover - compiled
    """folded = a row of numbers * scale; returns their product with what codes in the middle decode to."""
    total = np.float32(0)
    for i in range(count):
        folded[i] = numbers[row, i] * scale[group, i]
        total += numbers[row, i] * offset[group, i] + folded[i] * middle
    return total


@njit(cache=True, nogil=True)
def round_to_unit(
    numbers: NDArray[np.float32], rounded: NDArray[np.int8], row: int
) -> tuple[np.float32, np.int32]:  # pragma: no cover - compiled
    """Rounds to multiples of a unit, the 127th part of the largest magnitude; the unit, and the multiples' sum."""
    bits = numbers.view(np.uint32)
    magnitude = np.uint32(0)  # of floats without a sign, bits have the same order
    for i in range(bits.shape[0]):
        magnitude = max(magnitude, bits[i] & np.uint32(0x7FFFFFFF))
    peak = as_float(np.int32(magnitude))
    inverse = np.float32(127) / peak if peak > np.float32(1e-30) else np.float32(0)
    total = np.int32(0)
    for i in range(numbers.shape[0]):
        multiple = np.int32(np.floor(numbers[i] * inverse + np.float32(0.5)))
        rounded[row, i] = np.int8(multiple)
        total += multiple
    return peak / np.float32(127), total
