"""Tiles of exact rows that are stored in two planes of 4 bits, decoded as `TwoPlanes` does it.

A byte of the low plane, and the byte of codes beside it in the coarse copy, belong to the channels j and j + d / 2. A
number is offset + scale / 16 * (16 code + low - 7.5): the product is exact in float32, so that nothing depends on
whether a compiler rounds it before it adds. Then it is rounded to the queries' type, as rows that are stored as they
are have it. The coarse copy has its usual form: values of up to 128 channels have one scale and one offset each, those
of 256 have two, one for each half.

Shape legend: T rows of a tile, C = d / 2 bytes of a vector in a plane, W = d / 8 words, d head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.attention.online_softmax import add_weighted, attend_tile, grow
from decode_engine.kernels.record_fields import key_pointers, value_pointers
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.methods.method import INDEX_SPECS
from index_store.store.description.manifest import HIGH_PLANE

import os
_CARRY = tl.constexpr("c" in os.environ.get("V", "cw"))
_WORDS = tl.constexpr("w" in os.environ.get("V", "cw"))
_BLOCK = tl.constexpr(BLOCK)
_BITS = tl.constexpr(4)
_VALUE_GROUP = tl.constexpr(INDEX_SPECS[HIGH_PLANE].parameters["value_group"])
_BASE, _MIDDLE = tl.constexpr(7.5), tl.constexpr((128 - 7.5) / 16)
_SHARE = tl.constexpr(1.0 / 16)
"""Of a scale that is a step of the low plane."""
_DECODE_PAIRS = tl.constexpr("""{
.reg .b32 a, b, x, h, m;
mov.b32 h, 0x2c002c00; mov.b32 m, 0xd480d480;
shl.b32 a, $5, 4; lop3.b32 a, a, $4, 0xf0f0f0f0, 0xe4;
shr.b32 b, $4, 4; lop3.b32 b, $5, b, 0xf0f0f0f0, 0xe4;
prmt.b32 x, a, 0x64646464, 0x4240; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $0, x, $6, $10;
prmt.b32 x, a, 0x64646464, 0x4341; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $1, x, $7, $11;
prmt.b32 x, b, 0x64646464, 0x4240; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $2, x, $8, $12;
prmt.b32 x, b, 0x64646464, 0x4341; fma.rn.f16x2 x, x, h, m; fma.rn.f16x2 $3, x, $9, $13;
}""")


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
def quarters(rows: tl.tensor) -> tl.tensor:
    """Channels 0, 2, .., 1, 3, .. of the lower half of rows [N, d], and those of the upper one: four [N, d / 4]."""
    even, odd = tl.split(tl.reshape(rows, [rows.shape[0], 2, rows.shape[1] // 4, 2]))
    a, c = tl.split(tl.permute(even, (0, 2, 1)))
    b, e = tl.split(tl.permute(odd, (0, 2, 1)))
    return a, b, c, e


@triton.jit
def whole_rows(parts: tl.tensor) -> tl.tensor:
    """Rows of their quarters."""
    N: tl.constexpr = parts[0].shape[0]
    D: tl.constexpr = 4 * parts[0].shape[1]
    even = tl.permute(tl.join(parts[0], parts[2]), (0, 2, 1))
    odd = tl.permute(tl.join(parts[1], parts[3]), (0, 2, 1))
    return tl.reshape(tl.join(even, odd), [N, D])


@triton.jit
def _middle(scale: tl.tensor, offset: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m; mov.b32 m, 0x47884788; fma.rn.f16x2 $0, $1, m, $2; }",
        "=r,r,r", [scale, offset], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _decode(low: tl.tensor, high: tl.tensor, scales: tl.tensor, offsets: tl.tensor, K: tl.constexpr, ELEMENT: tl.constexpr) -> tl.tensor:
    """Four quarters [T, d / 4] of the shorts of both planes. scales, offsets: of each quarter, broadcast to it."""
    if K.ASSEMBLY and ELEMENT.is_fp16():
        m = (
            _middle(scales[0], offsets[0]),
            _middle(scales[1], offsets[1]),
            _middle(scales[2], offsets[2]),
            _middle(scales[3], offsets[3]),
        )
        a, b, c, e = tl.inline_asm_elementwise(
            _DECODE_PAIRS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
            [low, high, scales[0], scales[1], scales[2], scales[3], m[0], m[1], m[2], m[3]],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )
    else:
        low, high = low.to(tl.int32), high.to(tl.int32)
        a = ((low & 15) + (high & 15) * 16).to(tl.float32)
        b = (((low >> 8) & 15) + ((high >> 8) & 15) * 16).to(tl.float32)
        c = (((low >> 4) & 15) + ((high >> 4) & 15) * 16).to(tl.float32)
        e = (((low >> 12) & 15) + ((high >> 12) & 15) * 16).to(tl.float32)
        a = ((a - _BASE) * (scales[0].to(tl.float32) * _SHARE) + offsets[0].to(tl.float32)).to(ELEMENT)
        b = ((b - _BASE) * (scales[1].to(tl.float32) * _SHARE) + offsets[1].to(tl.float32)).to(ELEMENT)
        c = ((c - _BASE) * (scales[2].to(tl.float32) * _SHARE) + offsets[2].to(tl.float32)).to(ELEMENT)
        e = ((e - _BASE) * (scales[3].to(tl.float32) * _SHARE) + offsets[3].to(tl.float32)).to(ELEMENT)
    return a, b, c, e


@triton.jit
def _load_shorts(plane_ptr: tl.tensor, at: tl.tensor, there: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Vectors of a plane that begin at these shorts, [T, d / 4]; zeros where they are not there [T]."""
    short = tl.arange(0, K.DIM // 4)
    return tl.load(plane_ptr + at[:, None] + short[None, :], mask=there[:, None], other=0)


@triton.jit
def _halves(words: tl.tensor) -> tl.tensor:
    return (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True), (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _channels(numbers_ptr: tl.tensor, K: tl.constexpr) -> tl.tensor:
    words_ptr = numbers_ptr.to(tl.pointer_type(tl.uint32)) + tl.arange(0, K.DIM // 4)[None, :]
    if _WORDS:
        a, b = _halves(tl.load(words_ptr))
        c, e = _halves(tl.load(words_ptr + K.DIM // 4))
    else:
        at = 2 * tl.arange(0, K.DIM // 4)[None, :]
        C: tl.constexpr = K.DIM // 2
        a, b = tl.load(numbers_ptr + at), tl.load(numbers_ptr + at + 1)
        c, e = tl.load(numbers_ptr + C + at), tl.load(numbers_ptr + C + at + 1)
    return a, b, c, e


@triton.jit
def decode_keys(low_ptr, at, pointers, ids, block, there, K: tl.constexpr, ELEMENT: tl.constexpr) -> tl.tensor:
    codes_ptr, scales_ptr, offsets_ptr = pointers[0]
    low = _load_shorts(low_ptr.to(tl.pointer_type(tl.uint16)), at * 2, there, K)
    high = _load_shorts(codes_ptr.to(tl.pointer_type(tl.uint16)), ids.to(tl.int64) * (K.DIM // 4), there, K)
    scales = _channels(scales_ptr + block * K.DIM, K)
    offsets = _channels(offsets_ptr + block * K.DIM, K)
    return _decode(low, high, scales, offsets, K, ELEMENT)


@triton.jit
def value_numbers(pointers, ids, there, K: tl.constexpr) -> tl.tensor:
    _, scales_ptr, offsets_ptr = pointers[1]
    GROUPS: tl.constexpr = (K.DIM + _VALUE_GROUP - 1) // _VALUE_GROUP
    s = tl.load(scales_ptr + ids * GROUPS, mask=there, other=0.0)
    o = tl.load(offsets_ptr + ids * GROUPS, mask=there, other=0.0)
    s2, o2 = s, o
    if GROUPS == 2:
        s2 = tl.load(scales_ptr + ids * GROUPS + 1, mask=there, other=0.0)
        o2 = tl.load(offsets_ptr + ids * GROUPS + 1, mask=there, other=0.0)
    return s, s2, o, o2


@triton.jit
def decode_values(low_ptr, at, pointers, ids, there, numbers, K: tl.constexpr, ELEMENT: tl.constexpr) -> tl.tensor:
    codes_ptr, scales_ptr, offsets_ptr = pointers[1]
    low = _load_shorts((low_ptr + K.DIM // 8).to(tl.pointer_type(tl.uint16)), at * 2, there, K)
    high = _load_shorts(codes_ptr.to(tl.pointer_type(tl.uint16)), ids.to(tl.int64) * (K.DIM // 4), there, K)
    s, s2, o, o2 = numbers
    s, s2, o, o2 = s[:, None], s2[:, None], o[:, None], o2[:, None]
    return _decode(low, high, (s, s, s2, s2), (o, o, o2, o2), K, ELEMENT)


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
    if K.PLANES and VALUES:
        numbers = value_numbers(pointers, ids, there, K)
        part = whole_rows(decode_values(rows_ptr, where, pointers, ids, there, numbers, K, ELEMENT))
    elif K.PLANES:
        known = tl.maximum(ids, 0)
        part = whole_rows(decode_keys(rows_ptr, where, pointers, known, (known // _BLOCK)[:, None], there, K, ELEMENT))
    else:
        at = where[:, None] + tl.arange(0, K.DIM)[None, :]
        begin = rows_ptr + K.DIM if VALUES else rows_ptr
        part = tl.load(begin + at, mask=there[:, None], other=0.0)
    return part


@triton.jit
def _attend_planes(q, rows_ptr, pointers, begin, end, state, scale_log2, STAGES: tl.constexpr, K: tl.constexpr):
    peaks, totals, sums = state
    tl.static_assert(_BLOCK % K.TILE == 0)
    q0, q1, q2, q3 = quarters(q)
    s0, s1, s2, s3 = quarters(sums)
    n = begin + tl.arange(0, K.TILE)
    numbers = value_numbers(pointers, n, n < end, K)
    for start in tl.range(begin, end, K.TILE, num_stages=STAGES):
        n = start + tl.arange(0, K.TILE)
        there = n < end
        at = n.to(tl.int64) * (K.DIM // 4)
        k0, k1, k2, k3 = decode_keys(rows_ptr, at, pointers, n, start // _BLOCK, there, K, q.dtype)
        logits = tl.dot(q0, tl.trans(k0), input_precision=K.PRECISION)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision=K.PRECISION)
        logits = tl.dot(q2, tl.trans(k2), logits, input_precision=K.PRECISION)
        logits = tl.dot(q3, tl.trans(k3), logits, input_precision=K.PRECISION)
        if not _CARRY:
            numbers = value_numbers(pointers, n, there, K)
        v0, v1, v2, v3 = decode_values(rows_ptr, at, pointers, n, there, numbers, K, q.dtype)
        if _CARRY:
            numbers = value_numbers(pointers, n + K.TILE, n + K.TILE < end, K)
        logits = tl.where(there[None, :], logits * scale_log2, float("-inf"))
        peaks, totals, shrink, weights = grow(peaks, totals, logits, 1.0, logits, False)
        s0 = add_weighted(s0 * shrink[:, None], weights, v0, False, K)
        s1 = add_weighted(s1 * shrink[:, None], weights, v1, False, K)
        s2 = add_weighted(s2 * shrink[:, None], weights, v2, False, K)
        s3 = add_weighted(s3 * shrink[:, None], weights, v3, False, K)
    return peaks, totals, whole_rows((s0, s1, s2, s3))


@triton.jit
def _in_float16(q: tl.tensor) -> tl.tensor:
    """Queries [X, d] over powers of two, so that the largest channel of each is 2^14 or more, and what 1 is, [X, 1]."""
    numbers = q.to(tl.float32)
    powers = (tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    units = (tl.maximum(powers, 2.0**-100) / 2.0**14)[:, None]
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
    d = tl.arange(0, K.DIM)
    if len(pointers) > 0:
        if q.dtype != tl.float32:
            q, units = _in_float16(q)
            scale_log2 *= units
        peaks, totals, sums = _attend_planes(q, rows_ptr, pointers, begin, end, state, scale_log2, STAGES, K)
    else:
        for start in tl.range(begin, end, K.TILE, num_stages=STAGES):
            n = start + tl.arange(0, K.TILE)
            there = n < end
            row_ptrs = rows_ptr + n.to(tl.int64)[:, None] * (2 * K.DIM) + d[None, :]
            k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
            v = tl.load(row_ptrs + K.DIM, mask=there[:, None], other=0.0)
            peaks, totals, sums = attend_tile(q, k, v, there, (peaks, totals, sums), scale_log2, K)
    return peaks, totals, sums
