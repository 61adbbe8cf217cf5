"""Maxima and exponentials of rows of logits of any length, for loops that numba compiles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import exponentials, highest
from index_store.compiled.launch import njit


@njit(_nrt=False)
def largest(
    numbers: NDArray[np.float32], row: int, first: int, end: int
) -> np.float32:  # pragma: no cover - compiled
    """The maximum; -inf of nothing."""
    vectors = (end - first) // LANES
    most = highest(numbers, row, first, vectors)
    for i in range(first + vectors * LANES, end):
        most = max(most, numbers[row, i])
    return most  # type: ignore[no-any-return]


@njit(_nrt=False)
def exponentiate(
    logits: NDArray[np.float32],
    row: int,
    first: int,
    count: int,
    base: np.float32,
    scratch: NDArray[np.float32],
    out: NDArray[np.float32],
) -> np.float32:  # pragma: no cover - compiled
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
    numbers: NDArray[np.float32],
    row: int,
    first: int,
    count: int,
    base: np.float32,
    scratch: NDArray[np.float32],
) -> np.float32:  # pragma: no cover - compiled
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
