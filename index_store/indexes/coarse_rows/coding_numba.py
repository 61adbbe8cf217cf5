"""Codes of keys and values made on a host, by loops that read every number twice and store nothing but codes.

What a block of 128 tokens costs is what a decode step waits for when the block becomes searchable.

Shape legend: H KV heads, N keys, n keys that are coded at a time, B blocks of 128 keys, C bytes of a row of codes, d
head dim, V groups of a value's channels, L rows of keys and of values in turn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import extremes
from index_store.compiled.launch import F4, U1, launch, njit, on_host, task_loop
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.scalar_rows import (
    ScalarRows,
    code_rows_reference,
    empty_rows,
    parts_of,
    ranges_to_levels,
    refuse,
)


def code_rows(kv_HN2D: Tensor, first_id: int, key_bits: int, value_bits: int, groups: int) -> ScalarRows:
    """`code_rows_reference`, bit for bit."""
    if not on_host(kv_HN2D):
        return code_rows_reference(kv_HN2D, first_id, key_bits, value_bits, groups)
    heads, _, _, head_dim = kv_HN2D.shape
    rows = empty_rows(kv_HN2D, first_id, key_bits, value_bits, groups)
    for part in parts_of(kv_HN2D, first_id):
        numbers = kv_HN2D[:, part.rows].float().contiguous()
        count, lead = numbers.shape[1], (first_id + part.rows.start) % BLOCK
        # A number that is not finite leaves no finite sum, and no comparison sees NaN.
        if not bool(torch.isfinite(numbers.sum())):
            refuse()
        shapes = (heads, part.blocks.stop - part.blocks.start, head_dim), (heads, count, groups)
        lows, highs = ([numbers.new_empty(shape) for shape in shapes] for _ in range(2))
        line = numbers.view(-1, head_dim).numpy()
        bounds = [each.numpy() for each in (*lows, *highs)]
        launch(_find_ranges, shapes[0][0] * shapes[0][1], line, lead, *bounds, work=0.5 * line.size)
        keys, values = (
            ranges_to_levels(low, high, bits)
            for low, high, bits in zip(lows, highs, (key_bits, value_bits), strict=True)
        )
        rows.key_scales_HBD[:, part.blocks], rows.key_offsets_HBD[:, part.blocks] = keys.scales, keys.offsets
        rows.value_scales_HNV[:, part.rows] = values.scales
        rows.value_offsets_HNV[:, part.rows] = values.offsets
        steps = [each.numpy() for each in (keys.steps, keys.starts, values.steps, values.starts)]
        codes = rows.key_codes_HNC.numpy(), rows.value_codes_HNC.numpy()
        bits = (key_bits, value_bits)
        launch(
            _write_codes,
            shapes[0][0] * shapes[0][1],
            line,
            lead,
            *steps,
            *bits,
            part.rows.start,
            *codes,
            work=2.2 * line.size,
        )
    return rows


@task_loop("f4x2 i8 f4x3 f4x3 f4x3 f4x3")
def _find_ranges(
    task: int, numbers: F4, lead: int, key_lows: F4, value_lows: F4, key_highs: F4, value_highs: F4
) -> None:
    """numbers: [L, d], of every head its keys and values in turn."""
    count, blocks = value_lows.shape[1], key_lows.shape[1]
    head, block = task // blocks, task % blocks
    first, end = max(0, block * BLOCK - lead), min(count, (block + 1) * BLOCK - lead)
    _find_key_range(numbers, head * count + first, end - first, key_lows[head, block], key_highs[head, block])
    for n in range(first, end):
        _find_value_ranges(numbers, 2 * (head * count + n) + 1, value_lows[head, n], value_highs[head, n])


@njit(_nrt=False)
def _find_key_range(numbers: F4, first: int, count: int, low: F4, high: F4) -> None:
    """The range of every channel of some keys."""
    low[:], high[:] = np.inf, -np.inf
    for n in range(count):
        row = numbers[2 * (first + n)]
        for c in range(row.shape[0]):
            low[c] = row[c] if row[c] < low[c] else low[c]
            high[c] = row[c] if row[c] > high[c] else high[c]


@njit(_nrt=False)
def _find_value_ranges(numbers: F4, row: int, low: F4, high: F4) -> None:
    """The ranges of one value's groups of channels."""
    groups = low.shape[0]
    width = numbers.shape[1] // groups
    vectors = width // LANES
    for g in range(groups):
        least, most = extremes(numbers, row, g * width, vectors)
        for c in range(g * width + vectors * LANES, (g + 1) * width):
            least, most = min(least, numbers[row, c]), max(most, numbers[row, c])
        low[g], high[g] = least, most


@task_loop("f4x2 i8 f4x3 f4x3 f4x3 f4x3 i8 i8 i8 u1x3 u1x3")
def _write_codes(
    task: int,
    numbers: F4,
    lead: int,
    key_steps: F4,
    key_starts: F4,
    value_steps: F4,
    value_starts: F4,
    key_bits: int,
    value_bits: int,
    to_row: int,
    key_codes: U1,
    value_codes: U1,
) -> None:
    """Codes of rows to_row, to_row + 1, ... of every head."""
    count, blocks, dim = value_steps.shape[1], key_steps.shape[1], numbers.shape[1]
    head, block = task // blocks, task % blocks
    codes = np.empty(dim, np.uint8)
    for n in range(max(0, block * BLOCK - lead), min(count, (block + 1) * BLOCK - lead)):
        row = 2 * (head * count + n)
        _find_key_codes(numbers, row, key_steps[head, block], key_starts[head, block], key_bits, codes)
        _pack(codes, key_bits, key_codes[head, to_row + n])
        _find_value_codes(numbers, row + 1, value_steps[head, n], value_starts[head, n], value_bits, codes)
        _pack(codes, value_bits, value_codes[head, to_row + n])


@njit(_nrt=False, error_model="numpy")
def _find_key_codes(numbers: F4, row: int, steps: F4, starts: F4, bits: int, codes: U1) -> None:
    top, line = np.float32((1 << bits) - 1), numbers[row]
    for c in range(codes.shape[0]):
        place = np.floor((line[c] - starts[c]) / steps[c] + np.float32(0.5))
        place = place if place > np.float32(0) else np.float32(0)
        place = place if place < top else top
        codes[c] = np.uint8(np.int32(place))


@njit(_nrt=False, error_model="numpy")
def _find_value_codes(numbers: F4, row: int, steps: F4, starts: F4, bits: int, codes: U1) -> None:
    """As `_find_key_codes`, with a step and a start for each group of channels."""
    top, width = np.float32((1 << bits) - 1), codes.shape[0] // steps.shape[0]
    for g in range(steps.shape[0]):
        step, start = steps[g], starts[g]
        line, found = numbers[row, g * width : (g + 1) * width], codes[g * width : (g + 1) * width]
        for c in range(width):
            place = np.floor((line[c] - start) / step + np.float32(0.5))
            place = place if place > np.float32(0) else np.float32(0)
            place = place if place < top else top
            found[c] = np.uint8(np.int32(place))


@njit(_nrt=False)
def _pack(codes: U1, bits: int, out: U1) -> None:
    """One row of codes as `pack` lays it out."""
    if bits == 4:
        _pack_plane(codes, 0, 2, 4, out)
    else:
        _pack_plane(codes, 0, 4, 2, out)
    if bits == 3:
        _pack_plane(codes, 2, 8, 1, out[codes.shape[0] // 4 :])


@njit(_nrt=False)
def _pack_plane(codes: U1, low: int, each: int, bits: int, out: U1) -> None:
    """So many bits of the codes from bit `low` on, `each` codes in a byte."""
    width, mask = codes.shape[0] // each, np.uint8((1 << bits) - 1)
    for part in range(each):
        source, shift = codes[part * width : (part + 1) * width], np.uint8(part * bits)
        for j in range(width):
            taken = np.uint8(((source[j] >> np.uint8(low)) & mask) << shift)
            out[j] = taken if part == 0 else out[j] | taken
