"""From stored or given parameters to the arguments of a frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from index_store.errors import InvalidArgumentError
from index_store.store.json_fields import Scalar

_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def typed_parameters(given: Mapping[str, Scalar], cls: type[Any], label: str) -> dict[str, Any]:
    """`given` as keyword arguments for the dataclass `cls` of int, float and str fields.

    Raises InvalidArgumentError, led by `label`, for a name that is missing or unknown, or a value of another type.
    """
    known = {field.name: field for field in fields(cls)}
    unknown = sorted(set(given) - set(known))
    missing = sorted(name for name, f in known.items() if name not in given and f.default is MISSING)
    if unknown or missing:
        raise InvalidArgumentError(f"{label}: unknown parameters {unknown}, missing parameters {missing}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, _KINDS[str(known[name].type)]):
            raise InvalidArgumentError(
                f"{label}: {name} is {value!r}, expected a value of type {known[name].type}"
            )
    return dict(given)
