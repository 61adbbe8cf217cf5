"""Weights of a softmax in a byte each, four in a 32-bit word: 5 exponent and 3 mantissa bits, from 2^-31 to 1.

To make them and to read them back takes two integer operations on the bits of a float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SHIFT_BITS, _LEAST_EXPONENT = 20, 768
_SHIFT = tl.constexpr(_SHIFT_BITS)
_ROUND = tl.constexpr(1 << (_SHIFT_BITS - 1))
_MASK = tl.constexpr(255 << _SHIFT_BITS)
_BASE = tl.constexpr(_LEAST_EXPONENT)
_LEAST = tl.constexpr(_LEAST_EXPONENT << _SHIFT_BITS)


@triton.jit
def to_byte(weight: tl.tensor) -> tl.tensor:
    """A float32 weight from 0 to 1 as a byte, rounded; int32."""
    rounded = (weight.to(tl.int32, bitcast=True) + _ROUND) >> _SHIFT
    return tl.maximum(rounded - _BASE, 0)


@triton.jit
def of_byte(words: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """The weight in byte `index` of every word, float32; 0 stands for 2^-31."""
    moved = words >> 4 if index == 3 else words << (_SHIFT - 8 * index)
    bits = (moved & _MASK) | _LEAST
    return bits.to(tl.float32, bitcast=True)


def rounded_reference(weights: Tensor) -> Tensor:
    """float32 weights from 0 to 1 as they are read back from their bytes."""
    upper = (weights.view(torch.int32) + (1 << (_SHIFT_BITS - 1))) >> _SHIFT_BITS
    return (upper.clamp(min=_LEAST_EXPONENT) << _SHIFT_BITS).view(torch.float32)
