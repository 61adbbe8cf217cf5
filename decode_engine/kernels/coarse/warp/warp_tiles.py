"""Tiles of coded keys and values in the registers of one warp, and products with them on tensor cores.

Codes are loaded in the very layout in which the tensor cores take their operands, and unpacked there, two at a time
(`warp_codes`). What is left are the lowest bits of float16 numbers, and tensor cores take these as they are. Their sums
drop what is below the last bit instead of rounding it, which adds up: nothing larger than the codes may be in them. A
warp waits for nobody else. Which channels operands take at a time, a plane of 16, only `warp_places` knows.

Scales and offsets of keys fold into the queries and into one number for each query row, those of values into the
weights, as in `coded_tiles`.

Shape legend: T keys of a tile, X query rows, a multiple of 8; W words of a row of codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.coarse.warp.warp_codes import (
    LEAST,
    exponent_of,
    key_layout,
    key_planes,
    unit_of,
    value_planes,
)
from decode_engine.kernels.coarse.warp.warp_places import (
    as_planes,
    channel_layout,
    channels_of,
    group_of,
    held_words,
    key_places,
    plane_count,
    row_words,
    stored_word,
    value_places,
)

_PRODUCT = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
RESULT = gl.constexpr(_PRODUCT)
LEFT = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, _PRODUCT, 2))
OF_KEYS = gl.constexpr(gl.SliceLayout(1, _PRODUCT))
"""Of numbers of a tile's keys, [T], beside a result [T, X]."""
OF_ROWS = gl.constexpr(gl.SliceLayout(0, _PRODUCT))
"""Of numbers of query rows, [X], beside a result [T, X] or [16, X]."""

_LEAST_C = gl.constexpr(LEAST)


@gluon.constexpr_function
def scaling(exponent: int) -> str:
    if exponent == 0:
        return "mul.f16x2 $0, $1, $2;"
    factor = ((15 - exponent) << 10) * 0x00010001
    return (
        f"{{ .reg .b32 t; .reg .b32 c; mov.b32 c, 0x{factor:08x}; mul.f16x2 t, $1, $2; mul.f16x2 $0, t, c; }}"
    )


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
def load_channels(
    ptr: gl.tensor, there: gl.tensor | None, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Float16 numbers of all channels, [DIM] as they are loaded; zeros where it is said that they are not there."""
    channel = gl.arange(0, DIM, layout=channel_layout(DIM, BITS))
    if there is None:
        return gl.load(ptr + channel)
    else:  # noqa: RET505 - the other branch is not compiled
        return gl.load(ptr + channel, mask=(channel >= 0) & there, other=0.0)


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
    keys_ptrs: gl.tensor, block: gl.tensor, there: gl.tensor | None, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Scales and offsets of a block of keys: nothing waits for them before they are folded. there: None if it is."""
    at = block * DIM
    return load_channels(keys_ptrs[1] + at, there, DIM, BITS), load_channels(
        keys_ptrs[2] + at, there, DIM, BITS
    )


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


@gluon.jit
def load_key_words(
    ptr: gl.tensor, base: gl.tensor, T: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Words of T keys from `base` on."""
    LANES: gl.constexpr = key_layout(T, DIM, BITS)
    ROW: gl.constexpr = row_words(DIM, BITS)
    key = key_of(gl.arange(0, T, layout=gl.SliceLayout(1, LANES)), T)
    word = gl.arange(0, held_words(DIM, BITS), layout=gl.SliceLayout(0, LANES))
    ptr = gl.multiple_of(ptr + base.to(gl.int64) * ROW, 16)
    at = gl.expand_dims(key * ROW, 1) + gl.expand_dims(stored_word(word, DIM, BITS), 0)
    return gl.load(ptr + at)


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
    planes = key_planes(words, T, DIM, BITS)
    products = gl.full([T, X], 0.0, gl.float32, layout=RESULT)
    for plane in gl.static_range(plane_count(DIM)):
        keys = gl.convert_layout(planes[plane], LEFT, assert_trivial=True)
        products = mma_v2(keys, folded[plane], products)
    return products


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
