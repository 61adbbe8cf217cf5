"""Codes of 2, 3 and 4 bits in bytes: planes of channels, so that a kernel unpacks whole vectors by shifts and masks.

A plane of b bits puts 8/b channels into a byte: byte j holds channels j, j + w, j + 2w, ... from its lowest bits on,
where w = d b / 8 is the plane's width. Codes of 4 and 2 bits are one plane. Codes of 3 bits are a plane of their two
low bits, and behind it in the same row a plane of their top bit.

Shape legend: d channels of a head, C = d b / 8 bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.coarse_rows.scalars.row_sizes import PLANES


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
