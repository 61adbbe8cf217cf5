"""Tiles of exact rows that are stored in two planes of 4 bits, decoded as `TwoPlanes` does it.

A byte of the low plane, and the byte of codes beside it in the coarse copy, belong to the channels j and j + d / 2. A
number is offset + scale / 16 * (n - 7.5), n = 16 code + low. The coarse copy has its usual form: values of up to 128
channels have one scale and one offset each, those of 256 have two, one for each half.

Two bytes beside each other are one element, a *short*, which four channels share: decoding makes *quarters* of rows,
channels 0, 2, 4, .., 1, 3, 5, .., and those of the upper half, without moving a number to another place. So a small
tile's products take shorts of both planes as they lie in shared memory, and decode them in the registers that are
multiplied. On devices pairs of shorts become pairs of float16 numbers: n in the last bits of 1024 + n, of which
(n - 128) / 16 is exact, times the scale, plus what n = 128 stands for. These are finer than bfloat16; queries beside
them are in float16 too, over a power of two. Queries in float32 have rows in float32, in which the product is exact.

Shape legend: T rows of a tile, W = d / 4 shorts of a vector in a plane, which is also a quarter, d head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.attention.online_softmax import HEAD_TILE, add_weighted, attend_tile, grow
from decode_engine.kernels.record_fields import key_pointers, value_pointers
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.methods.method import INDEX_SPECS
from index_store.store.description.manifest import HIGH_PLANE

_BLOCK = tl.constexpr(BLOCK)
_BITS = tl.constexpr(4)
_VALUE_GROUP = tl.constexpr(INDEX_SPECS[HIGH_PLANE].parameters["value_group"])
_BASE, _SHARE = tl.constexpr(7.5), tl.constexpr(1.0 / 16)
"""Of n, what the offset stands for; of a scale, a step of n."""
_DECODE = tl.constexpr("""{
.reg .b32 a, b, x, h, m;
mov.b32 h, 0x2c002c00; mov.b32 m, 0xd480d480;
shl.b32 a, $5, 4; lop3.b32 a, a, $4, 0xf0f0f0f0, 0xe4;
shr.b32 b, $4, 4; lop3.b32 b, $5, b, 0xf0f0f0f0, 0xe4;
prmt.b32 x, a, 0x64646464, 0x4240; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $0, x, $6, $10;
prmt.b32 x, a, 0x64646464, 0x4341; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $1, x, $7, $11;
prmt.b32 x, b, 0x64646464, 0x4240; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $2, x, $8, $12;
prmt.b32 x, b, 0x64646464, 0x4341; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $3, x, $9, $13;
}""")
"""Of two shorts of the low plane and two of codes; then four scales, and what n = 128 stands for, all in pairs."""
_MIDDLE = tl.constexpr("{ .reg .b32 m; mov.b32 m, 0x47884788; fma.rn.f16x2 $0, $1, m, $2; }")
"""Offset + 120.5 / 16 * scale."""
_EXPONENT, _LEAST_POWER, _LARGEST = tl.constexpr(0x7F800000), tl.constexpr(2.0**-100), tl.constexpr(2.0**14)
"""Bits of a power of two; that of smaller numbers; what becomes float16 is twice as large at most."""
_LIFT = tl.constexpr(14.0)
"""Weights are up to 2^14, so that small ones beside them keep their digits in float16."""


@triton.jit
def plane_pointers(records_ptr: tl.tensor, b: tl.tensor, head: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Codes, scales and offsets of a KV head's keys, and those of its values, in the coarse copy of its rows' high
    plane; nothing where rows are in one piece."""
    pointers: tl.tensor = ()
    if K.PLANES:
        pointers = (
            key_pointers(records_ptr, b, head, K.DIM, _BITS),
            value_pointers(records_ptr, b, head, K.DIM, _BITS, (K.DIM + _VALUE_GROUP - 1) // _VALUE_GROUP),
        )
    return pointers


@triton.jit
def _middle(scale: tl.tensor, offset: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(_MIDDLE, "=r,r,r", [scale, offset], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _number(n: tl.tensor, scale: tl.tensor, offset: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    return ((n.to(tl.float32) - _BASE) * (scale.to(tl.float32) * _SHARE) + offset.to(tl.float32)).to(ELEMENT)


@triton.jit
def decode_quarters(
    low: tl.tensor, high: tl.tensor, scales: tl.tensor, offsets: tl.tensor, K: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Quarters of rows, [T, W] each, of the shorts of both planes [T, W].

    scales, offsets: float16, of each quarter, broadcast to it. In ELEMENT; in float16 on devices, but for float32.
    """
    a, b, c, d = scales
    if K.ASSEMBLY and ELEMENT != tl.float32:
        e, f, g, h = _middle(a, offsets[0]), _middle(b, offsets[1]), _middle(c, offsets[2]), _middle(d, offsets[3])
        a, b, c, d = tl.inline_asm_elementwise(
            _DECODE, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r", [low, high, a, b, c, d, e, f, g, h],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = _number((low & 15) | ((high & 15) << 4), a, offsets[0], ELEMENT)
        b = _number(((low >> 8) & 15) | ((high >> 4) & 240), b, offsets[1], ELEMENT)
        c = _number(((low >> 4) & 15) | (high & 240), c, offsets[2], ELEMENT)
        d = _number((low >> 12) | ((high >> 8) & 240), d, offsets[3], ELEMENT)
    return a, b, c, d


@triton.jit
def _joined(quarters: tl.tensor) -> tl.tensor:
    """[T, d], one quarter after the other."""
    a, b, c, d = quarters
    numbers = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(numbers, [a.shape[0], 4 * a.shape[1]])


@triton.jit
def _in_order(rows: tl.tensor) -> tl.tensor:
    """Rows [T, d] whose quarters follow each other."""
    apart = tl.reshape(rows, [rows.shape[0], 2, 2, rows.shape[1] // 4])
    return tl.reshape(tl.permute(apart, (0, 1, 3, 2)), rows.shape)


@triton.jit
def _apart(rows: tl.tensor) -> tl.tensor:
    """Quarters of rows [T, d]."""
    even, odd = tl.split(tl.reshape(rows, [rows.shape[0], 2, rows.shape[1] // 4, 2]))
    a, c = tl.split(tl.permute(even, (0, 2, 1)))
    b, d = tl.split(tl.permute(odd, (0, 2, 1)))
    return a, b, c, d


@triton.jit
def _load_shorts(plane_ptr: tl.tensor, at: tl.tensor, there: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Vectors of a plane that begin at these shorts, [T, W]; zeros where they are not there [T]."""
    short = tl.arange(0, K.DIM // 4)
    plane_ptr = plane_ptr.to(tl.pointer_type(tl.uint16))
    return tl.load(plane_ptr + at[:, None] + short[None, :], mask=there[:, None], other=0)


@triton.jit
def _of_channels(numbers_ptr: tl.tensor, blocks: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Float16 numbers of each quarter, of the blocks' channels: loaded in words, which loads in flight may be."""
    words_ptr = numbers_ptr.to(tl.pointer_type(tl.uint32)) + blocks * (K.DIM // 2) + tl.arange(0, K.DIM // 4)[None, :]
    lower, upper = tl.load(words_ptr), tl.load(words_ptr + K.DIM // 4)
    return (
        lower.to(tl.uint16).to(tl.float16, bitcast=True),
        (lower >> 16).to(tl.uint16).to(tl.float16, bitcast=True),
        upper.to(tl.uint16).to(tl.float16, bitcast=True),
        (upper >> 16).to(tl.uint16).to(tl.float16, bitcast=True),
    )


@triton.jit
def decode_keys(
    low_ptr: tl.tensor,
    at: tl.tensor,
    pointers: tl.tensor,
    ids: tl.tensor,
    blocks: tl.tensor,
    there: tl.tensor,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Quarters of the keys of these ids, whose low codes begin `at` [T] words behind low_ptr; finite where they are
    not there.

    pointers: see `plane_pointers`. blocks: of 128 keys, each one's [T, 1] or that of all of them.
    """
    codes_ptr, scales_ptr, offsets_ptr = pointers[0]
    low = _load_shorts(low_ptr, at * 2, there, K)
    high = _load_shorts(codes_ptr, ids.to(tl.int64) * (K.DIM // 4), there, K)
    scales, offsets = _of_channels(scales_ptr, blocks, K), _of_channels(offsets_ptr, blocks, K)
    return decode_quarters(low, high, scales, offsets, K, ELEMENT)


@triton.jit
def value_numbers(pointers: tl.tensor, ids: tl.tensor, there: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Scales and offsets [T] of values, of each half of the channels."""
    _, scales_ptr, offsets_ptr = pointers[1]
    # `tl.cdiv` of two constants is none in Triton 3.6.
    GROUPS: tl.constexpr = (K.DIM + _VALUE_GROUP - 1) // _VALUE_GROUP
    at = ids * GROUPS
    scale, offset = tl.load(scales_ptr + at, mask=there, other=0.0), tl.load(offsets_ptr + at, mask=there, other=0.0)
    last_scale, last_offset = scale, offset
    if GROUPS == 2:
        last_scale = tl.load(scales_ptr + at + 1, mask=there, other=0.0)
        last_offset = tl.load(offsets_ptr + at + 1, mask=there, other=0.0)
    return scale, last_scale, offset, last_offset


@triton.jit
def decode_values(
    low_ptr: tl.tensor,
    at: tl.tensor,
    pointers: tl.tensor,
    ids: tl.tensor,
    numbers: tl.tensor,
    there: tl.tensor,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Quarters of values, as `decode_keys` has keys: `at` says where the low codes of the keys before them begin."""
    low = _load_shorts(low_ptr + K.DIM // 8, at * 2, there, K)
    high = _load_shorts(pointers[1][0], ids.to(tl.int64) * (K.DIM // 4), there, K)
    a, b, c, d = numbers[0][:, None], numbers[1][:, None], numbers[2][:, None], numbers[3][:, None]
    return decode_quarters(low, high, (a, a, b, b), (c, c, d, d), K, ELEMENT)


@triton.jit
def load_part(
    rows_ptr: tl.tensor,
    where: tl.tensor,
    pointers: tl.tensor,
    ids: tl.tensor,
    there: tl.tensor,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Keys, or VALUES, [T, d] whose rows begin `where` [T] elements behind rows_ptr, in one piece or in two planes."""
    if K.PLANES and VALUES:
        numbers = value_numbers(pointers, ids, there, K)
        part = _in_order(_joined(decode_values(rows_ptr, where, pointers, ids, numbers, there, K, ELEMENT))).to(ELEMENT)
    elif K.PLANES:
        known = tl.maximum(ids, 0)
        quarters = decode_keys(rows_ptr, where, pointers, known, (known // _BLOCK)[:, None], there, K, ELEMENT)
        part = _in_order(_joined(quarters)).to(ELEMENT)
    else:
        at = where[:, None] + tl.arange(0, K.DIM)[None, :]
        begin = rows_ptr + K.DIM if VALUES else rows_ptr
        part = tl.load(begin + at, mask=there[:, None], other=0.0)
    return part


@triton.jit
def _in_float16(q: tl.tensor) -> tl.tensor:
    """Queries [X, d] over powers of two, so that the largest channel of each is 2^14 or more, and what 1 is, [X, 1]."""
    numbers = q.to(tl.float32)
    powers = (tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    units = (tl.maximum(powers, _LEAST_POWER) / _LARGEST)[:, None]
    return (numbers / units).to(tl.float16), units


@triton.jit
def _attend_planes(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    pointers: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    state: tl.tensor,
    scale_log2: tl.tensor,
    STAGES: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """`attend_run` of rows in two planes. Values' scales are loaded a tile ahead, since loads in flight are words."""
    tl.static_assert(_BLOCK % K.TILE == 0)  # the keys of a tile share scales and offsets
    if q.dtype != tl.float32:
        q, units = _in_float16(q)
        scale_log2 *= units
    lift: tl.constexpr = 0.0 if q.dtype == tl.float32 else _LIFT
    peaks, totals, sums = state
    q, sums = _apart(q), _apart(sums)
    if K.X > HEAD_TILE:
        q, sums = (_joined(q),), (_joined(sums),)
    n = begin + tl.arange(0, K.TILE)
    numbers = value_numbers(pointers, n, n < end, K)
    for start in tl.range(begin, end, K.TILE, num_stages=STAGES):
        n = start + tl.arange(0, K.TILE)
        there = n < end
        at = n.to(tl.int64) * (K.DIM // 4)
        k = decode_keys(rows_ptr, at, pointers, n, start // _BLOCK, there, K, q[0].dtype)
        v = decode_values(rows_ptr, at, pointers, n, numbers, there, K, q[0].dtype)
        numbers = value_numbers(pointers, n + K.TILE, n + K.TILE < end, K)
        if K.X > HEAD_TILE:
            k, v = (_joined(k),), (_joined(v),)
        logits = tl.zeros([K.X, K.TILE], tl.float32)
        for part in tl.static_range(len(q)):
            logits = tl.dot(q[part], tl.trans(k[part]), logits, input_precision=K.PRECISION)
        logits = tl.where(there[None, :], logits * scale_log2, float("-inf"))
        peaks, totals, shrink, weights = grow(peaks, totals, logits, 1.0, logits, False, lift)
        larger = ()
        for part in tl.static_range(len(q)):
            larger += (add_weighted(sums[part] * shrink[:, None], weights, v[part], False, K),)
        sums = larger
    return peaks, totals, _in_order(_joined(sums) if len(sums) > 1 else sums[0])


@triton.jit
def attend_run(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    pointers: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    state: tl.tensor,
    scale_log2: tl.tensor,
    STAGES: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """Adds the rows begin .. end - 1 of a KV head to a running softmax: key and value side by side, or in two planes.

    pointers: see `plane_pointers`; without, rows are in one piece. Of planes begin is a multiple of TILE.
    """
    peaks, totals, sums = state
    if len(pointers) > 0:
        peaks, totals, sums = _attend_planes(q, rows_ptr, pointers, begin, end, state, scale_log2, STAGES, K)
    else:
        d = tl.arange(0, K.DIM)
        for start in tl.range(begin, end, K.TILE, num_stages=STAGES):
            n = start + tl.arange(0, K.TILE)
            there = n < end
            row_ptrs = rows_ptr + n.to(tl.int64)[:, None] * (2 * K.DIM) + d[None, :]
            k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
            v = tl.load(row_ptrs + K.DIM, mask=there[:, None], other=0.0)
            peaks, totals, sums = attend_tile(q, k, v, there, (peaks, totals, sums), scale_log2, K)
    return peaks, totals, sums
