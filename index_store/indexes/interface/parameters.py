"""Parameters and search options of indexes: frozen dataclasses made from stored or given values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from index_store.errors import InvalidArgumentError
from index_store.store.description.json_fields import Scalar

_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


@dataclass(frozen=True)
class Parameters:
    """Base of dataclasses of int, float and str fields that check themselves when they are made.

    label: leads the sentence of every refusal.
    """

    label: ClassVar[str]

    @classmethod
    def parse(cls, given: Mapping[str, Scalar]) -> Self:
        """Raises InvalidArgumentError for a missing, unknown, ill-typed or out-of-range parameter."""
        return cls(**_typed(given, cls))

    def _require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise InvalidArgumentError(
                f"{self.label}: {name} is {value!r}, expected one of {', '.join(allowed)}"
            )

    def _require_at_least(self, least: int, *names: str) -> None:
        for name in names:
            number = getattr(self, name)
            if number < least:
                raise InvalidArgumentError(f"{self.label}: {name} is {number}, expected at least {least}")


@dataclass(frozen=True)
class SubspaceParameters(Parameters):
    """Build parameters of indexes that cluster slices of keys or queries.

    subspaces: m, a divisor of the head dimension. split: `strided` puts the dimensions i with i mod m = b into
        subspace b, `contiguous` cuts slices. iterations: of k-means.
    """

    subspaces: int
    split: str
    iterations: int

    def __post_init__(self) -> None:
        self._require_one_of("split", ("strided", "contiguous"))
        self._require_at_least(1, "subspaces", "iterations")


def _typed(given: Mapping[str, Scalar], cls: type[Parameters]) -> dict[str, Any]:
    """`given` as keyword arguments for the dataclass."""
    known = {field.name: field for field in fields(cls)}
    unknown = sorted(set(given) - set(known))
    missing = sorted(name for name, f in known.items() if name not in given and f.default is MISSING)
    if unknown:
        raise InvalidArgumentError(
            f"{cls.label}: there is no {' and no '.join(unknown)}, expected some of {', '.join(known) or 'nothing'}"
        )
    if missing:
        raise InvalidArgumentError(f"{cls.label}: {' and '.join(missing)} is missing")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, _KINDS[str(known[name].type)]):
            raise InvalidArgumentError(
                f"{cls.label}: {name} is {value!r}, expected a value of type {known[name].type}"
            )
    return dict(given)
