"""What is known of a kind of index before one is built: parameters, sizes, what methods may do. No torch here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from index_store.errors import InvalidArgumentError
from index_store.selection.budgets import PieceKind
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


SMALLEST = 64
"""Rows that a buffer has room for that grows."""


def grown(rows: int, least: int = SMALLEST, limit: int | None = None) -> int:
    """Room that doubling from `least` makes for so many rows, up to `limit` unless they need more; none for none."""
    if rows <= 0:
        return 0
    room = least << max(0, (rows - 1) // least).bit_length()
    return room if limit is None else max(rows, min(room, limit))


@dataclass(frozen=True, slots=True)
class Growth:
    """How far an extension grows.

    keys: of the context. appended: keys appended in all. block: every append ends at the next multiple of so many
        positions, the context's included.
    """

    keys: int
    appended: int
    block: int


@dataclass(frozen=True)
class BuildParameters(Parameters, ABC):
    """What an index is built with, and what follows from it. By default its rankings' logits approximate q.k."""

    @abstractmethod
    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes stored per token of a long context, KV head and layer."""

    @abstractmethod
    def appended_bytes(self, head_dim: int, growth: Growth) -> int:
        """Bytes that an extension may come to hold per KV head and layer (`AppendedKeys.nbytes`), whatever the keys."""

    def estimates_logits(self, search: Parameters | None) -> bool:
        """Whether a ranking's logits approximate q.k, so that budgets may take their softmax for attention weights."""
        return True

    def check_search(self, search: Parameters | None) -> None:
        """Raises InvalidArgumentError for search options that do not fit these parameters."""


@dataclass(frozen=True)
class SubspaceParameters(BuildParameters):
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


class IndexKind:
    """One kind of index; `LayerIndex` is one that is there."""

    kind: ClassVar[str]

    parameters_type: ClassVar[type[BuildParameters]]
    search_type: ClassVar[type[Parameters] | None] = None
    """What build parameters and search options are; None where a search has no options."""

    divides_into: ClassVar[PieceKind | None] = None
    """What it divides all keys into, so that a remainder can be computed over it; None if nothing."""

    needs_queries: ClassVar[bool] = False
    """Whether it is built from the whole sample of queries, which only the reading of the document has. All others can
    be added to a stored context from its keys and values."""

    @classmethod
    def check_options(cls, parameters: Mapping[str, Scalar], search: Mapping[str, Scalar]) -> None:
        """Raises InvalidArgumentError unless build parameters and search options are complete, known and fit."""
        cls.parameters_type.parse(parameters).check_search(cls.parse_search(search))

    @classmethod
    def misfit(cls, parameters: Mapping[str, Scalar], head_dim: int) -> str:
        """Why one with these parameters finds too little on heads of so many dimensions; "" where it does not."""
        return ""

    @classmethod
    def parse_search(cls, search: Mapping[str, Scalar]) -> Parameters | None:
        """The search options, None where there are none. Raises InvalidArgumentError for unknown or unfit ones."""
        if cls.search_type is not None:
            return cls.search_type.parse(search)
        if search:
            raise InvalidArgumentError(
                f"index kind {cls.kind!r} takes no search options, got {sorted(search)}"
            )
        return None
