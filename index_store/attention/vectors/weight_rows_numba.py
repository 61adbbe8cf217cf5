"""Products of rows of float32 numbers with rows of weights in 32, 16 or 8 bits, several of both at a time.

Every product is one sum in one order, whichever rows and weights are beside it: its bits are always the same. For
functions that numba compiles. Arrays have two dimensions, their rows are contiguous, and bounds are the caller's care.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from index_store.attention.vectors.code import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    LANES,
    SIZE,
    WORDS,
    Rows,
    ask_for,
    constants,
    emits,
    plus,
    repeated,
    variable,
)
from index_store.attention.vectors.floats_numba import add_product, sum_of, widened

GROUP = 64
"""Weights in 8 bits that share a scale."""

_KINDS = {types.float32: "float32", types.int16: "bfloat16", types.uint16: "float16", types.int8: "int8"}
_LOADED = {
    "float32": FLOATS,
    "bfloat16": ir.VectorType(HALF, LANES),
    "float16": ir.VectorType(HALF, LANES),
    "int8": ir.VectorType(BYTE, LANES),
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_LINE = 64
"""Bytes that come from memory at once."""

_AHEAD = 8192
"""Bytes from what is multiplied to what is asked for. Processors do not foresee it, since four rows are read side by
side: without it, 8 bits took twice as long. 4,000 to 32,000 bytes differ little."""


def make_weight_product(count: int, outputs: int) -> Any:
    """The products of so many rows with so many rows of weights."""

    @emits(types.void, "rows i rows rows i i rows")
    def multiply_weights(
        builder: Any, rows: Rows, row: Any, weights: Rows, scales: Rows, output: Any, inputs: Any, out: Rows
    ) -> None:
        """out[row + r, output + o] = the sum of rows[row + r, i] * weights[output + o, i] over so many inputs i, a
        multiple of LANES. weights: float32, bfloat16 as int16, float16 as uint16, or int8; these, whose number is a
        multiple of GROUP, count in scales[output + o, i // GROUP].
        """
        kind = _KINDS[weights.dtype]
        pairs = [(r, o) for r in range(count) for o in range(outputs)]
        totals = {pair: variable(builder, constants(FLOATS, 0.0)) for pair in pairs}

        def weights_of(first: Any) -> list[Any]:
            loaded = weights.load_rows(output, first, _LOADED[kind], outputs)
            if kind == "int8":
                return [builder.sitofp(builder.sext(each, WORDS), FLOATS) for each in loaded]
            return [widened(builder, each, kind) for each in loaded]

        step = GROUP if kind == "int8" else LANES
        with cgutils.for_range(builder, builder.udiv(inputs, SIZE(step))) as loop:
            first = builder.mul(loop.index, SIZE(step))
            sums = {} if kind == "int8" else {pair: builder.load(totals[pair]) for pair in pairs}
            for begin in range(0, step, LANES):
                place = plus(builder, first, begin)
                taken = rows.load_rows(row, place, FLOATS, count)
                if begin * _BYTES[kind] % _LINE == 0:
                    for o in range(outputs):
                        ahead = weights.address(plus(builder, output, o), place, BYTE)
                        ask_for(builder, builder.gep(ahead, [SIZE(_AHEAD)]))
                for o, weight in enumerate(weights_of(place)):
                    for r in range(count):
                        known = sums.get((r, o))
                        sums[r, o] = (
                            builder.fmul(taken[r], weight)
                            if known is None
                            else add_product(builder, taken[r], weight, known)
                        )
            for o in range(outputs):
                if kind == "int8":
                    scale = repeated(builder, scales.load(plus(builder, output, o), loop.index, FLOAT))
                for r in range(count):
                    total = sums[r, o]
                    if kind == "int8":
                        total = add_product(builder, total, scale, builder.load(totals[r, o]))
                    builder.store(total, totals[r, o])
        for r, o in pairs:
            found = sum_of(builder, builder.load(totals[r, o]))
            out.store(found, plus(builder, row, r), plus(builder, output, o))

    return multiply_weights
