"""Numbers of two planes of 4-bit codes, put together 32 at a time.

For functions that numba compiles. Arrays' rows are contiguous, and bounds are the caller's care.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from index_store.attention.vectors.code import (
    BYTE,
    FLOATS,
    LANES,
    SIZE,
    WORDS,
    Generated,
    Rows,
    constants,
    each_vector,
    repeated,
)

_BYTES = ir.VectorType(BYTE, LANES)


def make_refining(*, uniform: bool) -> Any:
    """Numbers of two planes, whose channels have scales and offsets of their own or, if `uniform`, one of each."""

    @intrinsic
    def refine(
        typing: Any,
        high: Any,
        high_row: Any,
        low: Any,
        low_row: Any,
        scales: Any,
        offsets: Any,
        out: Any,
        to_row: Any,
        vectors: Any,
    ) -> Generated:
        """refine(high, high_row, low, low_row, scales, offsets, out, to_row, vectors)

        out[to_row, c] = (16 * high code + low code - 7.5) * scales[0, c] + offsets[0, c], rounded twice. Byte j of a
        plane has the code of channel j in its lower bits, and in its upper ones that of channel w + j, where w = 16 *
        vectors. scales, offsets: two numbers if `uniform`.
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            high, high_row, low, low_row, scales, offsets, out, to_row, vectors = values
            high_at, low_at, out_at = (
                Rows(context, builder, signature.args[place], value)
                for place, value in ((0, high), (2, low), (6, out))
            )
            four, mask, middle = constants(WORDS, 4), constants(WORDS, 15), constants(FLOATS, 7.5)
            width = builder.mul(vectors, ir.Constant(vectors.type, LANES))
            if uniform:
                every = repeated(builder, scales), repeated(builder, offsets)
            else:
                each = [
                    Rows(context, builder, signature.args[place], value)
                    for place, value in ((4, scales), (5, offsets))
                ]
            with each_vector(builder, vectors) as first:
                codes, fine = (
                    builder.zext(rows.load(row, first, _BYTES), WORDS)
                    for rows, row in ((high_at, high_row), (low_at, low_row))
                )
                lower = builder.or_(builder.shl(builder.and_(codes, mask), four), builder.and_(fine, mask))
                upper = builder.or_(builder.sub(codes, builder.and_(codes, mask)), builder.lshr(fine, four))
                for places, channel in ((lower, first), (upper, builder.add(width, first))):
                    numbers = builder.fsub(builder.sitofp(places, FLOATS), middle)
                    scale, offset = (
                        every if uniform else [rows.load(SIZE(0), channel, FLOATS) for rows in each]
                    )
                    found = builder.fadd(builder.fmul(numbers, scale), offset)
                    out_at.store(found, to_row, channel)
            return context.get_dummy_value()

        levels = (types.float32, types.float32) if uniform else (scales, offsets)
        size = types.intp
        return types.void(high, size, low, size, *levels, out, size, size), generate

    return refine
