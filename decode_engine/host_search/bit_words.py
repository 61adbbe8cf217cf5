"""Comparisons as bits of a word, 64 numbers at a time: what compilers do not make of a loop.

For functions that numba compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BITS = 64
_LANE = ir.IntType(32)
_NUMBERS = ir.VectorType(ir.FloatType(), BITS)

_Generated = tuple[Any, Callable[..., Any]]


@intrinsic
def reaching_bits(typing: Any, address: Any, bound: Any) -> _Generated:
    """reaching_bits(address, bound) -> uint64: bit i says whether the i-th of 64 float32 is at least the bound."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = builder.load(builder.inttoptr(values[0], _NUMBERS.as_pointer()), align=4)
        nothing = ir.Constant(_NUMBERS, ir.Undefined)
        first = builder.insert_element(nothing, values[1], ir.Constant(_LANE, 0))
        everywhere = ir.Constant(ir.VectorType(_LANE, BITS), [0] * BITS)
        bounds = builder.shuffle_vector(first, nothing, everywhere)
        return builder.bitcast(builder.fcmp_ordered(">=", numbers, bounds), ir.IntType(BITS))

    return types.uint64(types.int64, types.float32), generate


@intrinsic
def lowest_bit(typing: Any, word: Any) -> _Generated:
    """lowest_bit(word) -> uint64: the place of the lowest bit that is set; 64 when none is."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate
