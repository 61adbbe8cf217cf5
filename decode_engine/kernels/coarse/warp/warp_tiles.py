"""Tiles of coded keys and values in the registers of one warp, and products with them on tensor cores.

Codes are loaded in the very layout in which the tensor cores take their operands, and unpacked there, two at a time: a
shift and a mask each. What is left are the lowest bits of float16 numbers, f * code * 2**-24 with f a power of two, and
tensor cores take these as they are. Their sums drop what is below the last bit instead of rounding it, which adds up:
nothing larger than the codes may be in them. A warp waits for nobody else.
These functions know codes of 4 and 2 bits whose rows have 8 or 16 words of 32 bits: in heads of 128 channels, and of 64
with 4 bits. Which channels operands take at a time, a plane of 16, follows from the bits of a lane's words, and only
`warp_places` knows it.

Scales and offsets of keys fold into the queries and into one number for each query row, those of values into the
weights, as in `coded_tiles`.

Shape legend: T keys of a tile, X query rows, a multiple of 8; W words of a row of codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.coarse.warp.warp_places import (
    as_planes,
    channel_layout,
    channels_of,
    key_places,
    plane_count,
    value_places,
    words_of,
)

LEAST = 2.0**-24
"""What the lowest bit of a float16 number stands for where all higher ones are 0."""

_PRODUCT = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
RESULT = gl.constexpr(_PRODUCT)
LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT, 2))
OF_KEYS = gl.constexpr(gl.SliceLayout(1, _PRODUCT))
"""Of numbers of a tile's keys, [T], beside a result [T, X]."""
OF_ROWS = gl.constexpr(gl.SliceLayout(0, _PRODUCT))
"""Of numbers of query rows, [X], beside a result [T, X] or [16, X]."""

_LEAST_C = gl.constexpr(LEAST)


def _masked(bits: int, source: str, first: int) -> str:
    """PTX that makes pairs of numbers of all codes in both halves of a register."""
    shift, lines = 0, []
    # Two codes of 4 bits are below the tenth bit, or five of 2 bits.
    reach = 8 if bits == 4 else 10
    for number, at in enumerate(range(0, 16, bits)):
        if at >= reach and not shift:
            shift = reach
            lines.append(f"shr.b32 t, {source}, {shift};")
        mask = ((1 << bits) - 1) << (at - shift)
        taken = "t" if shift else source
        lines.append(f"and.b32 ${first + number}, {taken}, 0x{mask * 0x00010001:08x};")
    return " ".join(lines)


def _unpack_keys(bits: int) -> str:
    """PTX over two words of a key."""
    codes = 16 // bits
    words = (_masked(bits, f"${2 * codes + word}", word * codes) for word in range(2))
    return "{ .reg .b32 t; " + " ".join(words) + " }"


def _unpack_values(bits: int) -> str:
    """PTX over the same word of two keys."""
    codes = 16 // bits
    first, second = f"${2 * codes}", f"${2 * codes + 1}"
    halves = (
        f"prmt.b32 x, {first}, {second}, 0x{selected}; {_masked(bits, 'x', half * codes)}"
        for half, selected in enumerate(("5410", "7632"))
    )
    return "{ .reg .b32 t; .reg .b32 x; " + " ".join(halves) + " }"


_KEYS_4, _KEYS_2 = gl.constexpr(_unpack_keys(4)), gl.constexpr(_unpack_keys(2))
_VALUES_4, _VALUES_2 = gl.constexpr(_unpack_values(4)), gl.constexpr(_unpack_values(2))
_REGISTERS_8 = gl.constexpr("=r," * 8 + "r,r")
_REGISTERS_16 = gl.constexpr("=r," * 16 + "r,r")


@gluon.constexpr_function
def exponent_of(plane: int, BITS: int) -> int:
    """log2 of the f that codes of a plane are multiplied with."""
    at = plane % (16 // BITS) * BITS
    reach = 8 if BITS == 4 else 10
    return at if at < reach else at - reach


@gluon.constexpr_function
def unit_of(plane: int, BITS: int) -> float:
    """What sums of a plane's codes are multiplied with."""
    return float(2.0 ** -exponent_of(plane, BITS) / LEAST)


@gluon.constexpr_function
def scaling(exponent: int) -> str:
    if exponent == 0:
        return "mul.f16x2 $0, $1, $2;"
    factor = ((15 - exponent) << 10) * 0x00010001
    return (
        f"{{ .reg .b32 t; .reg .b32 c; mov.b32 c, 0x{factor:08x}; mul.f16x2 t, $1, $2; mul.f16x2 $0, t, c; }}"
    )


@gluon.constexpr_function
def key_registers(T: int) -> list[int]:
    """Bases of the registers that tell the keys of one column apart: 8, 16, ... of a tile's rows."""
    bases, base = [], 8
    while base < T:
        bases.append(base)
        base *= 2
    return bases


@gluon.constexpr_function
def value_layout(T: int, W: int, keys_first: bool) -> gl.DistributedLinearLayout:
    """Of words of values [T, W]: a lane has the words of four keys that it needs, of each 8."""
    words, lanes = ([[0, 1]], [[0, 2], [0, 4], [0, 8]]) if W == 16 else ([], [[0, 1], [0, 2], [0, 4]])
    pair = [[1, 0]]
    registers = (pair + words if keys_first else words + pair) + [[base, 0] for base in key_registers(T)]
    return gl.DistributedLinearLayout(registers, [[2, 0], [4, 0], *lanes], [], [], [T, W])


@gluon.constexpr_function
def number_layout(T: int) -> gl.DistributedLinearLayout:
    """Of numbers of keys as they lie, [T]: a lane has neighbours."""
    registers, base = [], 1
    while base < T // 8:
        registers.append([base])
        base *= 2
    return gl.DistributedLinearLayout(registers, [[0], [0], [T // 8], [T // 4], [T // 2]], [], [], [T])


@gluon.jit
def key_of(row: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Which of T consecutive keys a tile's row is: a lane's rows are neighbours, whose numbers it loads together."""
    return row % 8 * (T // 8) + row // 8


@gluon.jit
def load_queries(
    q_ptr: gl.tensor,
    row: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Queries [16, X] float16 of the planes of keys, up to 16, and what one is in products, [X] float32 as OF_ROWS."""
    PLACES: gl.constexpr = key_places(DIM, BITS)
    a = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
    n = gl.arange(0, X, layout=gl.SliceLayout(0, RIGHT))
    loaded: gl.tensor = ()
    peaks = gl.full([16, X], 1e-30, gl.float32, layout=RIGHT)
    for plane in gl.static_range(plane_count(DIM)):
        channel = channels_of(plane, a, PLACES)
        at = gl.expand_dims((row * GROUP + n) * DIM, 0) + gl.expand_dims(channel, 1)
        there = gl.expand_dims(n < GROUP, 0) & gl.expand_dims(channel >= 0, 1)
        loaded += (gl.load(q_ptr + at, mask=there, other=0.0).to(gl.float32),)
        peaks = gl.maximum(peaks, gl.abs(loaded[plane]))
    units = gl.max(peaks, 0) * 0.0625
    queries: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        queries += ((loaded[plane] / gl.expand_dims(units, 0)).to(gl.float16),)
    return queries, gl.convert_layout(units / _LEAST_C, OF_ROWS)


@gluon.jit
def load_channels(ptr: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Float16 numbers of all channels, [DIM] as they are loaded."""
    return gl.load(ptr + gl.arange(0, DIM, layout=channel_layout(DIM, BITS)))


@gluon.jit
def by_planes(loaded: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Numbers of all channels as [16] for every plane of keys."""
    PLACES: gl.constexpr = key_places(DIM, BITS)
    all_planes = as_planes(gl.reshape(loaded, [1, DIM]), 1, DIM, PLACES)
    planes: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        planes += (gl.reshape(all_planes[plane], [16]),)
    return planes


@gluon.jit
def scaled(query: gl.tensor, step: gl.tensor, ASM: gl.constexpr) -> gl.tensor:
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [query, step], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def load_steps(
    scales_ptr: gl.tensor, offsets_ptr: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Scales and offsets of a block of keys: nothing waits for them before they are folded."""
    return load_channels(scales_ptr, DIM, BITS), load_channels(offsets_ptr, DIM, BITS)


@gluon.jit
def fold(
    queries: gl.tensor, steps: gl.tensor, X: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Queries times a block's scales, by planes, and what offsets add to all products of the block, [X]."""
    scales, offsets = by_planes(steps[0], DIM, BITS), by_planes(steps[1], DIM, BITS)
    sixteen = gl.full([16, 16], 0.0, gl.float16, layout=LEFT)
    added = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
    folded: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        step = gl.convert_layout(scales[plane], gl.SliceLayout(1, RIGHT), assert_trivial=True)
        query, step = gl.broadcast(queries[plane], gl.expand_dims(step, 1))
        folded += (scaled(query, step, scaling(exponent_of(plane, BITS))),)
        offset = gl.convert_layout(offsets[plane], gl.SliceLayout(0, LEFT), assert_trivial=True)
        _, offset = gl.broadcast(
            sixteen, gl.expand_dims(offset, 0)
        )  # in all rows, so that all lanes get sums
        added = mma_v2(offset, queries[plane], added)
    return folded, gl.max(added, 0) * _LEAST_C


@gluon.constexpr_function
def key_layout(W: int) -> gl.BlockedLayout:
    """Of words of keys [T, W]: four lanes have a key."""
    return gl.BlockedLayout([1, W // 4], [8, 4], [1, 1], [1, 0])


@gluon.jit
def load_key_words(ptr: gl.tensor, base: gl.tensor, T: gl.constexpr, W: gl.constexpr) -> gl.tensor:
    """Words [T, W] of T keys from `base` on."""
    LANES: gl.constexpr = key_layout(W)
    key = key_of(gl.arange(0, T, layout=gl.SliceLayout(1, LANES)), T)
    word = gl.arange(0, W, layout=gl.SliceLayout(0, LANES))
    ptr = gl.multiple_of(ptr + base.to(gl.int64) * W, 16)
    return gl.load(ptr + (gl.expand_dims(key * W, 1) + gl.expand_dims(word, 0)))


@gluon.jit
def multiply_keys(
    words: gl.tensor,
    folded: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Products [T, X] of keys, as words, with folded queries."""
    if BITS == 4:
        parts = gl.inline_asm_elementwise(
            _KEYS_4, _REGISTERS_8, [words], dtype=(gl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        parts = gl.inline_asm_elementwise(
            _KEYS_2, _REGISTERS_16, [words], dtype=(gl.float16,) * 16, is_pure=True, pack=2
        )
    products = gl.full([T, X], 0.0, gl.float32, layout=RESULT)
    for plane in gl.static_range(plane_count(DIM)):
        if words_of(DIM, BITS) == 16:
            own = gl.permute(gl.reshape(parts[plane], [T, 2, 2, 2, 2]), [0, 3, 1, 2, 4])
        else:  # the highest of a place's bits tells a lane's two words apart
            own = gl.permute(gl.join(parts[plane], parts[plane + plane_count(DIM)]), [0, 2, 1])
        keys = gl.convert_layout(gl.reshape(own, [T, 16]), LEFT, assert_trivial=True)
        products = mma_v2(keys, folded[plane], products)
    return products


@gluon.jit
def load_key_numbers(ptr: gl.tensor, base: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Float16 numbers of T keys from `base` on, [T] as they are loaded."""
    return gl.load(ptr + base.to(gl.int64) + gl.arange(0, T, layout=number_layout(T)))


@gluon.jit
def key_numbers(loaded: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Numbers of keys as they were loaded, [T] float32 as OF_KEYS."""
    rows = gl.permute(gl.reshape(loaded.to(gl.float32), [8, T // 8]), [1, 0])
    return gl.convert_layout(gl.reshape(rows, [T]), OF_KEYS, assert_trivial=True)


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
def add_planes(sums: gl.tensor, more: gl.tensor, DIM: gl.constexpr) -> gl.tensor:
    """Sums of planes, added as float32 numbers are: rounded."""
    new: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        new += (sums[plane] + more[plane],)
    return new


@gluon.jit
def add_values(
    sums: gl.tensor,
    words: gl.tensor,
    weights: gl.tensor,
    T: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds values, as words, by weights, a right operand [T, X]."""
    PAIRS: gl.constexpr = value_layout(T, words_of(DIM, BITS), True)
    pairs = gl.convert_layout(words, PAIRS)
    if BITS == 4:
        parts = gl.inline_asm_elementwise(
            _VALUES_4, _REGISTERS_8, [pairs], dtype=(gl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        parts = gl.inline_asm_elementwise(
            _VALUES_2, _REGISTERS_16, [pairs], dtype=(gl.float16,) * 16, is_pure=True, pack=2
        )
    new: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        if words_of(DIM, BITS) == 16:
            own = gl.permute(gl.reshape(parts[plane], [T, 2, 2, 2, 2]), [4, 1, 2, 3, 0])
        else:  # the highest of a place's bits tells a word's halves apart
            own = gl.permute(gl.join(parts[plane], parts[plane + plane_count(DIM)]), [2, 1, 0])
        values = gl.convert_layout(gl.reshape(own, [16, T]), LEFT, assert_trivial=True)
        new += (mma_v2(values, weights, sums[plane]),)
    return new


@gluon.jit
def values_of(sums: gl.tensor, even: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Sums of values, by planes, of those of codes; even: adds to all channels, [X]."""
    plain: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
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
