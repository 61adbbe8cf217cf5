"""The kind of coarse rows, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.scalars.row_sizes import BITS, BLOCK, row_bytes, value_groups
from index_store.indexes.interface.index_kind import Growth, IndexKind, grown
from index_store.indexes.interface.parameters import Parameters
from index_store.selection.remainders import COARSE_ROWS
from index_store.store.description.json_fields import Scalar

CODINGS = ("scalar", "product")
_SLICES = {2: 4, 4: 2}  # channels of a slice by bits for each of them: a slice's code has 8


@dataclass(frozen=True)
class CoarseParameters(Parameters):
    """Build parameters of coarse rows.

    coding: `scalar` rounds every channel, `product` names codewords of slices. key_bits, value_bits: for a channel, 2
        to 4; 2 or 4 of product codes. value_group: most channels of a value that share a scale. iterations: of k-means.
        The last but one counts for scalar, the last for product codes only.
    """

    coding: str
    key_bits: int
    value_bits: int
    value_group: int
    iterations: int

    label: ClassVar[str] = "coarse rows"

    def __post_init__(self) -> None:
        self._require_one_of("coding", CODINGS)
        allowed = BITS if self.coding == "scalar" else tuple(_SLICES)
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if bits not in allowed:
                raise InvalidArgumentError(
                    f"{self.label}: {name} is {bits}, expected one of {', '.join(map(str, allowed))} with coding "
                    f"{self.coding!r}"
                )
        self._require_at_least(1, "value_group", "iterations")

    @property
    def key_slice(self) -> int:
        """Channels of a slice of product-coded keys."""
        return _SLICES[self.key_bits]

    @property
    def value_slice(self) -> int:
        """Channels of a slice of product-coded values."""
        return _SLICES[self.value_bits]


class CoarseKind(IndexKind):
    """Every key and value in 2 to 4 bits a channel."""

    kind = "coarse_rows"
    parameters_type = CoarseParameters
    divides_into = COARSE_ROWS

    @classmethod
    def estimates_logits(cls, parameters: Mapping[str, Scalar], search: Mapping[str, Scalar]) -> bool:
        return True

    @classmethod
    def bytes_per_token(cls, parameters: Mapping[str, Scalar], head_dim: int) -> float:
        parsed = CoarseParameters.parse(parameters)
        codes = head_dim * (parsed.key_bits + parsed.value_bits) / 8
        if parsed.coding == "product":
            return codes
        scales_and_offsets = 4 * (head_dim / BLOCK + value_groups(head_dim, parsed.value_group))
        return codes + scales_and_offsets

    @classmethod
    def appended_bytes(cls, parameters: Mapping[str, Scalar], head_dim: int, growth: Growth) -> int:
        return _appended_bytes(CoarseParameters.parse(parameters), head_dim, growth)


def _appended_bytes(parameters: CoarseParameters, head_dim: int, growth: Growth) -> int:
    """What an extension's `nbytes` comes to, of one KV head."""
    if not growth.appended:
        return 0
    if parameters.coding == "product":
        slices = head_dim // parameters.key_slice + head_dim // parameters.value_slice
        return slices * grown(growth.appended)
    groups = value_groups(head_dim, parameters.value_group)
    row = row_bytes(head_dim, parameters.key_bits) + row_bytes(head_dim, parameters.value_bits) + 4 * groups
    last = growth.keys + growth.appended
    blocks = (last - 1) // BLOCK - growth.keys // BLOCK + 1
    raw = 8 * head_dim * BLOCK if _leaves_open(growth) else 0
    return row * grown(growth.appended) + 4 * head_dim * grown(blocks) + raw


def _leaves_open(growth: Growth) -> bool:
    """Whether an append ends inside of a block: of two that follow each other one does, or both are whole blocks."""
    first = (growth.keys // growth.block + 1) * growth.block
    ends = (min(end, growth.keys + growth.appended) for end in (first, first + growth.block))
    return any(end % BLOCK for end in ends)
