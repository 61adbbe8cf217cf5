"""Rows of numbers folded with scales and rounded to 8 bits, four at a time: none waits for what the one before adds up.

For functions that numba compiles. Arrays have two dimensions, their rows are contiguous, and bounds are the caller's
care.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from index_store.attention.vectors.code import (
    FLOATS,
    LANES,
    SIZE,
    WORD,
    WORDS,
    Generated,
    Rows,
    constants,
    each_vector,
    plus,
    reduced,
    repeated,
    variable,
)
from index_store.attention.vectors.floats_numba import WHOLE, add_product, larger, magnitude, sum_of

FOLDED = 4
"""Rows at a time."""

_FLOAT = FLOATS.element
_WHOLE_BITS = 0x4B400000  # of the float32 number WHOLE
_BYTES = ir.VectorType(ir.IntType(8), LANES)


@intrinsic
def fold_rows(
    typing: Any,
    numbers: Any,
    columns: Any,
    factors: Any,
    centres: Any,
    group: Any,
    middle: Any,
    folded: Any,
    rounded: Any,
    to_row: Any,
    units: Any,
    shifts: Any,
    sums: Any,
    vectors: Any,
) -> Generated:
    """Folds and rounds four rows.

    fold_rows(numbers, columns, factors, centres, group, middle, folded, rounded, to_row, units, shifts, sums, vectors)

    For four rows r, n_r = numbers[0, columns[0, r]..], so many vectors of each: rounded[to_row + r] = n_r *
    factors[group] in multiples of the 127th part of its largest magnitude, which is units[0, to_row + r], and
    shifts[0, to_row + r] what the product of the multiples and codes lacks besides, where codes count from 0 and
    factors * code + centres - middle * factors is what they stand for. sums[0, to_row + r]: of n_r. columns: int64.
    folded: [4, .], scratch. rounded: [., .] int8.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (
            numbers_at,
            columns_at,
            factors_at,
            centres_at,
            folded_at,
            rounded_at,
            units_at,
            shifts_at,
            sums_at,
        ) = (
            Rows(context, builder, signature.args[place], values[place])
            for place in (0, 1, 2, 3, 6, 7, 9, 10, 11)
        )
        group, middle, to_row, vectors = (values[place] for place in (4, 5, 8, 12))
        rows = range(FOLDED)
        zero = SIZE(0)
        columns = [columns_at.load(zero, SIZE(r), SIZE) for r in rows]
        totals, added, most = ([variable(builder, constants(FLOATS, 0.0)) for _ in rows] for _ in range(3))
        with each_vector(builder, vectors) as first:
            factor, centre = (at.load(group, first, FLOATS) for at in (factors_at, centres_at))
            for r in rows:
                taken = numbers_at.load(zero, builder.add(columns[r], first), FLOATS)
                product = builder.fmul(taken, factor)
                folded_at.store(product, SIZE(r), first)
                builder.store(add_product(builder, taken, centre, builder.load(totals[r])), totals[r])
                builder.store(builder.fadd(builder.load(added[r]), taken), added[r])
                builder.store(larger(builder, magnitude(builder, product), builder.load(most[r])), most[r])
        peaks = [reduced(builder, builder.load(each), lambda a, b: larger(builder, a, b)) for each in most]
        scales = []
        for peak in peaks:
            counts = builder.fcmp_ordered(">", peak, _FLOAT(1e-30))
            scale = builder.fdiv(_FLOAT(127.0), builder.select(counts, peak, _FLOAT(1.0)))
            scales.append(repeated(builder, builder.select(counts, scale, _FLOAT(0.0))))
        wholes = [variable(builder, constants(WORDS, 0)) for _ in rows]
        with each_vector(builder, vectors) as first:
            for r in rows:
                taken = folded_at.load(SIZE(r), first, FLOATS)
                moved = add_product(builder, taken, scales[r], constants(FLOATS, WHOLE))
                bits = builder.bitcast(moved, WORDS)
                rounded_at.store(builder.trunc(bits, _BYTES), plus(builder, to_row, r), first)
                builder.store(builder.add(builder.load(wholes[r]), bits), wholes[r])
        lifted = builder.mul(builder.trunc(vectors, WORD), WORD(_WHOLE_BITS * LANES % 2**32))
        for r in rows:
            whole = builder.sub(reduced(builder, builder.load(wholes[r]), builder.add), lifted)
            unit = builder.fmul(peaks[r], _FLOAT(1 / 127))
            lost = builder.fmul(builder.fmul(unit, middle), builder.sitofp(whole, _FLOAT))
            place = plus(builder, to_row, r)
            units_at.store(unit, zero, place)
            shifts_at.store(builder.fsub(sum_of(builder, builder.load(totals[r])), lost), zero, place)
            sums_at.store(sum_of(builder, builder.load(added[r])), zero, place)
        return context.get_dummy_value()

    place, number = types.intp, types.float32
    scratch = (folded, rounded, place, units, shifts, sums, place)
    return types.void(numbers, columns, factors, centres, place, number, *scratch), generate
