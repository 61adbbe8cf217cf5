"""What values of a request have to be: in words, as a question, and as JSON schema says it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value has to be. shown: in words. fits: whether one is. schema: the same as far as JSON schema says it."""

    shown: str
    fits: Callable[[Any], bool]
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers of least to most; with `above`, not least itself. whole: integers alone."""

    least: float
    most: float
    above: bool = False
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number is one of these; NaN is none."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    @property
    def words(self) -> str:
        """Of a value that is a number."""
        if self.above:
            return f"a number above {self.least:g} and at most {self.most:g}"
        return f"{self.least} to {self.most}" if self.whole else f"{self.least:g} to {self.most:g}"

    @property
    def kind(self) -> Kind:
        """Of a value that may be anything."""
        least = "exclusiveMinimum" if self.above else "minimum"
        schema = {"type": "integer" if self.whole else "number", least: self.least, "maximum": self.most}
        if self.whole:
            shown = f"an integer of {self.least} to {self.most}"
        elif self.above:
            shown = f"a number above {self.least:g}, at most {self.most:g}"
        else:
            shown = f"a number of {self.least:g} to {self.most:.12g}"
        is_one = is_integer if self.whole else is_number
        return Kind(shown, lambda value: is_one(value) and self.holds(value), schema)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether a value of JSON is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_object(value: Any, most: int) -> bool:
    """Whether a value of JSON is an object of at most so many members."""
    return isinstance(value, dict) and len(value) <= most


def list_of(one: Kind, most: int) -> Callable[[Any], bool]:
    """Whether a value is a list of at most so many. Looked at first: the rest takes time for each."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(one.fits, value))


def listed(one: Kind, most: int) -> Mapping[str, Any]:
    """The JSON schema of the same."""
    return {"type": "array", "items": one.schema, "maxItems": most}


ANY = Kind("anything", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str), {"type": "string"})
FLAG = Kind("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"})
TOKENS = Kind(
    "a list of token ids",
    lambda value: isinstance(value, list) and all(is_integer(id_) and id_ >= 0 for id_ in value),
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
)


def shown(value: object) -> str:
    """A value as a sentence quotes it, cut where it is long."""
    if isinstance(value, list | dict) and len(value) > _MOST_SHOWN:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(_cut(value, 4))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cut(value: object, depth: int) -> object:
    """The beginning of a value: to write all of a large one only to quote it would take others' time."""
    if isinstance(value, str):
        return value[:80]
    if depth == 0 and isinstance(value, list | dict):
        return "..."
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value[:_MOST_SHOWN]]
    if isinstance(value, dict):
        return {str(name)[:80]: _cut(item, depth - 1) for name, item in islice(value.items(), _MOST_SHOWN)}
    return value
