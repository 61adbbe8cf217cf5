"""Parameters of coarse rows, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.scalars.packing import BITS
from index_store.indexes.interface.parameters import Parameters

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
