"""Tiles of coded keys, and products of queries with them, as tensor cores take bytes.

Codes are multiplied where they lie. A byte holds several: code i of byte j is of channel j + i * 4 W. Tensor cores
multiply whole bytes with 8-bit integers: the byte as it is, and below that with its upper codes masked, one instruction
for all codes of a register. A byte's lower codes then count more than once, which the integers of the lower ones make
up for. Sums are exact.

A block's scales are folded into queries, as bytes. Queries times scales are rounded to integers, with one unit for all
channels of a query head. What that loses is added for codes that are as large as they are on average: it would be the
same for all keys of a block.

What a lane has is written as tensors [8, 4], a register of each: lane 4 r + q. Which of them instructions take for
which row or column is a matter of PTX (`mma.m16n8k32`): the left operand's rows are r and r + 8, the right one's
columns are r, a result's are 2 q and 2 q + 1; and quarter q of a row's words is lane q's.

Shape legend: as in `value_tiles`; C codes of a byte.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.registers import (
    OF_ROWS,
    REGISTER,
    RESULT,
    as_rows,
    beside,
    bits_of,
    code_count,
    factor_of,
    halved,
    held_words,
    key_registers,
    lanes,
    level_codes,
    level_mask,
    register_layout,
    registers,
    row_words,
    stacked,
    stored_word,
    whole_codes,
    words_of,
)

_LARGEST = gl.constexpr(16.0)
"""What the largest channel of a query becomes, so that queries times scales are float16 numbers."""
_LEAST_PEAK = gl.constexpr(2.0e-3)
"""Queries times scales that are smaller have the unit of this: 1 over a smaller one is no float16 number."""


@gluon.constexpr_function
def least_of(BITS: int) -> float:
    """What the lowest level counts in sums: the levels above count more."""
    return float(factor_of(BITS) ** -(len(level_codes(BITS)) - 1))


@gluon.constexpr_function
def mean_code(BITS: int) -> int:
    """(2**BITS - 1) / 2, twice as float16 numbers."""
    return {2: 0x3E003E00, 3: 0x43004300, 4: 0x47804780}[BITS]


@gluon.constexpr_function
def most_of(BITS: int) -> float:
    """Integer that the largest product becomes, so that all of them, made up for lower codes, are bytes."""
    return 101.0 if BITS == 2 else 119.0


@gluon.jit
def load_queries(q_ptr: gl.tensor, row: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Queries, pairs of float16 numbers [8, 4, W / 2] for each eight columns and each code; and what one is, [X].

    P: that all of them stand beside each other.
    """
    W: gl.constexpr = words_of(K.DIM, K.BITS)
    r, q, own = lanes(W)
    queries: gl.tensor = ()
    units: gl.tensor = ()
    for columns in gl.static_range(K.X // 8):
        n = (r + 8 * columns) % (K.X // K.P)
        loaded: gl.tensor = ()
        peaks = gl.full([8, 4, W], 1e-30, gl.float32, layout=register_layout(W))
        for code in gl.static_range(code_count(K.BITS)):
            at = (row * K.GROUP + n) * K.DIM + (q * W + own + code * 4 * W)
            loaded += (gl.load(q_ptr + at, mask=(n < K.GROUP) & (q + own >= 0), other=0.0).to(gl.float32),)
            peaks = gl.maximum(peaks, gl.abs(loaded[code]))
        unit = gl.max(gl.max(peaks, 2), 1) / _LARGEST
        by = gl.expand_dims(gl.expand_dims(1.0 / unit, 1), 2)
        pairs: gl.tensor = ()
        for code in gl.static_range(code_count(K.BITS)):
            both = gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $3, $2; mov.b32 $1, $0;",
                "=&r,=&r,r,r", [loaded[code] * by], dtype=gl.int32, is_pure=True, pack=2,
            )  # fmt: skip
            pairs += (halved(both, W)[0],)
        queries += (pairs,)
        units += (unit,)
    return queries, joined(units, K)


@gluon.jit
def load_steps(keys_ptrs: gl.tensor, block: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Scales and offsets of a block of keys, pairs as queries are: nothing waits for them before they are folded."""
    W: gl.constexpr = words_of(K.DIM, K.BITS)
    r, q, own = lanes(W // 2)
    steps: gl.tensor = ()
    for part in gl.static_range(1, 3):
        pairs_ptr = gl.multiple_of(keys_ptrs[part].to(gl.pointer_type(gl.int32)) + block * (K.DIM // 2), 16)
        loaded: gl.tensor = ()
        for code in gl.static_range(code_count(K.BITS)):
            at = q * (W // 2) + (own + code * 2 * W) + r * 0
            loaded += (gl.load(pairs_ptr + at),)
        steps += (loaded,)
    return steps


@gluon.jit
def largest(pairs: gl.tensor, W: gl.constexpr) -> gl.tensor:
    """The largest of float16 numbers, by amount, of all channels, [8] float32. pairs: [8, 4, W / 2] for each code."""
    found = pairs[0]
    for code in gl.static_range(1, len(pairs)):
        found = larger(found, pairs[code])
    found = narrowed(found, W // 2)
    numbers = gl.inline_asm_elementwise(
        "{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, $1; abs.f16 l, l; abs.f16 h, h; max.f16 l, l, h; "
        "cvt.f32.f16 $0, l; }",
        "=r,r", [found], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, register_layout(W // 2)))
    return gl.convert_layout(gl.max(gl.max(numbers, 2), 1), OF_COLUMNS, assert_trivial=True)


@gluon.jit
def larger(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b32 u; abs.f16x2 t, $1; abs.f16x2 u, $2; max.f16x2 $0, t, u; }",
        "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def narrowed(pairs: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    if COUNT == 1:
        return pairs
    else:  # noqa: RET505 - the other branch is not compiled
        even, odd = halved(pairs, COUNT)
        return narrowed(larger(even, odd), COUNT // 2)


@gluon.constexpr_function
def rounding(factor: int) -> str:
    """PTX that rounds $3 * $4 + $5 to integers n, as the lowest bytes of float16 numbers 1536 + n.

    $1: what the level below adds for it, in these: -(n - $5) / factor. $2: what was lost.
    """
    over = {4: "0xb400b400", 16: "0xac00ac00"}[factor]
    return (
        "{ .reg .b32 t; .reg .b32 n; .reg .b32 m; .reg .b32 f; mov.b32 m, 0x66006600; mov.b32 f, "
        + over
        + "; "
        "fma.rn.f16x2 t, $3, $4, $5; add.f16x2 $0, t, m; sub.f16x2 n, $0, m; sub.f16x2 $2, t, n; sub.f16x2 n, n, $5; "
        "mul.f16x2 $1, n, f; }"
    )


@gluon.jit
def rounded(
    product: gl.tensor, inverse: gl.tensor, above: gl.tensor, W: gl.constexpr, K: gl.constexpr
) -> gl.tensor:
    """Bytes of a level's queries, W / 4 registers [8, 4]; what the level below adds; and what was lost, pairs.

    product: pairs, queries times scales; inverse: 1 over their unit; above: what the level above adds.
    """
    found, below, lost = gl.inline_asm_elementwise(
        rounding(factor_of(K.BITS)), "=&r,=&r,=&r,r,r,r", [product, inverse, above],
        dtype=(gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    first, second = halved(found, W // 2)
    packed = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )
    return registers(packed, W // 4), below, lost


@gluon.jit
def fold(queries: gl.tensor, steps: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Queries times a block's scales, as bytes by columns, codes and words; what one is, and what offsets add, [X].

    Both are in units of the queries as they were loaded.
    """
    W: gl.constexpr = words_of(K.DIM, K.BITS)
    CODES: gl.constexpr = code_count(K.BITS)
    LEVELS: gl.constexpr = level_codes(K.BITS)
    PAIRS: gl.constexpr = register_layout(W // 2)
    folded: gl.tensor = ()
    units: gl.tensor = ()
    added: gl.tensor = ()
    missing: gl.tensor = ()
    for columns in gl.static_range(K.X // 8):
        products: gl.tensor = ()
        for code in gl.static_range(CODES):
            products += (
                gl.inline_asm_elementwise(
                    "mul.f16x2 $0, $1, $2;", "=r,r,r", [queries[columns][code], steps[0][code]],
                    dtype=gl.int32, is_pure=True, pack=1,
                ),
            )  # fmt: skip
        peak = gl.maximum(largest(products, W), _LEAST_PEAK)
        # A float16 number, twice: what is a unit is 1 over that one.
        inverse = gl.inline_asm_elementwise(
            "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, h}; }",
            "=r,r", [most_of(K.BITS) / peak], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        number = gl.inline_asm_elementwise(
            "{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
            "=r,r", [inverse], dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        units += (least_of(K.BITS) / number,)
        nothing = gl.full([8, 4, W // 2], 0, gl.int32, layout=PAIRS)
        twice, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(inverse, 1), 2), nothing)
        above: gl.tensor = ()
        for _ in gl.static_range(len(LEVELS[0])):
            above += (nothing,)
        own: gl.tensor = ()  # from the highest level down
        lost: gl.tensor = ()
        for level in gl.static_range(len(LEVELS)):
            below: gl.tensor = ()
            for part in gl.static_range(len(LEVELS[0])):
                product = products[LEVELS[len(LEVELS) - 1 - level][part]]
                found, more, less = rounded(product, twice, above[part], W, K)
                own += (found,)
                below += (more,)
                lost += (less,)
            above = below
        folded += (own,)
        added += (summed(queries[columns], steps[1], W),)
        # Of codes that are as large as they are on average; what is lost by the others differs from key to key.
        average = gl.full([8, 4, W // 2], mean_code(K.BITS), gl.int32, layout=PAIRS)
        means: gl.tensor = ()
        for _ in gl.static_range(CODES):
            means += (average,)
        missing += (summed(lost, means, W),)
    units_of_rows = joined(units, K)
    return (
        folded,
        units_of_rows,
        joined(added, K) + joined(missing, K) * (units_of_rows * (1 / least_of(K.BITS))),
    )


@gluon.jit
def summed(queries: gl.tensor, offsets: gl.tensor, W: gl.constexpr) -> gl.tensor:
    """Queries times offsets, summed, [8] float32 in a result's columns. Both: pairs for each code."""
    zero = gl.full([8, 4], 0.0, gl.float32, layout=REGISTER)
    sums = (zero, zero, zero, zero)
    for code in gl.static_range(len(queries)):
        own, rows = registers(queries[code], W // 2), registers(offsets[code], W // 2)
        for pair in gl.static_range(W // 4):
            sums = gl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $4, $5, $5}, {$6, $7}, "
                "{$8, $9, $10, $11};",
                "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
                [
                    rows[2 * pair], rows[2 * pair + 1], own[2 * pair], own[2 * pair + 1],
                    sums[0], sums[1], sums[2], sums[3],
                ],
                dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    return gl.max(as_rows(sums), 0)


@gluon.jit
def joined(parts: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Numbers of query rows, eight at a time, as [X]."""
    if K.X == 8:
        return gl.convert_layout(parts[0], OF_ROWS)
    else:  # noqa: RET505 - the other branch is not compiled
        first = gl.convert_layout(parts[0], gl.SliceLayout(0, RESULT))
        second = gl.convert_layout(parts[1], gl.SliceLayout(0, RESULT))
        return gl.convert_layout(gl.reshape(gl.permute(gl.join(first, second), [1, 0]), [16]), OF_ROWS)


@gluon.jit
def key_of(row: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Which of T consecutive keys a tile's row is: a lane's rows are neighbours, whose numbers it loads together."""
    return row % 8 * (T // 8) + row // 8


@gluon.constexpr_function
def key_layout(T: int, DIM: int, BITS: int) -> gl.DistributedLinearLayout:
    """Of words of keys as they come: four lanes have a key."""
    words, thirds = words_of(DIM, BITS), [] if BITS != 3 else [[0, words_of(DIM, BITS)]]
    own = [[0, 1 << bit] for bit in range(bits_of(words) - 2)]
    lanes = [[0, words // 4], [0, words // 2], [1, 0], [2, 0], [4, 0]]
    held = held_words(DIM, BITS)
    return gl.DistributedLinearLayout([*own, *thirds, *key_registers(T)], lanes, [], [], [T, held])


@gluon.jit
def word_pointers(ptr: gl.tensor, base: gl.tensor, K: gl.constexpr, LANES: gl.constexpr) -> gl.tensor:
    """To the words of T rows of codes from `base` on, [T, words as they come] in the order of `key_of`."""
    ROW: gl.constexpr = row_words(K.DIM, K.BITS)
    key = key_of(gl.arange(0, K.T, layout=gl.SliceLayout(1, LANES)), K.T)
    word = gl.arange(0, held_words(K.DIM, K.BITS), layout=gl.SliceLayout(0, LANES))
    ptr = gl.multiple_of(ptr + base.to(gl.int64) * ROW, 16)
    at = gl.expand_dims(key * ROW, 1) + gl.expand_dims(stored_word(word, K.DIM, K.BITS), 0)
    return ptr + at


@gluon.jit
def load_key_words(ptr: gl.tensor, base: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Words of T keys from `base` on."""
    return gl.load(word_pointers(ptr, base, K, key_layout(K.T, K.DIM, K.BITS)))


@gluon.jit
def key_sources(words: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Words of keys as registers [8, 4], by eights of keys, of what a level's codes are in, W / 4 each."""
    W: gl.constexpr = words_of(K.DIM, K.BITS)
    EACH: gl.constexpr = W // 4
    sources: gl.tensor = ()
    if K.BITS == 3:
        parts = gl.permute(gl.reshape(words, [K.T // 8, 8, 2, 4, EACH]), [1, 3, 0, 2, 4])
        own = registers(gl.reshape(parts, [8, 4, K.T // 4 * EACH]), K.T // 4 * EACH)
        q = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, REGISTER)), 0)
        for eight in gl.static_range(K.T // 8):
            even: gl.tensor = ()
            odd: gl.tensor = ()
            for word in gl.static_range(EACH):
                low = own[eight * 2 * EACH + word]
                # The upper half of the words has its third bits one place above its codes'.
                third = own[(eight * 2 + 1) * EACH + word] >> (q // 2)
                both = whole_codes(low, third)
                even += (both[0],)
                odd += (both[1],)
            sources += ((even, odd),)
    else:
        parts = gl.permute(gl.reshape(words, [K.T // 8, 8, 4, EACH]), [1, 2, 0, 3])
        own = registers(gl.reshape(parts, [8, 4, K.T // 8 * EACH]), K.T // 8 * EACH)
        for eight in gl.static_range(K.T // 8):
            one: gl.tensor = ()
            for word in gl.static_range(EACH):
                one += (own[eight * EACH + word],)
            sources += ((one,),)
    return sources


@gluon.jit
def multiply_bytes(
    upper: gl.tensor,
    lower: gl.tensor,
    folded: gl.tensor,
    sums: gl.tensor,
    EACH: gl.constexpr,
    MASK: gl.constexpr,
) -> gl.tensor:
    """Adds products of the keys of two eights, `upper` and `lower` words, masked, with bytes of queries."""
    for step in gl.static_range(EACH // 2):
        sums = gl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [
                upper[2 * step] & MASK, lower[2 * step] & MASK, upper[2 * step + 1] & MASK, lower[2 * step + 1] & MASK,
                folded[2 * step], folded[2 * step + 1], sums[0], sums[1], sums[2], sums[3],
            ],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return sums


@gluon.jit
def times(sums: gl.tensor, BY: gl.constexpr) -> gl.tensor:
    return sums[0] * BY, sums[1] * BY, sums[2] * BY, sums[3] * BY


@gluon.jit
def of_part(folded: gl.tensor, part: gl.constexpr, K: gl.constexpr) -> gl.tensor:
    """Bytes of queries by columns, codes and words; 0 but in the part-th of P shares of eight columns."""
    if K.P == 1:
        return folded
    else:  # noqa: RET505 - the other branch is not compiled
        r = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, REGISTER)), 1)
        own: gl.tensor = ()
        for code in gl.static_range(len(folded[0])):
            words: gl.tensor = ()
            for word in gl.static_range(len(folded[0][0])):
                words += (gl.where(r // (8 // K.P) == part, folded[0][code][word], 0),)
            own += (words,)
        return (own,)


@gluon.jit
def multiply_keys(tiles: gl.tensor, folded: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Products [T, X] float32 of one or two tiles of keys, as words, with folded queries, added up.

    folded: for each tile. In units of `fold`.
    """
    EACH: gl.constexpr = words_of(K.DIM, K.BITS) // 4
    LEVELS: gl.constexpr = level_codes(K.BITS)
    sources: gl.tensor = ()
    for part in gl.static_range(len(tiles)):
        sources += (key_sources(tiles[part], K),)
    zero = gl.full([8, 4], 0, gl.int32, layout=REGISTER)
    by_columns: gl.tensor = ()
    for columns in gl.static_range(K.X // 8):
        by_rows: gl.tensor = ()
        for sixteen in gl.static_range(K.T // 16):
            sums = (zero, zero, zero, zero)
            for level in gl.static_range(len(LEVELS)):
                if level > 0:
                    sums = times(sums, factor_of(K.BITS))
                for part in gl.static_range(len(tiles)):
                    own = folded[part][columns]
                    for each in gl.static_range(len(LEVELS[0])):
                        upper, lower = sources[part][2 * sixteen][each], sources[part][2 * sixteen + 1][each]
                        bytes_ = own[(len(LEVELS) - 1 - level) * len(LEVELS[0]) + each]
                        sums = multiply_bytes(upper, lower, bytes_, sums, EACH, level_mask(K.BITS, level))
            by_rows += (as_rows(sums),)
        by_columns += (stacked(by_rows, K.T),)
    return beside(by_columns, K.T, K.X).to(gl.float32)
