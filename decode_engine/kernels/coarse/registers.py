"""Where numbers stand in kernels of one warp: layouts of tensor cores, registers of lanes, and channels in operands.

Operands take 16 columns (of keys) or rows (of values) at a time, the channels of a plane. Which these are follows from
the words that a lane has of a row, and from where a code is in a word: each bit of a channel's number is one of its
plane's number, or of its place's in that plane. What is called places here says which: the bits of channels that are
those of planes, and those that are those of places in a plane, both from the lowest on.

In a row of W words, as `index_store.indexes.coarse_rows.scalar_rows` packs it, code i of byte j is of channel
j + i * 4 W, and the two lowest bits of j are a byte's in its word. Four lanes share a key, and eight a value: the upper
bits of a word's number tell them apart, and what is left over of a channel's number is a lane's own.

Codes of 3 bits have W words with their two low bits, and behind them W / 2 with the third: word w has those of words w
and w + W / 2, at the places of their codes and at those above. So a row comes as 2 W words, with the third bits twice,
and a lane that has word w has what belongs to it in word W + w.

Shape legend: as in `value_tiles`; E entries of a tile; C codes of a byte.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PRODUCT = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
RESULT = gl.constexpr(_PRODUCT)
LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT, 2))
OF_KEYS = gl.constexpr(gl.SliceLayout(1, _PRODUCT))
"""Of numbers of a tile's keys, [T], beside a result [T, X]."""
OF_ROWS = gl.constexpr(gl.SliceLayout(0, _PRODUCT))
"""Of numbers of query rows, [X], beside a result [T, X] or [16, X]."""


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


@gluon.constexpr_function
def low_bits(BITS: int) -> int:
    """Of codes, that lie in a row's first W words."""
    return 4 if BITS == 4 else 2


@gluon.constexpr_function
def words_of(DIM: int, BITS: int) -> int:
    """W."""
    return int(DIM * low_bits(BITS) // 32)


@gluon.constexpr_function
def row_words(DIM: int, BITS: int) -> int:
    """Of a row as it is stored."""
    return DIM * BITS // 32


@gluon.constexpr_function
def held_words(DIM: int, BITS: int) -> int:
    """Of a row as it comes: third bits are there twice."""
    return int(words_of(DIM, BITS) * (2 if BITS == 3 else 1))


@gluon.jit
def stored_word(word: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Which word of a stored row one of a row as it comes is."""
    if BITS == 3:
        return gl.where(word < row_words(DIM, BITS), word, word - words_of(DIM, BITS) // 2)
    else:  # noqa: RET505 - the other branch is not compiled
        return word


@gluon.constexpr_function
def plane_count(DIM: int) -> int:
    return DIM // 16


@gluon.constexpr_function
def bits_of(number: int) -> int:
    """log2 of a power of two."""
    return number.bit_length() - 1


@gluon.constexpr_function
def value_places(DIM: int, BITS: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of codes of values, rows of the left operand: place 3 is a lane's, the others tell eight lanes apart."""
    word = bits_of(words_of(DIM, BITS))
    own = (*range(word + 2, bits_of(DIM)), *range(word - 1))
    return own[:-1], (word - 1, word, word + 1, own[-1])


@gluon.constexpr_function
def row_places(DIM: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of rows of keys as they are, 8 channels of a lane next to each other."""
    return (2, *range(5, bits_of(DIM))), (0, 3, 4, 1)


@gluon.constexpr_function
def first_channel(plane: int, places: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """Of a plane."""
    return sum((plane >> bit & 1) << at for bit, at in enumerate(places[0]))


@gluon.constexpr_function
def group_of(plane: int, DIM: int, BITS: int, GROUPS: int) -> int:
    """Which group of channels of values a plane is of; GROUPS: 1 or 2."""
    first: int = first_channel(plane, value_places(DIM, BITS))
    return first * GROUPS // DIM


@gluon.constexpr_function
def step_of(bit: int, places: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """How many channels lie between two places in a plane that differ by a bit."""
    return 1 << places[1][bit]


@gluon.jit
def channels_of(plane: gl.constexpr, place: gl.tensor, PLACES: gl.constexpr) -> gl.tensor:
    """Channels of places in a plane."""
    channel = (place & 1) * step_of(0, PLACES) + first_channel(plane, PLACES)
    for bit in gl.static_range(1, 4):
        channel += ((place >> bit) & 1) * step_of(bit, PLACES)
    return channel


@gluon.constexpr_function
def shape_by_bits(E: int, DIM: int) -> list[int]:
    """Of numbers [E, DIM] with an axis for each of eight bits of a channel's number, from the highest on."""
    return [E] + [1] * (8 - bits_of(DIM)) + [2] * bits_of(DIM)


@gluon.constexpr_function
def shape_by_planes(E: int, DIM: int) -> list[int]:
    """Of numbers [16, E] with an axis more for each bit of a plane's number, from the highest on."""
    return [16, E] + [2] * bits_of(plane_count(DIM))


@gluon.constexpr_function
def axes_of(DIM: int, places: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    """Axes of places in a plane, and of planes, each from the highest bit on."""
    missing = range(bits_of(DIM), 8)
    return [8 - bit for bit in (*reversed(places[1]), *missing, *reversed(places[0]))]


@gluon.jit
def as_planes(numbers: gl.tensor, E: gl.constexpr, DIM: gl.constexpr, PLACES: gl.constexpr) -> gl.tensor:
    """Numbers of channels [E, DIM] as [16, E] for each plane; they stay where they are."""
    AXES: gl.constexpr = axes_of(DIM, PLACES)
    bits = gl.permute(
        gl.reshape(numbers, shape_by_bits(E, DIM)),
        [AXES[0], AXES[1], AXES[2], AXES[3], 0, AXES[4], AXES[5], AXES[6], AXES[7]],
    )
    return apart(gl.reshape(bits, shape_by_planes(E, DIM)), plane_count(DIM))


@gluon.jit
def apart(numbers: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """Numbers [x, y, 2, 2, ...] as COUNT tensors [x, y]."""
    if COUNT == 1:
        return (numbers,)
    else:  # noqa: RET505 - the other branch is not compiled
        even, odd = gl.split(numbers)
        evens, odds = apart(even, COUNT // 2), apart(odd, COUNT // 2)
        found: gl.tensor = ()
        for pair in gl.static_range(COUNT // 2):
            found += (evens[pair], odds[pair])
        return found


@gluon.constexpr_function
def key_registers(T: int) -> list[list[int]]:
    """Bases of the registers that tell the keys of one column apart: 8, 16, ... of a tile's rows."""
    return [[8 << bit, 0] for bit in range(bits_of(T) - 3)]


@gluon.constexpr_function
def key_row_layout(E: int, DIM: int) -> gl.DistributedLinearLayout:
    """Of rows of keys [E, DIM], E = 16."""
    planes, own = row_places(DIM)
    registers = [[0, 1 << bit] for bit in sorted((*planes, own[0], own[3]))]
    lanes = [[0, 1 << own[1]], [0, 1 << own[2]], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*registers, [8, 0]], lanes, [], [], [E, DIM])


@gluon.constexpr_function
def value_row_layout(E: int, DIM: int, BITS: int) -> gl.DistributedLinearLayout:
    """Of rows of values [E, DIM], E = 16, beside values in codes of so many bits."""
    planes, own = value_places(DIM, BITS)
    registers = [[0, 1 << bit] for bit in sorted((*planes, own[3]))]
    lanes = [[2, 0], [4, 0], *([0, 1 << bit] for bit in own[:3])]
    return gl.DistributedLinearLayout([*registers, [1, 0], [8, 0]], lanes, [], [], [E, DIM])


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
