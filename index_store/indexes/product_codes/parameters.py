"""The kind of product codes, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.index_kind import Growth, IndexKind, SubspaceParameters, grown
from index_store.store.description.json_fields import Scalar

_MAX_BITS = 8


@dataclass(frozen=True)
class CodeParameters(SubspaceParameters):
    """Build parameters.

    bits: of a code, 1 to 8.
    """

    bits: int

    label: ClassVar[str] = "product codes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.bits <= _MAX_BITS:
            raise InvalidArgumentError(f"product codes: bits is {self.bits}, expected 1 to {_MAX_BITS}")


class CodeKind(IndexKind):
    """Keys quantised slice by slice."""

    kind = "product_codes"
    parameters_type = CodeParameters

    @classmethod
    def estimates_logits(cls, parameters: Mapping[str, Scalar], search: Mapping[str, Scalar]) -> bool:
        return True

    @classmethod
    def bytes_per_token(cls, parameters: Mapping[str, Scalar], head_dim: int) -> float:
        return float(CodeParameters.parse(parameters).subspaces)

    @classmethod
    def appended_bytes(cls, parameters: Mapping[str, Scalar], head_dim: int, growth: Growth) -> int:
        return CodeParameters.parse(parameters).subspaces * grown(growth.appended)
