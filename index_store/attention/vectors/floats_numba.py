"""Maxima, exponentials, products and roundings of rows of float32 numbers, 16 at a time.

For functions that numba compiles. All work on whole vectors: rows are filled up to a multiple of LANES. Arrays have two
dimensions, their rows are contiguous, and bounds are the caller's care.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from index_store.attention.vectors.bytes_numba import instruction_sets
from index_store.attention.vectors.code import (
    FLOATS,
    LANES,
    SIZE,
    WORD,
    WORDS,
    Place,
    Rows,
    call,
    constants,
    each_vector,
    emits,
    plus,
    reduced,
    repeated,
    variable,
)

WHOLE = 1.5 * 2**23
"""Added to a number of less than 2^22, its lowest bits are those of the nearest whole number as an integer."""

_FUSING = {"fma", "neon"}
"""Sets of instructions that round once."""
_HALVES, _BYTES = (ir.VectorType(ir.IntType(bits), LANES) for bits in (16, 8))
_SIZES2, _SIZES3 = ((types.intp,) * count for count in (2, 3))
_LOG2E = 1.4426950408889634
_EXPONENTIAL = (
    1.3264726891737309e-3,
    9.671512910235817e-3,
    5.550733746587912e-2,
    2.402224208100567e-1,
    6.931469775957915e-1,
    1.0,
)
"""2^x on [-0.5, 0.5] with the least relative error, 1e-7."""


@emits(types.float32, "place i")
def highest(builder: Any, source: Place, vectors: Any) -> Any:
    """highest(source, row, column, vectors): the largest of so many vectors of source[row, column..]."""
    most = variable(builder, constants(FLOATS, float("-inf")))
    with each_vector(builder, vectors) as first:
        numbers = source.load(first, FLOATS)
        builder.store(larger(builder, numbers, builder.load(most)), most)
    return reduced(builder, builder.load(most), lambda a, b: larger(builder, a, b))


@emits(types.float32, "place i")
def total_of(builder: Any, source: Place, vectors: Any) -> Any:
    """total_of(source, row, column, vectors): the sum of so many vectors of source[row, column..]."""
    total = variable(builder, constants(FLOATS, 0.0))
    with each_vector(builder, vectors) as first:
        numbers = source.load(first, FLOATS)
        builder.store(builder.fadd(builder.load(total), numbers), total)
    return sum_of(builder, builder.load(total))


@emits(types.UniTuple(types.float32, 2), "place i")
def extremes(builder: Any, source: Place, vectors: Any) -> Any:
    """extremes(source, row, column, vectors): the least and the largest of so many vectors of source[row, column..]."""
    least, most = (variable(builder, constants(FLOATS, float(end))) for end in ("inf", "-inf"))
    with each_vector(builder, vectors) as first:
        numbers = source.load(first, FLOATS)
        builder.store(_smaller(builder, numbers, builder.load(least)), least)
        builder.store(larger(builder, numbers, builder.load(most)), most)
    return (
        reduced(builder, builder.load(least), lambda a, b: _smaller(builder, a, b)),
        reduced(builder, builder.load(most), lambda a, b: larger(builder, a, b)),
    )


@emits(types.float32, "place f place i")
def exponentials(builder: Any, source: Place, base: Any, out: Place, vectors: Any) -> Any:
    """exponentials(source, row, column, base, out, to_row, to_column, vectors): the sum of what is written.

    out[to_row, to_column..] = exp(source[row, column..] - base) for numbers up to base, and 0 where that is below
    2^-125. Relative error 4e-6 at most, 1e-6 down to 2^-20.
    """
    bases = repeated(builder, base)
    total = variable(builder, constants(FLOATS, 0.0))
    with each_vector(builder, vectors) as first:
        numbers = source.load(first, FLOATS)
        made = _exponential(builder, builder.fsub(numbers, bases))
        out.store(made, first)
        builder.store(builder.fadd(builder.load(total), made), total)
    return sum_of(builder, builder.load(total))


def make_widening(kind: str) -> Any:
    """Numbers of another kind to floats: `float16` (finite ones) and `bfloat16`, both as int16, and `float32`."""

    @emits(types.void, "place place i")
    def widen_row(builder: Any, source: Place, out: Place, vectors: Any) -> None:
        """out[to_row, to_column..] = source[row, column..]"""
        with each_vector(builder, vectors) as first:
            taken = source.load(first, FLOATS if kind == "float32" else _HALVES)
            out.store(widened(builder, taken, kind), first)

    return widen_row


@emits(types.void, "f place place i")
def add_weighted(builder: Any, weight: Any, source: Place, out: Place, vectors: Any) -> None:
    """out[to_row, to_column..] += weight * source[row, column..]"""
    weights = repeated(builder, weight)
    with each_vector(builder, vectors) as first:
        sums = add_product(builder, source.load(first, FLOATS), weights, out.load(first, FLOATS))
        out.store(sums, first)


def make_scaling(add: bool) -> Any:
    """Whole numbers to floats that replace what stands there, or are added to it."""

    @emits(types.void, "place f f place i")
    def scale_row(builder: Any, whole: Place, unit: Any, shift: Any, out: Place, vectors: Any) -> None:
        """out[to_row, to_column..] is, or gets besides, unit * whole[row, column..] + shift. whole: [., .] int32."""
        units, shifts = repeated(builder, unit), repeated(builder, shift)
        with each_vector(builder, vectors) as first:
            made = add_product(builder, builder.sitofp(whole.load(first, WORDS), FLOATS), units, shifts)
            out.store(builder.fadd(out.load(first, FLOATS), made) if add else made, first)

    return scale_row


def _exponential(builder: Any, numbers: Any) -> Any:
    """exp of numbers up to 0."""
    power = builder.fmul(numbers, constants(FLOATS, _LOG2E))
    moved = builder.fadd(power, constants(FLOATS, WHOLE))
    rest = builder.fsub(power, builder.fsub(moved, constants(FLOATS, WHOLE)))
    made = constants(FLOATS, _EXPONENTIAL[0])
    for coefficient in _EXPONENTIAL[1:]:
        made = add_product(builder, made, rest, constants(FLOATS, coefficient))
    # Of WHOLE's own bits none is left. What is too small, and then wrong, is left out.
    exponents = builder.shl(builder.bitcast(moved, WORDS), constants(WORDS, 23))
    scaled = builder.bitcast(builder.add(builder.bitcast(made, WORDS), exponents), FLOATS)
    return builder.select(
        builder.fcmp_ordered(">", power, constants(FLOATS, -125.0)), scaled, constants(FLOATS, 0.0)
    )


def widened(builder: Any, halves: Any, kind: str) -> Any:
    """Floats of numbers of this kind."""
    if kind == "float32":
        return halves
    if kind == "bfloat16":
        return builder.bitcast(builder.shl(builder.zext(halves, WORDS), constants(WORDS, 16)), FLOATS)
    if "f16c" in instruction_sets():
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    words = builder.zext(halves, WORDS)
    numbers = builder.shl(builder.and_(words, constants(WORDS, 0x7FFF)), constants(WORDS, 13))
    signs = builder.shl(builder.and_(words, constants(WORDS, 0x8000)), constants(WORDS, 16))
    # The exponents' biases are 127 and 15.
    floats = builder.bitcast(builder.or_(numbers, signs), FLOATS)
    return builder.fmul(floats, constants(FLOATS, 2.0**112))


def add_product(builder: Any, one: Any, other: Any, addend: Any) -> Any:
    """one * other + addend, rounded once where the processor can: never by the compiler's choice.

    It fused some and not others, so that results differed by how many heads, or which process, a loop was compiled for.
    """
    if instruction_sets().isdisjoint(_FUSING):
        return builder.fadd(builder.fmul(one, other), addend)
    return call(builder, f"llvm.fma.v{one.type.count}f32", one.type, one, other, addend)


def larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _smaller(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", one, other), one, other)


def magnitude(builder: Any, numbers: Any) -> Any:
    words = builder.and_(builder.bitcast(numbers, WORDS), constants(WORDS, 0x7FFFFFFF))
    return builder.bitcast(words, FLOATS)


def sum_of(builder: Any, numbers: Any) -> Any:
    return reduced(builder, numbers, builder.fadd)


FOLDED = 4
"""Rows at a time."""

_FLOAT = FLOATS.element
_WHOLE_BITS = 0x4B400000  # of the float32 number WHOLE


@emits(types.void, "rows rows rows rows i f rows rows i rows rows rows i")
def fold_rows(
    builder: Any,
    numbers: Rows,
    columns: Rows,
    factors: Rows,
    centres: Rows,
    group: Any,
    middle: Any,
    folded: Rows,
    rounded: Rows,
    to_row: Any,
    units: Rows,
    shifts: Rows,
    sums: Rows,
    vectors: Any,
) -> None:
    """Folds and rounds four rows.

    fold_rows(numbers, columns, factors, centres, group, middle, folded, rounded, to_row, units, shifts, sums, vectors)

    For four rows r, n_r = numbers[0, columns[0, r]..], so many vectors of each: rounded[to_row + r] = n_r *
    factors[group] in multiples of the 127th part of its largest magnitude, which is units[0, to_row + r], and
    shifts[0, to_row + r] what the product of the multiples and codes lacks besides, where codes count from 0 and
    factors * code + centres - middle * factors is what they stand for. sums[0, to_row + r]: of n_r. columns: int64.
    folded: [4, .], scratch. rounded: [., .] int8.
    """
    rows = range(FOLDED)
    zero = SIZE(0)
    begins = [columns.load(zero, SIZE(r), SIZE) for r in rows]
    totals, added, most = ([variable(builder, constants(FLOATS, 0.0)) for _ in rows] for _ in range(3))
    with each_vector(builder, vectors) as first:
        factor, centre = (at.load(group, first, FLOATS) for at in (factors, centres))
        for r in rows:
            taken = numbers.load(zero, builder.add(begins[r], first), FLOATS)
            product = builder.fmul(taken, factor)
            folded.store(product, SIZE(r), first)
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
            taken = folded.load(SIZE(r), first, FLOATS)
            moved = add_product(builder, taken, scales[r], constants(FLOATS, WHOLE))
            bits = builder.bitcast(moved, WORDS)
            rounded.store(builder.trunc(bits, _BYTES), plus(builder, to_row, r), first)
            builder.store(builder.add(builder.load(wholes[r]), bits), wholes[r])
    lifted = builder.mul(builder.trunc(vectors, WORD), WORD(_WHOLE_BITS * LANES % 2**32))
    for r in rows:
        whole = builder.sub(reduced(builder, builder.load(wholes[r]), builder.add), lifted)
        unit = builder.fmul(peaks[r], _FLOAT(1 / 127))
        lost = builder.fmul(builder.fmul(unit, middle), builder.sitofp(whole, _FLOAT))
        place = plus(builder, to_row, r)
        units.store(unit, zero, place)
        shifts.store(builder.fsub(sum_of(builder, builder.load(totals[r])), lost), zero, place)
        sums.store(sum_of(builder, builder.load(added[r])), zero, place)
