"""Products with rows in float32, bfloat16 or float16, and their weighted sums, for several heads at a time.

A row is read and converted once for four heads. For functions that numba compiles. Arrays have two dimensions, their
rows are contiguous, and bounds are the caller's care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from index_store.attention.vectors.code import (
    FLOAT,
    FLOATS,
    HALF,
    LANES,
    SIZE,
    Generated,
    Rows,
    constants,
    each_reduced,
    each_vector,
    gathered,
    plus,
    repeated,
    variable,
)
from index_store.attention.vectors.floats_numba import add_product, widened

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""What a table's rows hold, which is given as int16."""

_HALVES = ir.VectorType(HALF, LANES)


@intrinsic
def multiply_row(
    typing: Any,
    table: Any,
    row: Any,
    kind: Any,
    queries: Any,
    heads: Any,
    vectors: Any,
    out: Any,
    column: Any,
) -> Generated:
    """multiply_row(table, row, kind, queries, heads, vectors, out, column)

    out[h, column] = the product of queries[h] and table[row], so many vectors of both, for h < heads.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table_at, queries_at, out_at = (
            Rows(context, builder, signature.args[place], values[place]) for place in (0, 3, 6)
        )
        _, row, kind, _, heads, vectors, _, column = values

        def multiply(first_head: Any, count: int) -> None:
            totals = [variable(builder, constants(FLOATS, 0.0)) for _ in range(count)]
            with each_vector(builder, vectors) as first:
                taken = _numbers(builder, table_at, kind, row, first)
                for h, total in enumerate(totals):
                    query = queries_at.load(plus(builder, first_head, h), first, FLOATS)
                    builder.store(add_product(builder, taken, query, builder.load(total)), total)
            sums = [builder.load(total) for total in totals]
            sums += sums[-1:] * (4 - count)  # the same order of additions for any number of heads
            lanes = gathered(builder, sums, builder.fadd)
            for h, found in enumerate(each_reduced(builder, lanes, builder.fadd, 4)[:count]):
                out_at.store(found, plus(builder, first_head, h), column)

        _by_heads(builder, heads, multiply)
        return context.get_dummy_value()

    size = types.intp
    return types.void(table, size, types.int64, queries, size, size, out, size), generate


@intrinsic
def add_weighted_rows(
    typing: Any,
    table: Any,
    rows: Any,
    first_row: Any,
    count: Any,
    kind: Any,
    column: Any,
    weights: Any,
    out: Any,
    heads: Any,
    vectors: Any,
) -> Generated:
    """add_weighted_rows(table, rows, first_row, count, kind, column, weights, out, heads, vectors)

    out[h] += the sum of weights[h, n] * table[rows[0, n]], so many vectors from number `column` on, for `count` rows n
    from first_row on and h < heads. rows: int64.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table_at, rows_at, weights_at, out_at = (
            Rows(context, builder, signature.args[place], values[place]) for place in (0, 1, 6, 7)
        )
        _, _, first_row, count, kind, column, _, _, heads, vectors = values

        def add(first_head: Any, some: int) -> None:
            with each_vector(builder, vectors) as first:
                own = [plus(builder, first_head, h) for h in range(some)]
                totals = [variable(builder, out_at.load(head, first, FLOATS)) for head in own]
                with cgutils.for_range(builder, count) as loop:
                    number = builder.add(first_row, loop.index)
                    row = rows_at.load(SIZE(0), number, SIZE)
                    taken = _numbers(builder, table_at, kind, row, builder.add(column, first))
                    for head, total in zip(own, totals, strict=True):
                        weight = repeated(builder, weights_at.load(head, number, FLOAT))
                        builder.store(add_product(builder, taken, weight, builder.load(total)), total)
                for head, total in zip(own, totals, strict=True):
                    out_at.store(builder.load(total), head, first)

        _by_heads(builder, heads, add)
        return context.get_dummy_value()

    size = types.intp
    return types.void(table, rows, size, size, types.int64, size, weights, out, size, size), generate


@intrinsic
def float_of(typing: Any, bits: Any) -> Generated:
    """float_of(bits): the float32 number of these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], FLOAT)

    return types.float32(types.uint32), generate


def _by_heads(builder: Any, heads: Any, emit: Callable[[Any, int], None]) -> None:
    """Code for heads by fours, then for two and one of those that are left."""
    with cgutils.for_range(builder, builder.lshr(heads, SIZE(2))) as loop:
        emit(builder.shl(loop.index, SIZE(2)), 4)
    for count in (2, 1):
        with builder.if_then(builder.trunc(builder.lshr(heads, SIZE(count - 1)), ir.IntType(1))):
            emit(builder.and_(heads, SIZE(-2 * count)), count)


def _numbers(builder: Any, table: Rows, kind: Any, row: Any, first: Any) -> Any:
    """16 numbers of a row as floats. Compilers move the question for the kind out of loops."""
    taken = cgutils.alloca_once(builder, FLOATS)
    with builder.if_else(builder.icmp_signed("==", kind, SIZE(BFLOAT16))) as (then, otherwise):
        with then:
            builder.store(widened(builder, table.load(row, first, _HALVES), "bfloat16"), taken)
        with otherwise, builder.if_else(builder.icmp_signed("==", kind, SIZE(FLOAT16))) as (half, whole):
            with half:
                builder.store(widened(builder, table.load(row, first, _HALVES), "float16"), taken)
            with whole:
                builder.store(table.load(row, builder.shl(first, SIZE(1)), FLOATS), taken)
    return builder.load(taken)
