"""The kind of coarse rows, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.index_kind import BuildParameters, Growth, IndexKind, grown
from index_store.indexes.interface.retired import why_retired
from index_store.selection.budgets import COARSE_ROWS

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


@dataclass(frozen=True)
class CoarseParameters(BuildParameters):
    """Build parameters of coarse rows.

    key_bits, value_bits: for a channel, 2 to 4. value_group: most channels of a value that share a scale. coding,
        iterations: `scalar`, and a number that says nothing; stored contexts have both.
    """

    coding: str
    key_bits: int
    value_bits: int
    value_group: int
    iterations: int

    label: ClassVar[str] = "coarse rows"

    def __post_init__(self) -> None:
        retired = why_retired("coarse_rows", {"coding": self.coding})
        if retired is not None:
            raise InvalidArgumentError(retired)
        self._require_one_of("coding", ("scalar",))
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits not in BITS:
                raise InvalidArgumentError(
                    f"{self.label}: {name} is {bits}, expected one of {', '.join(map(str, BITS))}"
                )
        self._require_at_least(1, "value_group", "iterations")

    def bytes_per_token(self, head_dim: int) -> float:
        codes = head_dim * (self.key_bits + self.value_bits) / 8
        return codes + 4 * (head_dim / BLOCK + value_groups(head_dim, self.value_group))

    def appended_bytes(self, head_dim: int, growth: Growth) -> int:
        if not growth.appended:
            return 0
        groups = value_groups(head_dim, self.value_group)
        row = row_bytes(head_dim, self.key_bits) + row_bytes(head_dim, self.value_bits) + 4 * groups
        last = growth.keys + growth.appended
        blocks = (last - 1) // BLOCK - growth.keys // BLOCK + 1
        raw = 8 * head_dim * BLOCK if _leaves_open(growth) else 0
        return row * grown(growth.appended) + 4 * head_dim * grown(blocks) + raw


class CoarseKind(IndexKind):
    """Every key and value in 2 to 4 bits a channel."""

    kind = "coarse_rows"
    parameters_type = CoarseParameters
    divides_into = COARSE_ROWS


def _leaves_open(growth: Growth) -> bool:
    """Whether an append ends inside of a block: of two that follow each other one does, or both are whole blocks."""
    first = (growth.keys // growth.block + 1) * growth.block
    ends = (min(end, growth.keys + growth.appended) for end in (first, first + growth.block))
    return any(end % BLOCK for end in ends)
