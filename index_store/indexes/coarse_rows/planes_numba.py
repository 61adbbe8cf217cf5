"""Rows of two planes decoded on a host: runs of rows, and listed ones, in one pass over their bytes.

Shape legend: H KV heads, N tokens, n rows, X listed rows, B blocks of 128 keys, d head dim, C = d / 2 bytes of a row of
codes, V groups of a value's channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from index_store.attention.rows_in_line_numba import row_table
from index_store.attention.vectors.code import (
    BYTE,
    FLOATS,
    LANES,
    SIZE,
    WORDS,
    Rows,
    constants,
    each_vector,
    emits,
    repeated,
)
from index_store.compiled.launch import F4, I2, I4, U1, launch, njit, task_loop
from index_store.indexes.coarse_rows.coded_passes_numba import half_table
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows

_BYTES = ir.VectorType(BYTE, LANES)


def make_refining(*, uniform: bool) -> Any:
    """Numbers of two planes, whose channels have scales and offsets of their own or, if `uniform`, one of each."""

    level = "f" if uniform else "rows"

    @emits(types.void, f"rows i rows i {level} {level} rows i i")
    def refine(
        builder: Any,
        high: Rows,
        high_row: Any,
        low: Rows,
        low_row: Any,
        scales: Any,
        offsets: Any,
        out: Rows,
        to_row: Any,
        vectors: Any,
    ) -> None:
        """out[to_row, c] = (16 * high code + low code - 7.5) * scales[0, c] + offsets[0, c], rounded twice. Byte j of a
        plane has the code of channel j in its lower bits, and in its upper ones that of channel w + j, where w = 16 *
        vectors. scales, offsets: two numbers if `uniform`.
        """
        four, mask, middle = constants(WORDS, 4), constants(WORDS, 15), constants(FLOATS, 7.5)
        width = builder.mul(vectors, ir.Constant(vectors.type, LANES))
        every = [repeated(builder, each) for each in (scales, offsets)] if uniform else []
        with each_vector(builder, vectors) as first:
            codes, fine = (
                builder.zext(rows.load(row, first, _BYTES), WORDS)
                for rows, row in ((high, high_row), (low, low_row))
            )
            lower = builder.or_(builder.shl(builder.and_(codes, mask), four), builder.and_(fine, mask))
            upper = builder.or_(builder.sub(codes, builder.and_(codes, mask)), builder.lshr(fine, four))
            for places, channel in ((lower, first), (upper, builder.add(width, first))):
                numbers = builder.fsub(builder.sitofp(places, FLOATS), middle)
                levels = every or [rows.load(SIZE(0), channel, FLOATS) for rows in (scales, offsets)]
                found = builder.fadd(builder.fmul(numbers, levels[0]), levels[1])
                out.store(found, to_row, channel)

    return refine


_AT_ONCE = 128  # rows of a task
_refine_channels, _refine_value = make_refining(uniform=False), make_refining(uniform=True)


def decode_run(coarse: ScalarRows, low_Hn2C: Tensor, first: int, out: Tensor | None = None) -> Tensor:
    """Rows first.. of the coarse copy, refined by as many of the low plane: [H, n, 2, d] float32.

    out: a contiguous tensor for them, which is returned.
    """
    rows = torch.arange(first, first + low_Hn2C.shape[1], dtype=torch.int32).expand(len(low_Hn2C), -1)
    return decode_listed(coarse, low_Hn2C, rows, first, out)


def decode_listed(
    coarse: ScalarRows, low_HN2C: Tensor, ids_HX: Tensor, first: int = 0, out: Tensor | None = None
) -> Tensor:
    """Listed rows of both planes, [H, X, 2, d] float32. ids_HX: int32, each below N.

    first: the row that the low plane begins with. out: a contiguous tensor for them, which is returned.
    """
    heads, count = ids_HX.shape
    if out is None:
        out = torch.empty(heads, count, 2, coarse.head_dim, device="cpu")
    if count:
        launch(
            _decode_rows,
            heads * -(-count // _AT_ONCE),
            *row_table(coarse.key_codes_HNC),
            *row_table(coarse.value_codes_HNC),
            *row_table(low_HN2C.flatten(1, 2)),
            *half_table(coarse.key_scales_HBD),
            *half_table(coarse.key_offsets_HBD),
            *half_table(coarse.value_scales_HNV),
            *half_table(coarse.value_offsets_HNV),
            coarse.lead,
            ids_HX.to(torch.int32).contiguous().numpy(),
            first,
            out.view(-1, coarse.head_dim).numpy(),
            work=0.5 * out.numel(),
        )
    return out


@njit(_nrt=False)
def _half(bits: np.int16) -> np.float32:
    """A finite float16 number."""
    magnitude = np.int32((np.int32(bits) & np.int32(0x7FFF)) << np.int32(13)).view(np.float32)
    number = magnitude * np.float32(2.0**112)
    return -number if bits < 0 else number


@task_loop("u1x2 i8 u1x2 i8 u1x2 i8 i2x2 i8 i2x2 i8 i2x2 i8 i2x2 i8 i8 i4x2 i8 f4x2")
def _decode_rows(
    task: int,
    key_codes: U1,
    key_stride: int,
    value_codes: U1,
    value_stride: int,
    low: U1,
    low_stride: int,
    key_scales: I2,
    scale_stride: int,
    key_offsets: I2,
    offset_stride: int,
    value_scales: I2,
    value_scale_stride: int,
    value_offsets: I2,
    value_offset_stride: int,
    lead: int,
    ids: I4,
    first: int,
    out: F4,
) -> None:
    """Writes a key and its value, for each of the ids, to two rows of out."""
    count, dim, groups = ids.shape[1], out.shape[1], value_scales.shape[1]
    parts = (count + _AT_ONCE - 1) // _AT_ONCE
    each, step, width = dim // groups, np.float32(1.0 / 16), dim // 2
    head, part = task // parts, task % parts
    scales, offsets = np.empty((1, dim), np.float32), np.empty((1, dim), np.float32)
    own_scales, own_offsets = np.empty((1, dim), np.float32), np.empty((1, dim), np.float32)
    known = np.int64(-1)
    for x in range(part * _AT_ONCE, min(count, (part + 1) * _AT_ONCE)):
        row = np.int64(ids[head, x])
        block = (row + lead) // BLOCK
        if block != known:
            known = block
            for c in range(dim):
                scales[0, c] = _half(key_scales[head * scale_stride + block, c]) * step
                offsets[0, c] = _half(key_offsets[head * offset_stride + block, c])
        low_row, to = head * low_stride + 2 * (row - first), 2 * (head * count + x)
        _refine(key_codes, head * key_stride + row, low, low_row, scales, offsets, out, to)
        code_row = head * value_stride + row
        scale_row, offset_row = head * value_scale_stride + row, head * value_offset_stride + row
        if groups == 1 and width % LANES == 0:
            scale = _half(value_scales[scale_row, 0]) * step
            offset = _half(value_offsets[offset_row, 0])
            _refine_value(value_codes, code_row, low, low_row + 1, scale, offset, out, to + 1, width // LANES)
            continue
        for g in range(groups):
            scale = _half(value_scales[scale_row, g]) * step
            offset = _half(value_offsets[offset_row, g])
            for c in range(g * each, (g + 1) * each):
                own_scales[0, c], own_offsets[0, c] = scale, offset
        _refine(value_codes, code_row, low, low_row + 1, own_scales, own_offsets, out, to + 1)


@njit(_nrt=False)
def _refine(codes: U1, row: int, low: U1, low_row: int, scales: F4, offsets: F4, out: F4, to: int) -> None:
    """One row. Byte j has channels j and j + width."""
    width = codes.shape[1]
    if width % LANES == 0:
        _refine_channels(codes, row, low, low_row, scales, offsets, out, to, width // LANES)
        return
    for c in range(2 * width):
        byte, shift = (c, 0) if c < width else (c - width, 4)
        place = ((codes[row, byte] >> shift) & 15) * 16 + ((low[low_row, byte] >> shift) & 15)
        out[to, c] = (np.float32(place) - np.float32(7.5)) * scales[0, c] + offsets[0, c]
