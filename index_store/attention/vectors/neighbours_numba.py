"""Sums of rows of numbers, each times a factor of its own, the largest of 16 neighbours, and which reach a bound.

For functions that numba compiles. Arrays have two dimensions, their rows are contiguous, and bounds are the caller's
care.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from index_store.attention.vectors.bytes_numba import instruction_sets
from index_store.attention.vectors.code import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    SIZE,
    WORD,
    WORDS,
    Generated,
    Rows,
    ask_for,
    call,
    constants,
    gathered,
    plus,
    repeated,
    variable,
)
from index_store.attention.vectors.floats_numba import add_product, larger

_PLACE = (types.intp, types.intp)


def make_sums(vectors: int) -> Any:
    """For so many vectors: 16, of each of which the largest number is found, or one, which is written."""

    @intrinsic
    def add_rows(
        typing: Any,
        line: Any,
        begins: Any,
        row: Any,
        count: Any,
        column: Any,
        factors: Any,
        factor_row: Any,
        factor_column: Any,
        out: Any,
        to_row: Any,
        to_column: Any,
    ) -> Generated:
        """add_rows(line, begins, row, count, column, factors, factor_row, factor_column, out, to_row, to_column)

        out[to_row, to_column..], 16 numbers: with n[i] = the sum over r < count of line[0, begins[row, r] + column + i]
        * factors[factor_row + r, factor_column], these n of one vector, or of every vector the largest. begins: int64.
        Both find the same sums.
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            line_at, begins_at, factors_at, out_at = (
                Rows(context, builder, signature.args[place], values[place]) for place in (0, 1, 5, 8)
            )
            _, _, row, count, column, _, factor_row, factor_column, _, to_row, to_column = values
            totals = [variable(builder, constants(FLOATS, 0.0)) for _ in range(vectors)]
            with cgutils.for_range(builder, count) as loop:
                begin = builder.add(begins_at.load(row, loop.index, SIZE), column)
                factor = factors_at.load(builder.add(factor_row, loop.index), factor_column, FLOAT)
                factor = repeated(builder, factor)
                for number, total in enumerate(totals):
                    place = plus(builder, begin, LANES * number)
                    if vectors > 1:
                        ask_for(
                            builder, line_at.address(SIZE(0), plus(builder, place, LANES * vectors), BYTE)
                        )
                    taken = line_at.load(SIZE(0), place, FLOATS)
                    builder.store(add_product(builder, taken, factor, builder.load(total)), total)
            found = gathered(
                builder, [builder.load(total) for total in totals], lambda a, b: larger(builder, a, b)
            )
            out_at.store(found, to_row, to_column)
            return context.get_dummy_value()

        given = (line, begins, types.intp, types.intp, types.intp, factors, *_PLACE, out, *_PLACE)
        return types.void(*given), generate

    return add_rows


@intrinsic
def take_reaching(
    typing: Any,
    numbers: Any,
    row: Any,
    column: Any,
    bound: Any,
    low: Any,
    high: Any,
    name: Any,
    step: Any,
    taken: Any,
    names: Any,
    to: Any,
) -> Generated:
    """take_reaching(numbers, row, column, bound, low, high, name, step, taken, names, to): how many it takes.

    Of numbers i = low..high-1 of 16 those that are not less than the bound: they are written to taken[0, to..], in
    their order, and the names `name` + i * step to names[0, to..]. What is behind them there is undefined, up to 16.
    taken may be the numbers themselves. names: int32.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers_at, taken_at, names_at = (
            Rows(context, builder, signature.args[place], values[place]) for place in (0, 8, 9)
        )
        _, row, column, bound, low, high, name, step, _, _, to = values
        low, high, name, step = (repeated(builder, builder.trunc(x, WORD)) for x in (low, high, name, step))
        lanes = ir.Constant(WORDS, list(range(LANES)))
        found = numbers_at.load(row, column, FLOATS)
        chosen = builder.fcmp_unordered(">=", found, repeated(builder, bound))
        chosen = builder.and_(chosen, builder.icmp_signed(">=", lanes, low))
        chosen = builder.and_(chosen, builder.icmp_signed("<", lanes, high))
        called = builder.add(name, builder.mul(lanes, step))
        for vector, kind, rows in ((found, "v16f32", taken_at), (called, "v16i32", names_at)):
            if "avx512f" in instruction_sets():
                undefined = ir.Constant(vector.type, ir.Undefined)
                intrinsic_name = f"llvm.x86.avx512.mask.compress.{kind}"
                rows.store(call(builder, intrinsic_name, vector.type, vector, undefined, chosen), SIZE(0), to)
            else:
                place = rows.address(SIZE(0), to, vector.type.element)
                call(builder, f"llvm.masked.compressstore.{kind}", ir.VoidType(), vector, place, chosen)
        return builder.zext(builder.ctpop(builder.bitcast(chosen, ir.IntType(LANES))), SIZE)

    size = types.intp
    given = (numbers, *_PLACE, types.float32, size, size, size, size, taken, names, size)
    return types.int64(*given), generate
