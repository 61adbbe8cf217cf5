"""Tiles of exact rows that are stored in two planes of 4 bits, decoded as `TwoPlanes` does it.

A byte of the low plane, and the byte of codes beside it in the coarse copy, belong to the channels j and j + d / 2. A
number is offset + scale / 16 * (n - 7.5), n = 16 code + low. The coarse copy has its usual form: values of up to 128
channels have one scale and one offset each, those of 256 have two, one for each half.

Two bytes beside each other, a *short*, hold four channels. What they decode to are *quarters* of rows: channels 0, 2,
4, .., channels 1, 3, 5, .., and the same of the upper half. No number changes its place for that, so that products of
small tiles take shorts as they lie in shared memory and decode them in the registers that are multiplied. Devices make
pairs of float16 numbers, finer than bfloat16, of pairs of shorts: n stands in the last bits of 1024 + n, and (n - 128)
/ 16, which is exact, times the scale is added to what 128 stands for. Queries in float32 get rows in float32.

Shape legend: T rows of a tile, W = d / 4 shorts of a vector in a plane, d head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.attention.online_softmax import HEAD_TILE, attend_tile
from decode_engine.kernels.record_fields import key_pointers, value_pointers
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.methods.method import INDEX_SPECS
from index_store.store.description.manifest import HIGH_PLANE

_BLOCK = tl.constexpr(BLOCK)
_BITS = tl.constexpr(4)
_VALUE_GROUP = tl.constexpr(INDEX_SPECS[HIGH_PLANE].parameters["value_group"])
_BASE, _SHARE = tl.constexpr(7.5), tl.constexpr(1.0 / 16)
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
"""Of two shorts of the low plane and two of codes, pairs of the quarters' scales, and of what 128 stands for."""
_MIDDLE = tl.constexpr("{ .reg .b32 m; mov.b32 m, 0x47884788; fma.rn.f16x2 $0, $1, m, $2; }")
_EXPONENT, _LEAST_POWER, _LARGEST = tl.constexpr(0x7F800000), tl.constexpr(2.0**-100), tl.constexpr(2.0**14)
"""Bits of a power of two; that of smaller numbers; half of what is largest in float16."""
_LIFT = tl.constexpr(14.0)
"""Weights are up to 2^14 where they become float16, so that small ones keep their digits."""


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
def _load_shorts(plane_ptr: tl.tensor, at: tl.tensor, there: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Vectors of a plane that begin at these shorts, [T, W]; zeros where they are not there [T]."""
    row_ptrs = plane_ptr.to(tl.pointer_type(tl.uint16)) + at[:, None]
    return tl.load(row_ptrs + tl.arange(0, K.DIM // 4)[None, :], mask=there[:, None], other=0)


@triton.jit
def _of_channels(numbers_ptr: tl.tensor, blocks: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Numbers of the quarters of blocks' channels; loaded in words, since loads in flight have 4 bytes or more."""
    words_ptr = numbers_ptr.to(tl.pointer_type(tl.uint32)) + blocks * (K.DIM // 2)
    found: tl.tensor = ()
    for half in tl.static_range(2):
        words = tl.load(words_ptr + half * (K.DIM // 4) + tl.arange(0, K.DIM // 4)[None, :])
        for bits in tl.static_range(0, 32, 16):
            found += ((words >> bits).to(tl.uint16).to(tl.float16, bitcast=True),)
    return found


@triton.jit
def _value_numbers(pointers: tl.tensor, ids: tl.tensor, there: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Scales of the lower and of the upper half of values, and offsets, [T]."""
    GROUPS: tl.constexpr = (K.DIM + _VALUE_GROUP - 1) // _VALUE_GROUP  # `tl.cdiv` of two constants is none
    found: tl.tensor = ()
    for which in tl.static_range(1, 3):
        for group in tl.static_range(2):
            at = ids * GROUPS + group * (GROUPS - 1)
            found += (tl.load(pointers[1][which] + at, mask=there, other=0.0),)
    return found


@triton.jit
def decode_rows(
    rows: tl.tensor, numbers: tl.tensor, VALUES: tl.constexpr, K: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Quarters [T, W] of keys, or VALUES, finite where they are not there; on devices float16, but for float32.

    rows: where the low plane is, where in it the keys begin in words [T], `plane_pointers`, ids, and which are there.
    numbers: `_value_numbers`; of keys their blocks of 128, [T, 1], or that of all.
    """
    low_ptr, at, pointers, ids, there = rows
    low = _load_shorts(low_ptr + K.DIM // 8 if VALUES else low_ptr, at * 2, there, K)
    codes_ptr, scales_ptr, offsets_ptr = pointers[1] if VALUES else pointers[0]
    high = _load_shorts(codes_ptr, ids.to(tl.int64) * (K.DIM // 4), there, K)
    if VALUES:
        a, b, c, d = numbers[0][:, None], numbers[1][:, None], numbers[2][:, None], numbers[3][:, None]
        scales, offsets = (a, a, b, b), (c, c, d, d)
    else:
        scales, offsets = _of_channels(scales_ptr, numbers, K), _of_channels(offsets_ptr, numbers, K)
    quarters: tl.tensor = ()
    if K.ASSEMBLY and ELEMENT != tl.float32:  # noqa: SIM300
        middles: tl.tensor = ()
        for part in tl.static_range(4):
            pair = [scales[part], offsets[part]]
            middles += (tl.inline_asm_elementwise(_MIDDLE, "=r,r,r", pair, tl.float16, True, 2),)
        quarters = tl.inline_asm_elementwise(
            _DECODE, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r", (low, high) + scales + middles,  # noqa: RUF005
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        for part in tl.static_range(4):
            bits = part % 2 * 8 + part // 2 * 4
            n = ((low >> bits) & 15) + ((high >> bits) & 15) * 16
            number = (n.to(tl.float32) - _BASE) * (scales[part].to(tl.float32) * _SHARE)
            quarters += ((number + offsets[part].to(tl.float32)).to(ELEMENT),)
    return quarters


@triton.jit
def _apart(rows: tl.tensor) -> tl.tensor:
    """Quarters of rows [T, d]."""
    even, odd = tl.split(tl.reshape(rows, [rows.shape[0], 2, rows.shape[1] // 4, 2]))
    a, c = tl.split(tl.permute(even, (0, 2, 1)))
    b, d = tl.split(tl.permute(odd, (0, 2, 1)))
    return a, b, c, d


@triton.jit
def _joined(quarters: tl.tensor) -> tl.tensor:
    """[T, d], one quarter after the other."""
    a, b, c, d = quarters
    numbers = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    return tl.reshape(numbers, [a.shape[0], 4 * a.shape[1]])


@triton.jit
def _in_order(rows: tl.tensor) -> tl.tensor:
    """Rows [T, d] that have one quarter after the other."""
    apart = tl.reshape(rows, [rows.shape[0], 2, 2, rows.shape[1] // 4])
    return tl.reshape(tl.permute(apart, (0, 1, 3, 2)), rows.shape)


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
    if K.PLANES:
        known = tl.maximum(ids, 0)
        rows = (rows_ptr, where, pointers, known, there)
        numbers = _value_numbers(pointers, known, there, K) if VALUES else (known // _BLOCK)[:, None]
        part = _in_order(_joined(decode_rows(rows, numbers, VALUES, K, ELEMENT))).to(ELEMENT)
    else:
        at = where[:, None] + tl.arange(0, K.DIM)[None, :]
        begin = rows_ptr + K.DIM if VALUES else rows_ptr
        part = tl.load(begin + at, mask=there[:, None], other=0.0)
    return part


@triton.jit
def _in_float16(q: tl.tensor) -> tl.tensor:
    """Queries [X, d] over powers of two, [X, 1], so that each one's largest channel is 2^14 or more; and these."""
    numbers = q.to(tl.float32)
    powers = (tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    units = (tl.maximum(powers, _LEAST_POWER) / _LARGEST)[:, None]
    return (numbers / units).to(tl.float16), units


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
    PLANES: tl.constexpr = len(pointers) > 0
    LIFT: tl.constexpr = _LIFT if PLANES and q.dtype != tl.float32 else 0.0
    n = begin + tl.arange(0, K.TILE)
    numbers: tl.tensor = ()
    if PLANES:
        tl.static_assert(_BLOCK % K.TILE == 0)  # the keys of a tile share scales and offsets
        if q.dtype != tl.float32:
            q, units = _in_float16(q)
            scale_log2 *= units
        q, sums = _apart(q), _apart(sums)
        # A tile ahead: they are too narrow for loads in flight.
        numbers = _value_numbers(pointers, n, n < end, K)
    if PLANES and K.X > HEAD_TILE:
        q, sums = _joined(q), _joined(sums)
    if not PLANES or K.X > HEAD_TILE:
        q, sums = (q,), (sums,)
    for start in tl.range(begin, end, K.TILE, num_stages=STAGES):
        n = start + tl.arange(0, K.TILE)
        there = n < end
        if PLANES:
            rows = (rows_ptr, n.to(tl.int64) * (K.DIM // 4), pointers, n, there)
            k = decode_rows(rows, start // _BLOCK, False, K, q[0].dtype)
            v = decode_rows(rows, numbers, True, K, q[0].dtype)
            numbers = _value_numbers(pointers, n + K.TILE, n + K.TILE < end, K)
            if K.X > HEAD_TILE:
                k, v = (_joined(k),), (_joined(v),)
        else:
            row_ptrs = rows_ptr + n.to(tl.int64)[:, None] * (2 * K.DIM) + tl.arange(0, K.DIM)[None, :]
            k = (tl.load(row_ptrs, mask=there[:, None], other=0.0),)
            v = (tl.load(row_ptrs + K.DIM, mask=there[:, None], other=0.0),)
        peaks, totals, sums = attend_tile(q, k, v, there, (peaks, totals, sums), scale_log2, K, LIFT)
    sums = _joined(sums) if len(sums) > 1 else sums[0]
    return peaks, totals, _in_order(sums) if PLANES else sums
