"""Codes in words become float16 numbers by planes, as tensor cores take them, for kernels of one warp.

Both codes at a bit of a register's halves are unpacked together, by one mask. What is left are the lowest bits of
float16 numbers, f * code * 2**-24 with f a power of two; what is beyond such bits is shifted there first. Codes of 3
bits are made whole before: a word of two low bits each and one of third bits at the same places become two words of
codes in fields of four bits, with a stranger's bit in each that masks pass over.

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.warp_places import (
    apart,
    bits_of,
    held_words,
    low_bits,
    plane_count,
    words_of,
)

LEAST = 2.0**-24
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
def unpack_keys(BITS: int) -> str:
    """PTX over two words of a key, and over those with their third bits."""
    codes = codes_of(BITS)
    operands = [f"${2 * codes + number}" for number in range(4)]
    words = [_numbers(BITS, operands[word], operands[2 + word], word * codes) for word in range(2)]
    return str(_joined(words))


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
    return float(2.0 ** -exponent_of(plane, BITS) / LEAST)


@gluon.constexpr_function
def numbers_of(BITS: int) -> tuple[gl.dtype, ...]:
    """Types of what unpacks."""
    return tuple(gl.float16 for _ in range(2 * codes_of(BITS)))


@gluon.constexpr_function
def key_layout(T: int, DIM: int, BITS: int) -> gl.DistributedLinearLayout:
    """Of words of keys as they come: four lanes have a key."""
    words, thirds = words_of(DIM, BITS), [] if BITS != 3 else [[0, words_of(DIM, BITS)]]
    own = [[0, 1 << bit] for bit in range(bits_of(words) - 2)]
    lanes = [[0, words // 4], [0, words // 2], [1, 0], [2, 0], [4, 0]]
    held = held_words(DIM, BITS)
    return gl.DistributedLinearLayout([*own, *thirds, *key_registers(T)], lanes, [], [], [T, held])


@gluon.constexpr_function
def key_registers(T: int) -> list[list[int]]:
    """Bases of the registers that tell the keys of one column apart: 8, 16, ... of a tile's rows."""
    return [[8 << bit, 0] for bit in range(bits_of(T) - 3)]


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
def key_planes(words: gl.tensor, T: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Codes of keys, as words, by planes [T, 16]."""
    W: gl.constexpr = words_of(DIM, BITS)
    PAIRS: gl.constexpr = W // 8
    parts: gl.tensor = ()
    numbers = unpacked(words, T, W, BITS, unpack_keys(BITS), key_layout(T, DIM, BITS))
    by_pair: gl.tensor = ()
    for part in gl.static_range(len(numbers)):
        own = gl.permute(gl.reshape(numbers[part], [T, 4, PAIRS, 2]), [0, 1, 3, 2])
        by_pair += (apart(gl.reshape(own, by_words([T, 8], PAIRS)), PAIRS),)
    for pair in gl.static_range(PAIRS):
        for part in gl.static_range(len(numbers)):
            parts += (by_pair[part][pair],)
    planes: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):  # the highest of a lane's bits is one of a place
        both = gl.permute(gl.join(parts[plane], parts[plane + plane_count(DIM)]), [0, 2, 1])
        planes += (gl.reshape(both, [T, 16]),)
    return planes


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
