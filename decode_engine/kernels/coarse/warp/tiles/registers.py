"""Numbers of a warp's lanes, a register of each at a time, and which codes lie at which level of a byte.

Shape legend: as in `key_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.tiles.channel_places import apart, bits_of, low_bits
from decode_engine.kernels.coarse.warp.tiles.operands import RESULT

_LANES = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
REGISTER = gl.constexpr(gl.DistributedLinearLayout([], _LANES, [], [], [8, 4]))
"""Of numbers [8, 4], one of each lane."""


@gluon.constexpr_function
def register_layout(count: int) -> gl.DistributedLinearLayout:
    """Of so many registers of each lane, [8, 4, count], a power of two."""
    own = [[0, 0, 1 << bit] for bit in range(bits_of(count))]
    return gl.DistributedLinearLayout(own, [[*lane, 0] for lane in _LANES], [], [], [8, 4, count])


@gluon.constexpr_function
def code_count(BITS: int) -> int:
    """C."""
    return int(8 // low_bits(BITS))


@gluon.constexpr_function
def factor_of(BITS: int) -> int:
    """What one level of codes counts beside the level below: those of bits 0, or masked below 4 or 2 bits more."""
    return 4 if BITS == 2 else 16


@gluon.constexpr_function
def level_codes(BITS: int) -> tuple[tuple[int, ...], ...]:
    """By levels, from the lowest: numbers of the codes that are multiplied at it."""
    return {4: ((0,), (1,)), 3: ((0, 1), (2, 3)), 2: ((0,), (1,), (2,), (3,))}[BITS]


@gluon.constexpr_function
def level_mask(BITS: int, level: int) -> int:
    """Of a word's bytes, up to a level, as a signed number; -1 where nothing is masked."""
    byte = {4: (0x0F, 0xFF), 3: (0x07, 0xFF), 2: (0x03, 0x0F, 0x3F, 0xFF)}[BITS][level]
    mask = byte * 0x01010101
    return int(mask - 2**32 if mask >= 2**31 else mask)


@gluon.constexpr_function
def by_bits(count: int) -> list[int]:
    """[8, 4] with an axis more for each bit of a register's number."""
    return [8, 4] + [2] * bits_of(count)


@gluon.jit
def registers(numbers: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """Numbers [8, 4, COUNT] as COUNT tensors [8, 4]."""
    parts = apart(gl.reshape(numbers, by_bits(COUNT)), COUNT)
    found: gl.tensor = ()
    for part in gl.static_range(COUNT):
        found += (gl.convert_layout(parts[part], REGISTER, assert_trivial=True),)
    return found


@gluon.jit
def halved(numbers: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """Even and odd ones of [8, 4, COUNT] int32."""
    HALF: gl.constexpr = register_layout(COUNT // 2)
    even, odd = gl.split(gl.reshape(numbers, [8, 4, COUNT // 2, 2]))
    return gl.convert_layout(even, HALF, assert_trivial=True), gl.convert_layout(
        odd, HALF, assert_trivial=True
    )


@gluon.jit
def whole_codes(low: gl.tensor, third: gl.tensor) -> gl.tensor:
    """Words of codes of 3 bits, in fields of 4: codes 0 and 2 of each byte of low bits, and codes 1 and 3.

    low, third: words of two low bits each, and of third bits at the places of their codes' lowest.
    """
    even = (low & 0x33333333) | ((third << 2) & 0x44444444)
    return even, ((low >> 2) & 0x33333333) | (third & 0x44444444)


@gluon.jit
def lanes(COUNT: gl.constexpr) -> gl.tensor:
    """r, q and the number of a register, each [8, 4, COUNT] int32 by broadcasting."""
    LAYOUT: gl.constexpr = register_layout(COUNT)
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    q = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    own = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return (
        gl.expand_dims(gl.expand_dims(r, 1), 2),
        gl.expand_dims(gl.expand_dims(q, 0), 2),
        gl.expand_dims(gl.expand_dims(own, 0), 1),
    )


@gluon.jit
def as_rows(numbers: gl.tensor) -> gl.tensor:
    """Four registers of a result as [16, 8]."""
    rows = gl.join(gl.join(numbers[0], numbers[1]), gl.join(numbers[2], numbers[3]))
    placed = gl.reshape(gl.permute(rows, [3, 0, 1, 2]), [16, 8])
    return gl.convert_layout(placed, RESULT, assert_trivial=True)


@gluon.jit
def stacked(parts: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Parts [16, 8] of a result as [T, 8]."""
    if T == 16:
        return parts[0]
    else:  # noqa: RET505 - the other branch is not compiled
        if T == 32:
            both = gl.join(parts[0], parts[1])
        else:
            first, second = gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3])
            both = gl.reshape(gl.permute(gl.join(first, second), [0, 1, 3, 2]), [16, 8, 4])
        return gl.convert_layout(gl.reshape(gl.permute(both, [2, 0, 1]), [T, 8]), RESULT, assert_trivial=True)


@gluon.jit
def beside(parts: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Parts [T, 8] of a result as [T, X]."""
    if X == 8:
        return parts[0]
    else:  # noqa: RET505 - the other branch is not compiled
        both = gl.permute(gl.join(parts[0], parts[1]), [0, 2, 1])
        return gl.convert_layout(gl.reshape(both, [T, X]), RESULT, assert_trivial=True)
