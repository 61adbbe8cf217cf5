"""Keys and values in 2 to 4 bits a channel: a scale and an offset for channels of many keys, or of one value.

Quantiser: the least and the largest number of a range are the first and the last of 2^b levels, and a number is kept as
the nearest one: step = (hi - lo) / (2^b - 1), code = floor((x - lo) / step + 1/2), decoded = lo + step * code. Kept are
scale = step and offset = lo in float16, and codes are taken with these rounded numbers: no decoded number is farther
than scale / 2 from what was coded. Channels that always hold the largest values of a head stay as they are, where a
quantiser with levels in the middle of 2^b equal steps would shrink them all alike.

Keys have a scale and an offset for every channel and block of 128 keys: blocks begin at multiples of 128 positions.
Both fold into the query, since q . k = (q * scale) . code + q . offset. Values have them for every key and group of
channels, where they fold into the weight.

Codes lie in planes of channels, so that a kernel unpacks whole vectors by shifts and masks. A plane of b bits puts 8/b
channels into a byte: byte j holds channels j, j + w, j + 2w, ... from its lowest bits on, where w = d b / 8 is the
plane's width. Codes of 4 and 2 bits are one plane. Codes of 3 bits are a plane of their two low bits, and behind it in
the same row a plane of their top bit.

Shape legend: H KV heads, N keys, B blocks of keys, d head dim, C bytes of a row of codes, V groups of channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from index_store.attention.rows_in_line_numba import rows_in_line
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.parameters import BLOCK, PLANES, row_bytes


def pack(codes_xD: Tensor, bits: int) -> Tensor:
    """Rows [..., C] uint8 of codes [..., d] uint8, each below 2^bits."""
    planes, low = [], 0
    for plane in PLANES[bits]:
        planes.append(_pack_plane((codes_xD >> low) & ((1 << plane) - 1), plane))
        low += plane
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack(rows_xC: Tensor, bits: int) -> Tensor:
    """Codes [..., d] uint8 of rows [..., C] uint8."""
    head_dim = rows_xC.shape[-1] * 8 // bits
    codes: Tensor | None = None
    begin = low = 0
    for plane in PLANES[bits]:
        width = head_dim * plane // 8
        part = _unpack_plane(rows_xC[..., begin : begin + width], plane)
        codes = part if codes is None else codes | (part << low)
        begin, low = begin + width, low + plane
    if codes is None:
        raise ValueError("codes have no planes")
    return codes


def _pack_plane(codes_xD: Tensor, bits: int) -> Tensor:
    parts = codes_xD.chunk(8 // bits, dim=-1)
    row = parts[0].clone()
    for number, part in enumerate(parts[1:], start=1):
        row |= part << (number * bits)
    return row


def _unpack_plane(rows_xC: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(rows_xC >> shift) & mask for shift in range(0, 8, bits)], dim=-1)


_LARGEST = torch.finfo(torch.float16).max
_CODED_BYTES, DEVICE_CODED_BYTES = 2 * 2**20, 256 * 2**20
"""Of keys and values in float32 that are coded at a time."""


_STORED = {
    "key_codes": "key_codes_HNC",
    "key_scales": "key_scales_HBD",
    "key_offsets": "key_offsets_HBD",
    "value_codes": "value_codes_HNC",
    "value_scales": "value_scales_HNV",
    "value_offsets": "value_offsets_HNV",
}
"""Names of a layer's arrays, in the order in which they are stored, each with its field."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where loops find arrays: of each, its address, and the rows from one head's first to the next one's.

    arrays: the addresses' own, which may be copies.
    """

    numbers: tuple[int, ...]
    arrays: tuple[Tensor, ...]

    @classmethod
    def of(cls, *tables: Tensor) -> Places:
        arrays = tuple([rows_in_line(table) for table in tables])
        return cls(sum([(each.data_ptr(), each.stride(0) // each.shape[2]) for each in arrays], ()), arrays)


@dataclass(frozen=True)
class ScalarRows:
    """Coded keys and values of the consecutive tokens first_id, first_id + 1, ...; row n is token first_id + n.

    key_codes_HNC, value_codes_HNC: [H, N, d bits / 8] uint8 (`pack`). key_scales_HBD, key_offsets_HBD: [H, B, d]
    float16; row n belongs to block (lead + n) // 128. value_scales_HNV, value_offsets_HNV: [H, N, V] float16; group v
    holds channels v d/V to (v + 1) d/V - 1. Rows of one head are contiguous, heads may be farther apart.
    """

    key_codes_HNC: Tensor
    key_scales_HBD: Tensor
    key_offsets_HBD: Tensor
    value_codes_HNC: Tensor
    value_scales_HNV: Tensor
    value_offsets_HNV: Tensor
    key_bits: int
    value_bits: int
    first_id: int = 0

    @property
    def count(self) -> int:
        """Rows, N."""
        return self.key_codes_HNC.shape[1]

    @property
    def head_dim(self) -> int:
        return self.key_scales_HBD.shape[2]

    @property
    def lead(self) -> int:
        """Positions of the first row's block that lie before it: 0 for a context."""
        return self.first_id % BLOCK

    @cached_property
    def key_places(self) -> Places:
        """Of codes, scales and offsets of keys."""
        return Places.of(self.key_codes_HNC, self.key_scales_HBD, self.key_offsets_HBD)

    @cached_property
    def value_places(self) -> Places:
        """The same of values."""
        return Places.of(self.value_codes_HNC, self.value_scales_HNV, self.value_offsets_HNV)

    def key_bytes(self, count: int) -> float:
        """Bytes of so many coded keys of one head, their share of what blocks hold included."""
        return count * (self.key_codes_HNC.shape[2] + 4 * self.head_dim / BLOCK)

    def value_bytes(self, count: int) -> float:
        """Bytes of so many coded values of one head."""
        return float(count * (self.value_codes_HNC.shape[2] + 4 * self.value_scales_HNV.shape[2]))

    @classmethod
    def of(
        cls, arrays: Mapping[str, Tensor], key_bits: int, value_bits: int, first_id: int = 0
    ) -> ScalarRows:
        """Rows of arrays as they are stored, by name."""
        named: dict[str, Any] = {field: arrays[name] for name, field in _STORED.items()}
        return cls(**named, key_bits=key_bits, value_bits=value_bits, first_id=first_id)

    def arrays(self) -> dict[str, Tensor]:
        """All arrays, by the names that they are stored under."""
        return {name: getattr(self, field) for name, field in _STORED.items()}

    def heads(self, part: slice) -> ScalarRows:
        some = {name: array[part] for name, array in self.arrays().items()}
        return self.of(some, self.key_bits, self.value_bits, self.first_id)

    def decode_keys(self, first: int, end: int) -> Tensor:
        """Rows first..end-1 of the keys, [H, n, d] float32."""
        rows_n = torch.arange(first, end, device=self.key_codes_HNC.device)
        blocks_n = (rows_n + self.lead) // BLOCK
        codes = unpack(self.key_codes_HNC[:, first:end], self.key_bits).float()
        return codes.mul_(self.key_scales_HBD[:, blocks_n]).add_(self.key_offsets_HBD[:, blocks_n])

    def decode_values(self, first: int, end: int) -> Tensor:
        """Rows first..end-1 of the values, [H, n, d] float32."""
        codes = unpack(self.value_codes_HNC[:, first:end], self.value_bits).float()
        groups = self.value_scales_HNV.shape[2]
        grouped = codes.view(*codes.shape[:2], groups, self.head_dim // groups)
        grouped.mul_(self.value_scales_HNV[:, first:end, :, None])
        grouped.add_(self.value_offsets_HNV[:, first:end, :, None])
        return codes


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are coded at a time, and their blocks."""

    rows: slice
    blocks: slice


def parts_of(kv_HN2D: Tensor, first_id: int) -> list[Part]:
    """All rows of keys and values from token first_id on, so that few of them are in float32 at a time."""
    heads, count, _, head_dim = kv_HN2D.shape
    lead = first_id % BLOCK
    blocks = -(-(lead + count) // BLOCK)
    at_once = _CODED_BYTES if kv_HN2D.device.type == "cpu" else DEVICE_CODED_BYTES
    step = max(1, at_once // (heads * BLOCK * 2 * head_dim * 4))
    parts = []
    for block in range(0, blocks, step):
        last = min(block + step, blocks)
        rows = slice(max(0, block * BLOCK - lead), min(count, last * BLOCK - lead))
        parts.append(Part(rows, slice(block, last)))
    return parts


def empty_rows(kv_HN2D: Tensor, first_id: int, key_bits: int, value_bits: int, groups: int) -> ScalarRows:
    """Room for the codes of these keys and values, where they are."""
    heads, count, _, head_dim = kv_HN2D.shape
    device, blocks = kv_HN2D.device, -(-(first_id % BLOCK + count) // BLOCK)
    return ScalarRows(
        torch.empty(heads, count, row_bytes(head_dim, key_bits), dtype=torch.uint8, device=device),
        torch.empty(heads, blocks, head_dim, dtype=torch.float16, device=device),
        torch.empty(heads, blocks, head_dim, dtype=torch.float16, device=device),
        torch.empty(heads, count, row_bytes(head_dim, value_bits), dtype=torch.uint8, device=device),
        torch.empty(heads, count, groups, dtype=torch.float16, device=device),
        torch.empty(heads, count, groups, dtype=torch.float16, device=device),
        key_bits,
        value_bits,
        first_id,
    )


def code_rows_reference(
    kv_HN2D: Tensor, first_id: int, key_bits: int, value_bits: int, groups: int
) -> ScalarRows:
    """Codes keys and values [H, N, 2, d] of tokens first_id.. where they are, N at least 1.

    groups: of the channels of a value. Blocks that are there only in part are coded as they are. Raises
    InvalidArgumentError for numbers that float16 cannot hold, and for a head dimension whose codes do not fill bytes.
    """
    rows = empty_rows(kv_HN2D, first_id, key_bits, value_bits, groups)
    for part in parts_of(kv_HN2D, first_id):
        keys, values = kv_HN2D[:, part.rows].float().unbind(2)
        codes, scales, offsets = _code_keys(keys, first_id + part.rows.start, key_bits)
        rows.key_codes_HNC[:, part.rows] = codes
        rows.key_scales_HBD[:, part.blocks] = scales
        rows.key_offsets_HBD[:, part.blocks] = offsets
        codes, scales, offsets = _code_values(values, groups, value_bits)
        rows.value_codes_HNC[:, part.rows] = codes
        rows.value_scales_HNV[:, part.rows] = scales
        rows.value_offsets_HNV[:, part.rows] = offsets
    return rows


def _code_keys(keys_HnD: Tensor, first_id: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of codes, and scales and offsets [H, blocks, d] float16."""
    heads, count, head_dim = keys_HnD.shape
    before = min(-first_id % BLOCK, count)
    whole = (count - before) // BLOCK * BLOCK
    runs = (keys_HnD[:, :before], keys_HnD[:, before : before + whole], keys_HnD[:, before + whole :])
    found = []
    for run in runs:
        if run.shape[1]:
            blocks = run.reshape(heads, -1, min(BLOCK, run.shape[1]), head_dim)
            codes, scales, offsets = _quantise(blocks, 2, bits)
            found.append((codes.view(heads, -1, head_dim), scales.squeeze(2), offsets.squeeze(2)))
    codes, scales, offsets = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return pack(codes, bits), scales, offsets


def _code_values(values_HnD: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of codes, and scales and offsets [H, n, groups] float16."""
    heads, count, head_dim = values_HnD.shape
    codes, scales, offsets = _quantise(values_HnD.reshape(heads, count, groups, -1), 3, bits)
    return pack(codes.view(heads, count, head_dim), bits), scales.squeeze(3), offsets.squeeze(3)


def _quantise(numbers: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of float32 numbers, and scale and offset float16 of each range along a dimension, which is kept."""
    # Each by itself: together they take ten times as long on a CPU.
    low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    levels = ranges_to_levels(low, high, bits)
    places = (numbers - levels.starts) / levels.steps
    codes = places.add_(0.5).floor_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return codes, levels.scales, levels.offsets


@dataclass(frozen=True, slots=True)
class Levels:
    """Scales and offsets as they are stored, float16, and the steps and starts in float32 that numbers are coded with.

    A step is 1 where the scale is 0.
    """

    scales: Tensor
    offsets: Tensor
    steps: Tensor
    starts: Tensor


def ranges_to_levels(low: Tensor, high: Tensor, bits: int) -> Levels:
    """Levels of 2^bits codes for ranges of numbers. Raises InvalidArgumentError for what float16 cannot hold."""
    if not bool((low.amin() >= -_LARGEST) & (high.amax() <= _LARGEST)):  # NaN is no comparison's
        refuse()
    offsets = low.half()
    starts = offsets.float()
    # Wide enough for an offset that was rounded, too.
    widths = torch.maximum((starts - low) * 2, (high - starts) / (2**bits - 1))
    scales = _half_upwards(widths.clamp_(min=0))
    steps = scales.float()
    return Levels(scales, offsets, torch.where(steps > 0, steps, 1.0), starts)


def refuse() -> NoReturn:
    """Raises InvalidArgumentError for numbers that cannot be coded."""
    raise InvalidArgumentError(
        f"keys or values beyond {_LARGEST:.0f} or not finite cannot be coded, since scales and offsets are "
        "float16; use a method without a coarse copy, such as --method csattention"
    )


def _half_upwards(numbers: Tensor) -> Tensor:
    """The least float16 numbers that are not below these, which are not negative."""
    halves = numbers.half()
    return (halves.view(torch.int16) + (halves.float() < numbers).to(torch.int16)).view(torch.float16)
