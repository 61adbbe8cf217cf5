"""Maxima and exponentials of rows of logits, for loops that numba compiles: neither does a compiler find in vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index_store.launch import njit

_LOG2E = np.float32(1.4426950408889634)


@njit(cache=True, nogil=True)
def largest(
    numbers: NDArray[np.float32], row: int, first: int, end: int
) -> np.float32:  # pragma: no cover - compiled
    """The maximum, by integers of the same order, whose maximum compilers find in vectors."""
    bits = numbers[row, first:end].view(np.int32)
    most = np.int32(-(2**31))
    for i in range(bits.shape[0]):
        most = max(most, bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return as_float(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF)))  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def as_float(bits: np.int32) -> np.float32:  # pragma: no cover - compiled
    one = np.empty(1, np.int32)
    one[0] = bits
    return one.view(np.float32)[0]  # type: ignore[no-any-return]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def exponentiate(
    logits: NDArray[np.float32],
    row: int,
    first: int,
    count: int,
    base: np.float32,
    exponents: NDArray[np.int32],
    out: NDArray[np.float32],
) -> np.float32:  # pragma: no cover - compiled
    """out = exp(logits - base) for logits up to base, and 0 below 2^-126; returns their sum. Relative error 1e-6."""
    factors, line = exponents.view(np.float32), logits[row, first : first + count]
    for i in range(count):  # a slice's index is never negative, which compilers have to know for vectors
        power = (line[i] - base) * _LOG2E
        counts = power > np.float32(-126)
        power = power if counts else np.float32(-126)
        whole = np.floor(power + np.float32(0.5))
        x = power - whole
        exponents[i] = ((np.int32(whole) + np.int32(127)) << np.int32(23)) if counts else np.int32(0)
        # 2^x on [-0.5, 0.5], from the Cephes library
        tail = np.float32(1.535336188319500e-4) * x + np.float32(1.339887440266574e-3)
        tail = tail * x + np.float32(9.618437357674640e-3)
        tail = tail * x + np.float32(5.550332471162809e-2)
        tail = tail * x + np.float32(2.402264791363012e-1)
        tail = tail * x + np.float32(6.931472028550421e-1)
        out[0, i] = tail * x + np.float32(1)
    total = np.float32(0)
    for i in range(count):
        out[0, i] *= factors[i]
        total += out[0, i]
    return total
