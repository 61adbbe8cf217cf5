"""Indexes and methods that were retired: a stored context that has one opens, and serves all other methods."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from index_store.store.description.json_fields import Scalar

_COARSE_CODES = (
    "product codes of coarse rows, the index coarse_codes and the method refined-codes were retired on 2026-11-27; "
    "take refined over a copy of as few bits: make the context anew with --method refined --index "
    "coarse_rows:key_bits=2,value_bits=2"
)
_PRODUCT_CODES = (
    "product codes, the index product_codes and the method pq were retired on 2026-11-28; take refined, or refined-3, "
    "whose copy is smaller: prefill-worker add-index --method refined-3 gives a stored context what it searches"
)

RETIRED_METHODS: Mapping[str, str] = MappingProxyType({"refined-codes": _COARSE_CODES, "pq": _PRODUCT_CODES})
RETIRED_INDEXES: Mapping[str, str] = MappingProxyType(
    {"coarse_codes": _COARSE_CODES, "product_codes": _PRODUCT_CODES}
)
"""By name: why they are refused, and what to take instead."""


def why_retired(kind: str, parameters: Mapping[str, Scalar]) -> str | None:
    """Why nothing searches such an index any more, and what to take instead; None for all others."""
    if kind == "product_codes":
        return _PRODUCT_CODES
    return _COARSE_CODES if kind == "coarse_rows" and parameters.get("coding") == "product" else None
