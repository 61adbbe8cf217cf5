"""Products of bytes, and two transpositions that make ready for them.

Compilers do not find them in plain loops. What they emit is right on any processor; products of bytes take the
instructions that AVX-512 VNNI or AVX2 have for them. All of them are exact, so all ways agree bit for bit.

For functions that numba compiles. Arrays' rows are contiguous, and bounds are the caller's care.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen, config

from index_store.attention.vectors.code import (
    BYTE,
    HALF,
    LANES,
    ONES,
    SIZE,
    TWOS,
    WORD,
    WORDS,
    Place,
    Rows,
    ask_for,
    call,
    emits,
    in_lanes,
    joined,
    plus,
    repeated,
    shuffled,
)


def instruction_sets() -> frozenset[str]:
    """What compiled code may use of the processor, in LLVM's names."""
    features = config.CPU_FEATURES or codegen.get_host_cpu_features()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


def make_block_product(rows: int, vectors: int, sets: frozenset[str]) -> Any:
    """The product of a block, for so many rows and vectors of columns, with these sets of instructions."""

    @emits(types.void, "rows i rows i i place")
    def block_product(
        builder: Any, codes: Rows, column: Any, weights: Rows, row: Any, words: Any, sums: Place
    ) -> None:
        """sums[to_row + r, to_column + n] = sum over k < words of the four products in codes[k, column + n] and
        weights[row + r, 4k .. 4k+3]. codes: [., .] uint32 of four codes up to 15 each. weights: [., .] int8. sums:
        [., .] int32.
        """
        totals = [[cgutils.alloca_once(builder, WORDS) for _ in range(vectors)] for _ in range(rows)]
        for total in (total for line in totals for total in line):
            builder.store(ir.Constant(WORDS, [0] * LANES), total)
        with cgutils.for_range(builder, words) as loop:
            taken = [codes.load(loop.index, plus(builder, column, LANES * v), WORDS) for v in range(vectors)]
            four = builder.mul(loop.index, SIZE(4))
            for r in range(rows):
                weight = weights.load(plus(builder, row, r), four, WORD)
                everywhere = repeated(builder, weight)
                for v in range(vectors):
                    total = builder.load(totals[r][v])
                    builder.store(_add_products(builder, total, taken[v], everywhere, sets), totals[r][v])
        for r in range(rows):
            for v in range(vectors):
                sums.store(builder.load(totals[r][v]), SIZE(LANES * v), below=r)

    return block_product


def make_transposition(bits: int) -> Any:
    """The transposition of 16 rows, whose bytes hold numbers of so many bits: 2, 4 or 8."""

    @emits(types.void, "rows i i rows i i i")
    def transpose_rows(
        builder: Any, source: Rows, row: Any, byte: Any, words: Rows, to_row: Any, to_column: Any, apart: Any
    ) -> None:
        """words[to_row + p * apart + k, to_column + i] = numbers p of the four bytes from byte + 4k on of source[row +
        i], for 16 rows i, k < 4, and as many p as a byte has numbers. source: [., .] uint8. words: [., .] uint32.
        """
        four = ir.VectorType(WORD, 4)
        lines = source.load_rows(row, byte, four, 16)
        # Lane by lane of 128 bits, which is how processors shuffle: rows k, k + 4, k + 8, k + 12 side by side.
        wide = [joined(builder, [lines[k + 4 * lane] for lane in range(4)]) for k in range(4)]
        pairs = [in_lanes(builder, wide[2 * p], wide[2 * p + 1], order) for p in (0, 1) for order in ONES]
        made = [in_lanes(builder, pairs[k // 2], pairs[2 + k // 2], TWOS[k % 2]) for k in range(4)]
        for k, vector in enumerate(made):
            place = plus(builder, to_row, k)
            for plane in _planes(builder, vector, bits):
                words.store(plane, place, to_column)
                place = builder.add(place, apart)

    return transpose_rows


def make_interleaving(bits: int, count: int) -> Any:
    """The interleaving of 16 or 64 bytes of four rows, whose bytes hold numbers of so many bits: 2, 4 or 8."""

    @emits(types.void, "rows i i rows i i i")
    def interleave_rows(
        builder: Any, source: Rows, row: Any, byte: Any, words: Rows, to_row: Any, to_column: Any, apart: Any
    ) -> None:
        """words[to_row, to_column + p * apart + i] = numbers p of byte `byte + i` of source[row], source[row + 1] and
        the next two, for i < count and as many p as a byte has numbers. source: [., .] uint8. words: [., .] uint32.
        """
        line = ir.VectorType(BYTE, count)
        lines = source.load_rows(row, byte, line, 4)
        for first, vector in enumerate(_interleaved(builder, lines)):
            place = plus(builder, to_column, LANES * first)
            for plane in _planes(builder, builder.bitcast(vector, WORDS), bits):
                words.store(plane, to_row, place)
                place = builder.add(place, apart)

    return interleave_rows


@emits(types.void, "rows i i")
def prefetch(builder: Any, rows: Rows, row: Any, byte: Any) -> None:
    """prefetch(rows, row, byte): asks for the cache line there, which may also be beyond the array's end.

    rows: [., .] uint8.
    """
    ask_for(builder, rows.address(row, byte, BYTE))


def _add_products(builder: Any, total: Any, codes: Any, weights: Any, sets: frozenset[str]) -> Any:
    """total + the sum of the four products in every word; codes up to 15, so that four products fit into 16 bits."""
    if "avx512vnni" in sets:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, codes, weights)
    if "avx2" in sets:
        parts = [[shuffled(builder, x, x, range(low, low + 8)) for x in (codes, weights)] for low in (0, 8)]
        return builder.add(total, joined(builder, [_products_avx2(builder, *part) for part in parts]))
    bytes_type, halves_type = ir.VectorType(BYTE, 64), ir.VectorType(HALF, 64)
    sums = builder.mul(
        builder.zext(builder.bitcast(codes, bytes_type), halves_type),
        builder.sext(builder.bitcast(weights, bytes_type), halves_type),
    )
    for count in (32, 16):
        even, odd = (shuffled(builder, sums, sums, range(first, 2 * count, 2)) for first in (0, 1))
        sums = builder.add(even, odd)
    return builder.add(total, builder.sext(sums, WORDS))


def _products_avx2(builder: Any, codes: Any, weights: Any) -> Any:
    bytes_type, pairs_type = ir.VectorType(BYTE, 32), ir.VectorType(HALF, 16)
    taken = [builder.bitcast(x, bytes_type) for x in (codes, weights)]
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs_type, *taken)
    ones = ir.Constant(pairs_type, [1] * 16)
    return call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(WORD, 8), pairs, ones)


def _interleaved(builder: Any, lines: list[Any]) -> list[Any]:
    """Vectors of 64 bytes: bytes 0 of all four lines, then bytes 1, and so on."""
    count = lines[0].type.count
    if count == 16:
        line = joined(builder, lines)
        return [shuffled(builder, line, line, [16 * row + i for i in range(16) for row in range(4)])]
    pairs = [_merged(builder, lines[i], lines[i + 1], part, 1) for i in (0, 2) for part in (0, 1)]
    return [_merged(builder, pairs[part], pairs[2 + part], half, 2) for part in (0, 1) for half in (0, 1)]


def _merged(builder: Any, low: Any, high: Any, half: int, run: int) -> Any:
    """Runs of bytes of two vectors in turn, from their lower (0) or upper (1) halves."""
    count = low.type.count
    places = [
        begin + i + other
        for begin in range(half * count // 2, (half + 1) * count // 2, run)
        for other in (0, count)
        for i in range(run)
    ]
    return shuffled(builder, low, high, places)


def _planes(builder: Any, words: Any, bits: int) -> list[Any]:
    """The first, second, ... number of every byte, each in a byte of its own."""
    if bits == 8:
        return [words]
    mask = ir.Constant(WORDS, [((1 << bits) - 1) * 0x01010101] * LANES)
    shifts = [ir.Constant(WORDS, [shift] * LANES) for shift in range(0, 8, bits)]
    return [builder.and_(builder.lshr(words, shift), mask) for shift in shifts]
