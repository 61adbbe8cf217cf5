"""How many bytes rows of codes take, and how many numbers beside them."""

from __future__ import annotations

from index_store.errors import InvalidArgumentError

BITS = (2, 3, 4)
"""Bits that a code may have."""

PLANES = {2: (2,), 3: (2, 1), 4: (4,)}

BLOCK = 128
"""Positions whose keys share a scale and an offset in every channel."""


def row_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one row of codes. Raises InvalidArgumentError for channels that do not fill bytes."""
    narrowest = min(PLANES[bits])
    if head_dim < 1 or head_dim * narrowest % 8:
        raise InvalidArgumentError(
            f"head dimension {head_dim} cannot be coded in {bits} bits: it has to be a multiple of {8 // narrowest}"
        )
    return head_dim * bits // 8


def value_groups(head_dim: int, widest: int) -> int:
    """Groups of channels that a value has: as few equal ones as are not wider than `widest`."""
    return next(count for count in range(-(-head_dim // widest), head_dim + 1) if head_dim % count == 0)
