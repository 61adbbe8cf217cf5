"""Tiles of coded values in the registers of one warp, and products of weights with them on tensor cores.

Codes are loaded in the very layout in which the tensor cores take their operands, and unpacked there: both codes at a
bit of a register's halves together, by one mask. What is left are the lowest bits of float16 numbers, f * code * 2**-24
with f a power of two, and tensor cores take these as they are; what is beyond such bits is shifted there first. Their
sums drop what is below the last bit instead of rounding it, which adds up: nothing larger than the codes may be in
them. A warp waits for nobody else. Which channels operands take at a time, a plane of 16, only `channel_places` knows.

Codes of 3 bits are made whole before: a word of two low bits each and one of third bits at the same places become two
words of codes in fields of four bits, with a stranger's bit in each that masks pass over.

Scales and offsets of values fold into the weights, as in `coded_tiles`.

Shape legend: T keys of a tile, X query rows, a multiple of 8; W words of a row of codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.coarse.warp.tiles.channel_places import (
    apart,
    bits_of,
    channels_of,
    group_of,
    held_words,
    key_registers,
    low_bits,
    plane_count,
    value_places,
    words_of,
)

_PRODUCT = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
RESULT = gl.constexpr(_PRODUCT)
LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT, 2))
OF_KEYS = gl.constexpr(gl.SliceLayout(1, _PRODUCT))
"""Of numbers of a tile's keys, [T], beside a result [T, X]."""
OF_ROWS = gl.constexpr(gl.SliceLayout(0, _PRODUCT))
"""Of numbers of query rows, [X], beside a result [T, X] or [16, X]."""

_LEAST = 2.0**-24
"""What the lowest bit of a float16 number stands for where all higher ones are 0."""
_EITHER = "0xe4"
"""Of `lop3`: bits of its first operand where the third has ones, and of the second one where it has none."""


@gluon.constexpr_function
def codes_of(bits: int) -> int:
    """In half a word."""
    return int(16 // low_bits(bits))


@gluon.constexpr_function
def _field(bits: int) -> int:
    """Bits from a code to the next one that is masked in the same register."""
    return 2 if bits == 2 else 4


@gluon.constexpr_function
def _reach(bits: int) -> int:
    """Bits of a register's half in which codes are masked where they are: two of 4 bits, or five of 2 bits."""
    return 8 if _field(bits) == 4 else 10


@gluon.constexpr_function
def _masked(bits: int, source: str, targets: range) -> str:
    """PTX that makes pairs of numbers of all fields in both halves of a register."""
    shift, lines = 0, []
    for target, at in zip(targets, range(0, 16, _field(bits)), strict=True):
        if at >= _reach(bits) and not shift:
            shift = _reach(bits)
            lines.append(f"shr.b32 t, {source}, {shift};")
        mask = ((1 << bits) - 1) << (at - shift)
        taken = "t" if shift else source
        lines.append(f"and.b32 ${target}, {taken}, 0x{mask * 0x00010001:08x};")
    return " ".join(lines)


@gluon.constexpr_function
def _numbers(bits: int, source: str, third: str, first: int) -> str:
    """PTX that makes pairs of numbers of all codes in both halves of a register, in the order of their bits.

    third: has third bits where the source has their codes' lowest ones.
    """
    codes = codes_of(bits)
    if bits != 3:
        return str(_masked(bits, source, range(first, first + codes)))
    even = f"shl.b32 t, {third}, 2; lop3.b32 e, {source}, t, 0x33333333, {_EITHER};"
    odd = f"shr.b32 t, {source}, 2; lop3.b32 o, t, {third}, 0x33333333, {_EITHER};"
    evens, odds = (range(first + part, first + codes, 2) for part in range(2))
    return f"{even} {_masked(bits, 'e', evens)} {odd} {_masked(bits, 'o', odds)}"


@gluon.constexpr_function
def _joined(lines: list[str]) -> str:
    registers = "".join(f".reg .b32 {name}; " for name in "teoxy")
    return f"{{ {registers}{' '.join(lines)} }}"


@gluon.constexpr_function
def unpack_values(BITS: int) -> str:
    """PTX over the same word of two keys, and over those with its third bits."""
    codes, lines = codes_of(BITS), []
    words, thirds = ([f"${2 * codes + number}" for number in pair] for pair in ((0, 1), (2, 3)))
    for half, selected in enumerate(("5410", "7632")):
        lines.append(f"prmt.b32 x, {words[0]}, {words[1]}, 0x{selected};")
        if BITS == 3:
            lines.append(f"prmt.b32 y, {thirds[0]}, {thirds[1]}, 0x{selected};")
        lines.append(_numbers(BITS, "x", "y", half * codes))
    return str(_joined(lines))


@gluon.constexpr_function
def registers_of(BITS: int) -> str:
    """Constraints of what unpacks."""
    return str("=r," * (2 * codes_of(BITS)) + ("r,r,r,r" if BITS == 3 else "r,r"))


@gluon.constexpr_function
def exponent_of(plane: int, BITS: int) -> int:
    """log2 of the f that codes of a plane are multiplied with."""
    number = plane % codes_of(BITS)
    at = (number // 2 if BITS == 3 else number) * _field(BITS)
    return int(at if at < _reach(BITS) else at - _reach(BITS))


@gluon.constexpr_function
def unit_of(plane: int, BITS: int) -> float:
    """What sums of a plane's codes are multiplied with."""
    return float(2.0 ** -exponent_of(plane, BITS) / _LEAST)


@gluon.constexpr_function
def numbers_of(BITS: int) -> tuple[gl.dtype, ...]:
    """Types of what unpacks."""
    return tuple(gl.float16 for _ in range(2 * codes_of(BITS)))


@gluon.constexpr_function
def value_layout(T: int, DIM: int, BITS: int, KEYS_FIRST: bool) -> gl.DistributedLinearLayout:
    """Of words of values as they come: a lane has the words of four keys that it needs, of each 8."""
    words, thirds = words_of(DIM, BITS), [] if BITS != 3 else [[0, words_of(DIM, BITS)]]
    own = [[0, 1 << bit] for bit in range(bits_of(words) - 3)]
    lanes = [[2, 0], [4, 0], [0, words // 8], [0, words // 4], [0, words // 2]]
    registers = [[1, 0], *own, *thirds] if KEYS_FIRST else [*own, *thirds, [1, 0]]
    held = held_words(DIM, BITS)
    return gl.DistributedLinearLayout([*registers, *key_registers(T)], lanes, [], [], [T, held])


@gluon.constexpr_function
def without_thirds(layout: gl.DistributedLinearLayout) -> gl.DistributedLinearLayout:
    """Of the first half of the words."""
    rows, words = layout.shape
    registers = [base for base in layout.reg_bases if base[1] != words // 2]
    return gl.DistributedLinearLayout(registers, layout.lane_bases, [], [], [rows, words // 2])


@gluon.jit
def unpacked(
    words: gl.tensor,
    T: gl.constexpr,
    W: gl.constexpr,
    BITS: gl.constexpr,
    ASM: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Numbers [T, W] of the codes at each bit of both halves of words, two neighbours' at a time.

    words: as they come. LAYOUT: in which two are neighbours.
    """
    words = gl.convert_layout(words, LAYOUT)
    if BITS == 3:
        LOW: gl.constexpr = without_thirds(LAYOUT)
        low, third = gl.split(gl.permute(gl.reshape(words, [T, 2, W]), [0, 2, 1]))
        # The upper half of the words has its third bits one place above its codes'.
        above = gl.arange(0, W, layout=gl.SliceLayout(0, LOW)) // (W // 2)
        third = gl.convert_layout(third, LOW, assert_trivial=True) >> gl.expand_dims(above, 0)
        sources = [gl.convert_layout(low, LOW, assert_trivial=True), third]
    else:
        sources = [words]
    return gl.inline_asm_elementwise(
        ASM, registers_of(BITS), sources, dtype=numbers_of(BITS), is_pure=True, pack=2
    )


@gluon.constexpr_function
def by_words(lanes: list[int], words: int) -> list[int]:
    """A shape of numbers with an axis for each bit of so many words of a lane."""
    return [*lanes] + [2] * bits_of(words)


@gluon.jit
def value_planes(words: gl.tensor, T: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Codes of values, as words, by planes [16, T]."""
    W: gl.constexpr = words_of(DIM, BITS)
    OWN: gl.constexpr = W // 8
    parts: gl.tensor = ()
    numbers = unpacked(words, T, W, BITS, unpack_values(BITS), value_layout(T, DIM, BITS, True))
    by_word: gl.tensor = ()
    for part in gl.static_range(len(numbers)):
        by_word += (apart(gl.reshape(numbers[part], by_words([T, 8], OWN)), OWN),)
    for word in gl.static_range(OWN):
        for part in gl.static_range(len(numbers)):
            parts += (by_word[part][word],)
    planes: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        both = gl.permute(gl.join(parts[plane], parts[plane + plane_count(DIM)]), [2, 1, 0])
        planes += (gl.reshape(both, [16, T]),)
    return planes


@gluon.jit
def as_right(weights: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Weights [T, X] of 16 bits in a result's layout, as the right operand."""
    blocks = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [weights],
        dtype=weights.dtype,
        is_pure=True,
        pack=2,
    )
    turned = gl.permute(gl.reshape(blocks, [T // 8, 8, X // 8, 8]), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(turned, [T, X]), RIGHT, assert_trivial=True)


@gluon.jit
def no_values_yet(X: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Sums of planes [16, X], before the first tile."""
    zero = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
    sums: gl.tensor = ()
    for _ in gl.static_range(plane_count(DIM)):
        sums += (zero,)
    return sums


@gluon.jit
def add_values(
    sums: gl.tensor,
    words: gl.tensor,
    weights: gl.tensor,
    T: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds values, as words, by weights for each group of channels, right operands [T, X]."""
    planes = value_planes(words, T, DIM, BITS)
    new: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        values = gl.convert_layout(planes[plane], LEFT, assert_trivial=True)
        new += (mma_v2(values, weights[group_of(plane, DIM, BITS, len(weights))], sums[plane]),)
    return new


@gluon.jit
def values_of(sums: gl.tensor, evens: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Sums of values, by planes, of those of codes; evens: add to all channels of each group, [16, X] of equal rows."""
    plain: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        even = gl.max(evens[group_of(plane, DIM, BITS, len(evens))], 0)
        plain += (sums[plane] * unit_of(plane, BITS) + gl.expand_dims(even, 0),)
    return plain


@gluon.jit
def store_sums(
    sums_ptr: gl.tensor,
    sums: gl.tensor,
    at: gl.tensor,
    there: gl.tensor,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> None:
    """Writes sums of values, by planes, [X, DIM] from places `at` [X] on, where they are there."""
    row = gl.arange(0, 16, layout=OF_KEYS)
    PLACES: gl.constexpr = value_places(DIM, BITS)
    for plane in gl.static_range(plane_count(DIM)):
        channel = channels_of(plane, row, PLACES)
        into = sums_ptr + (gl.expand_dims(at * DIM, 0) + gl.expand_dims(channel, 1))
        gl.store(into, sums[plane], mask=gl.expand_dims(there, 0) & gl.expand_dims(channel >= 0, 1))
