"""Tiles of coded keys, and products of queries with them, as tensor cores take bytes.

Codes are multiplied where they lie. A byte holds several: code i of byte j is of channel j + i * 4 W. Tensor cores
multiply whole bytes with 8-bit integers: the byte as it is, and below that with its upper codes masked, one instruction
for all codes of a register. A byte's lower codes then count more than once, which the integers of the lower ones make
up for (`folding`). Sums are exact.

What a lane has is written as tensors [8, 4], a register of each: lane 4 r + q. Which of them instructions take for
which row or column is a matter of PTX (`mma.m16n8k32`): the left operand's rows are r and r + 8, the right one's
columns are r, a result's are 2 q and 2 q + 1; and quarter q of a row's words is lane q's.

Shape legend: as in `value_tiles`; C codes of a byte.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.tiles.channel_places import (
    bits_of,
    held_words,
    key_registers,
    row_words,
    stored_word,
    words_of,
)
from decode_engine.kernels.coarse.warp.tiles.registers import (
    REGISTER,
    as_rows,
    beside,
    factor_of,
    level_codes,
    level_mask,
    registers,
    stacked,
    whole_codes,
)


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
def word_pointers(
    ptr: gl.tensor,
    base: gl.tensor,
    T: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    LANES: gl.constexpr,
) -> gl.tensor:
    """To the words of T rows of codes from `base` on, [T, words as they come] in the order of `key_of`."""
    ROW: gl.constexpr = row_words(DIM, BITS)
    key = key_of(gl.arange(0, T, layout=gl.SliceLayout(1, LANES)), T)
    word = gl.arange(0, held_words(DIM, BITS), layout=gl.SliceLayout(0, LANES))
    ptr = gl.multiple_of(ptr + base.to(gl.int64) * ROW, 16)
    at = gl.expand_dims(key * ROW, 1) + gl.expand_dims(stored_word(word, DIM, BITS), 0)
    return ptr + at


@gluon.jit
def load_key_words(
    ptr: gl.tensor, base: gl.tensor, T: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Words of T keys from `base` on."""
    return gl.load(word_pointers(ptr, base, T, DIM, BITS, key_layout(T, DIM, BITS)))


@gluon.jit
def key_sources(words: gl.tensor, T: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Words of keys as registers [8, 4], by eights of keys, of what a level's codes are in, W / 4 each."""
    W: gl.constexpr = words_of(DIM, BITS)
    EACH: gl.constexpr = W // 4
    sources: gl.tensor = ()
    if BITS == 3:
        parts = gl.permute(gl.reshape(words, [T // 8, 8, 2, 4, EACH]), [1, 3, 0, 2, 4])
        own = registers(gl.reshape(parts, [8, 4, T // 4 * EACH]), T // 4 * EACH)
        q = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, REGISTER)), 0)
        for eight in gl.static_range(T // 8):
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
        parts = gl.permute(gl.reshape(words, [T // 8, 8, 4, EACH]), [1, 2, 0, 3])
        own = registers(gl.reshape(parts, [8, 4, T // 8 * EACH]), T // 8 * EACH)
        for eight in gl.static_range(T // 8):
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
def of_part(folded: gl.tensor, part: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """Bytes of queries by columns, codes and words; 0 but in the part-th of P shares of eight columns."""
    if P == 1:
        return folded
    else:  # noqa: RET505 - the other branch is not compiled
        r = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, REGISTER)), 1)
        own: gl.tensor = ()
        for code in gl.static_range(len(folded[0])):
            words: gl.tensor = ()
            for word in gl.static_range(len(folded[0][0])):
                words += (gl.where(r // (8 // P) == part, folded[0][code][word], 0),)
            own += (words,)
        return (own,)


@gluon.jit
def multiply_keys(
    tiles: gl.tensor,
    folded: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Products [T, X] float32 of one or two tiles of keys, as words, with folded queries, added up.

    folded: for each tile. In units of `fold`.
    """
    EACH: gl.constexpr = words_of(DIM, BITS) // 4
    LEVELS: gl.constexpr = level_codes(BITS)
    sources: gl.tensor = ()
    for part in gl.static_range(len(tiles)):
        sources += (key_sources(tiles[part], T, DIM, BITS),)
    zero = gl.full([8, 4], 0, gl.int32, layout=REGISTER)
    by_columns: gl.tensor = ()
    for columns in gl.static_range(X // 8):
        by_rows: gl.tensor = ()
        for sixteen in gl.static_range(T // 16):
            sums = (zero, zero, zero, zero)
            for level in gl.static_range(len(LEVELS)):
                if level > 0:
                    sums = times(sums, factor_of(BITS))
                for part in gl.static_range(len(tiles)):
                    own = folded[part][columns]
                    for each in gl.static_range(len(LEVELS[0])):
                        upper, lower = sources[part][2 * sixteen][each], sources[part][2 * sixteen + 1][each]
                        bytes_ = own[(len(LEVELS) - 1 - level) * len(LEVELS[0]) + each]
                        sums = multiply_bytes(upper, lower, bytes_, sums, EACH, level_mask(BITS, level))
            by_rows += (as_rows(sums),)
        by_columns += (stacked(by_rows, T),)
    return beside(by_columns, T, X).to(gl.float32)
