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

from decode_engine.kernels.attention.online_softmax import attend_tile
from decode_engine.kernels.record_fields import key_pointers, value_pointers
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.methods.method import INDEX_SPECS
from index_store.store.description.manifest import HIGH_PLANE

_BLOCK = tl.constexpr(BLOCK)
_BITS = tl.constexpr(4)
_VALUE_GROUP = tl.constexpr(INDEX_SPECS[HIGH_PLANE].parameters["value_group"])
_LOWER, _UPPER = tl.constexpr(0x0F0F0F0F), tl.constexpr(0xF0F0F0F0)
_BYTE, _LIFTED = tl.constexpr(0xFF00), tl.constexpr(0x47000000)
"""Where a code stands in the bits of 2^15 in float32, whose last 8 bits are fractions; and these."""
_BASE = tl.constexpr(2.0**15 + 7.5)
_SHARE = tl.constexpr(1.0 / 16)
"""Of a scale that is a step of the low plane."""


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
def _places(codes: tl.tensor) -> tl.tensor:
    """Codes of 8 bits, four in a word [T, W], as numbers 16 * code + low - 7.5 in the order of their bytes, [T, C]."""
    # Put together as the bits of numbers: devices convert few integers at a time.
    first = ((codes << 8) & _BYTE) | _LIFTED
    second = (codes & _BYTE) | _LIFTED
    third = ((codes >> 8) & _BYTE) | _LIFTED
    fourth = ((codes >> 16) & _BYTE) | _LIFTED
    bits = tl.reshape(
        tl.join(tl.join(first, third), tl.join(second, fourth)), [codes.shape[0], 4 * codes.shape[1]]
    )
    return bits.to(tl.float32, bitcast=True) - _BASE


@triton.jit
def decode_rows(
    low: tl.tensor, high: tl.tensor, steps: tl.tensor, starts: tl.tensor, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Rows [T, d] of the words of both planes, [T, W].

    steps, starts: a sixteenth of the scales, and the offsets, of channels 0 .. C - 1 and of the others, each broadcast
    to [T, C] float32.
    """
    first = _places(((high << 4) & _UPPER) | (low & _LOWER)) * steps[0] + starts[0]
    second = _places((high & _UPPER) | ((low >> 4) & _LOWER)) * steps[1] + starts[1]
    halves = tl.permute(tl.join(first.to(ELEMENT), second.to(ELEMENT)), (0, 2, 1))
    return tl.reshape(halves, [low.shape[0], 8 * low.shape[1]])


@triton.jit
def _load_words(plane_ptr: tl.tensor, at: tl.tensor, there: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Vectors of a plane that begin at these words, [T, W]; zeros where they are not there [T]."""
    word = tl.arange(0, K.DIM // 8)
    return tl.load(plane_ptr + at[:, None] + word[None, :], mask=there[:, None], other=0)


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
    """Keys [T, d] of these ids, whose low codes begin `at` [T] words behind low_ptr; finite where they are not there.

    pointers: see `plane_pointers`. blocks: of 128 keys, each one's or that of all of them.
    """
    codes_ptr, scales_ptr, offsets_ptr = pointers[0]
    C: tl.constexpr = K.DIM // 2
    low = _load_words(low_ptr, at, there, K)
    high = _load_words(codes_ptr.to(tl.pointer_type(tl.uint32)), ids.to(tl.int64) * (K.DIM // 8), there, K)
    channels = blocks[:, None] * K.DIM + tl.arange(0, C)[None, :]
    steps = (
        tl.load(scales_ptr + channels).to(tl.float32) * _SHARE,
        tl.load(scales_ptr + C + channels).to(tl.float32) * _SHARE,
    )
    starts = (
        tl.load(offsets_ptr + channels).to(tl.float32),
        tl.load(offsets_ptr + C + channels).to(tl.float32),
    )
    return decode_rows(low, high, steps, starts, ELEMENT)


@triton.jit
def decode_values(
    low_ptr: tl.tensor,
    at: tl.tensor,
    pointers: tl.tensor,
    ids: tl.tensor,
    there: tl.tensor,
    K: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Values [T, d], as `decode_keys` has keys: `at` says where the low codes of the keys before them begin."""
    codes_ptr, scales_ptr, offsets_ptr = pointers[1]
    low = _load_words(low_ptr + K.DIM // 8, at, there, K)
    high = _load_words(codes_ptr.to(tl.pointer_type(tl.uint32)), ids.to(tl.int64) * (K.DIM // 8), there, K)
    # `tl.cdiv` of two constants is none in Triton 3.6.
    GROUPS: tl.constexpr = (K.DIM + _VALUE_GROUP - 1) // _VALUE_GROUP
    step = tl.load(scales_ptr + ids * GROUPS, mask=there, other=0.0).to(tl.float32)[:, None] * _SHARE
    start = tl.load(offsets_ptr + ids * GROUPS, mask=there, other=0.0).to(tl.float32)[:, None]
    steps, starts = (step, step), (start, start)
    if GROUPS == 2:
        step = tl.load(scales_ptr + ids * GROUPS + 1, mask=there, other=0.0).to(tl.float32)[:, None] * _SHARE
        start = tl.load(offsets_ptr + ids * GROUPS + 1, mask=there, other=0.0).to(tl.float32)[:, None]
        steps, starts = (steps[0], step), (starts[0], start)
    return decode_rows(low, high, steps, starts, ELEMENT)


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
        part = decode_values(rows_ptr, where, pointers, ids, there, K, ELEMENT)
    elif K.PLANES:
        known = tl.maximum(ids, 0)
        part = decode_keys(rows_ptr, where, pointers, known, known // _BLOCK, there, K, ELEMENT)
    else:
        at = where[:, None] + tl.arange(0, K.DIM)[None, :]
        begin = rows_ptr + K.DIM if VALUES else rows_ptr
        part = tl.load(begin + at, mask=there[:, None], other=0.0)
    return part


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
        tl.static_assert(_BLOCK % K.TILE == 0)  # the keys of a tile share scales and offsets
    for start in tl.range(begin, end, K.TILE, num_stages=STAGES):
        n = start + tl.arange(0, K.TILE)
        there = n < end
        if len(pointers) > 0:
            at = n.to(tl.int64) * (K.DIM // 4)
            block = tl.full([1], 0, tl.int32) + start // _BLOCK
            k = decode_keys(rows_ptr, at, pointers, n, block, there, K, q.dtype)
            v = decode_values(rows_ptr, at, pointers, n, there, K, q.dtype)
        else:
            row_ptrs = rows_ptr + n.to(tl.int64)[:, None] * (2 * K.DIM) + d[None, :]
            k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
            v = tl.load(row_ptrs + K.DIM, mask=there[:, None], other=0.0)
        peaks, totals, sums = attend_tile(q, k, v, there, (peaks, totals, sums), scale_log2, K)
    return peaks, totals, sums
