"""Reading JSON objects field by field: every error names the field, the value found and where it was found.

Numbers and texts have bounds, so that whatever a file holds can be computed with, shown and sent: integers fit into
64 bits with their sign, numbers are finite, texts are printable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from index_store.errors import ManifestError

Scalar = str | int | float | bool
Item = TypeVar("Item")

MOST = 2**63 - 1
"""The largest integer of a stored file, and the most bytes of a context."""

MOST_LABELS = 64
"""Of a context."""

_LABEL_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_MOST_CHARACTERS = 10_000
_INTEGER = "an integer of at most 64 bits"
_SHOWN_CHARACTERS = 120


def shown(value: object) -> str:
    """A value as errors show it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def field_error(field: str, found: object, expected: str, where: str = "") -> ManifestError:
    """The error of a field that does not hold what it must."""
    value, field = shown(found), field[:_SHOWN_CHARACTERS]
    field = field if field.isprintable() else ascii(field)
    prefix = f"{where}: " if where else ""
    return ManifestError(
        f"{prefix}field {field!r} is {value}, expected {expected}", field=field, value=value, path=where
    )


class JsonFields:
    """One JSON object being parsed. `where` names its file, `prefix` the path of the object inside it."""

    def __init__(self, document: object, where: str, prefix: str = "") -> None:
        if not isinstance(document, dict):
            raise field_error(prefix or "manifest", document, "a JSON object", where)
        self._document = document
        self._where = where
        self._prefix = f"{prefix}." if prefix else ""
        self._taken: set[str] = set()

    def text(self, name: str) -> str:
        value: str = self._take(name, is_text, "a printable text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, as a tuple."""
        value = self._take(
            name,
            lambda value: isinstance(value, list) and all(map(is_text, value)),
            "a list of printable texts",
        )
        return tuple(value)

    def digits(self, name: str) -> str:
        """A string of any length and contents, for digits that whoever takes it checks."""
        value: str = self._take(name, lambda value: isinstance(value, str), "digits")
        return value

    def integer(self, name: str) -> int:
        value: int = self._take(name, is_integer, _INTEGER)
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None where the field holds null."""
        value: int | None = self._take(
            name, lambda value: value is None or is_integer(value), f"{_INTEGER}, or null"
        )
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, as a tuple."""
        value = self._take(
            name,
            lambda value: isinstance(value, list) and all(map(is_integer, value)),
            f"a list, each {_INTEGER}",
        )
        return tuple(value)

    def number(self, name: str) -> float:
        value: float = self._take(name, is_number, "a finite number")
        return value

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None where the field holds null."""
        value: float | None = self._take(
            name, lambda value: value is None or is_number(value), "a finite number or null"
        )
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers, as a tuple."""
        value = self._take(
            name,
            lambda value: isinstance(value, list) and all(map(is_number, value)),
            "a list of finite numbers",
        )
        return tuple(value)

    def time(self, name: str) -> datetime:
        """An ISO 8601 time with its offset."""
        return self._parse_time(name, self.text(name))

    def optional_time(self, name: str) -> datetime | None:
        """An ISO 8601 time, or None where the field holds null."""
        value = self._take(name, lambda value: value is None or isinstance(value, str), "a time or null")
        return None if value is None else self._parse_time(name, str(value))

    def scalars(self, name: str) -> dict[str, Scalar]:
        """An object whose values are strings, numbers or booleans."""
        value = self._take(
            name,
            lambda value: isinstance(value, dict) and are_scalars(value),
            "an object of printable texts, finite numbers and booleans",
        )
        return dict(value)

    def texts_by_name(self, name: str) -> dict[str, str]:
        """An object whose values are printable texts."""
        value = self._take(
            name,
            lambda value: isinstance(value, dict) and all(map(is_text, (*value, *value.values()))),
            "an object of printable texts",
        )
        return dict(value)

    def flag(self, name: str) -> bool:
        value: bool = self._take(name, lambda value: isinstance(value, bool), "true or false")
        return value

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """An object whose values are finite numbers."""
        value = self._take(
            name,
            lambda value: isinstance(value, dict) and are_numbers(value),
            "an object of finite numbers",
        )
        return dict(value)

    def item(self, name: str, parse: Callable[[JsonFields], Item]) -> Item:
        """A nested object, read by `parse`."""
        value = self._take(name, lambda value: isinstance(value, dict), "an object")
        return _parse_whole(JsonFields(value, self._where, f"{self._prefix}{name}"), parse)

    def optional_item(self, name: str, parse: Callable[[JsonFields], Item]) -> Item | None:
        """A nested object, or None where the field holds null."""
        value = self._take(name, lambda value: value is None or isinstance(value, dict), "an object or null")
        if value is None:
            return None
        return _parse_whole(JsonFields(value, self._where, f"{self._prefix}{name}"), parse)

    def items(self, name: str, parse: Callable[[JsonFields], Item]) -> tuple[Item, ...]:
        """A list of nested objects, each read by `parse`."""
        values: Any = self._take(name, lambda value: isinstance(value, list), "a list of objects")
        return tuple(
            _parse_whole(JsonFields(value, self._where, f"{self._prefix}{name}[{i}]"), parse)
            for i, value in enumerate(values)
        )

    def has(self, name: str) -> bool:
        """Whether the object has the field."""
        return name in self._document

    def finish(self) -> None:
        """Raises ManifestError when the object holds a field that nothing read."""
        unknown = sorted(set(self._document) - self._taken)
        if unknown:
            name = unknown[0]
            raise field_error(f"{self._prefix}{name}", self._document[name], "no such field", self._where)

    def _take(self, name: str, accept: Callable[[object], bool], expected: str) -> Any:
        if name not in self._document:
            raise ManifestError(
                f"{self._where}: field '{self._prefix}{name}' is missing, expected {expected}",
                field=f"{self._prefix}{name}",
                path=self._where,
            )
        value = self._document[name]
        if not accept(value):
            raise field_error(f"{self._prefix}{name}", value, expected, self._where)
        self._taken.add(name)
        return value

    def _parse_time(self, name: str, value: str) -> datetime:
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            raise field_error(f"{self._prefix}{name}", value, "an ISO 8601 time", self._where) from None


def is_integer(value: object) -> bool:
    """Whether the value is an int of at most 64 bits; booleans are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST


def is_number(value: object) -> bool:
    """Whether the value is an int of at most 64 bits or a finite float; booleans are not numbers here."""
    return math.isfinite(value) if isinstance(value, float) else is_integer(value)


def is_text(value: object) -> bool:
    """Whether the value is a string that can be printed: no control characters, nothing that has no UTF-8."""
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()


def is_scalar(value: object) -> bool:
    """Whether the value is a printable text, a finite number or a boolean."""
    return isinstance(value, bool) or is_text(value) or is_number(value)


def are_scalars(values: Mapping[str, object]) -> bool:
    """Whether a mapping is one of texts to scalars."""
    return all(map(is_text, values)) and all(map(is_scalar, values.values()))


def are_numbers(values: Mapping[str, object]) -> bool:
    """Whether a mapping is one of texts to finite numbers."""
    return all(map(is_text, values)) and all(map(is_number, values.values()))


def check_name(name: str, value: object) -> None:
    """Raises ManifestError unless the field is a printable string of 1 to 500 characters."""
    # Names end up in terminals and logs: control characters have no business there.
    if not isinstance(value, str) or not value or len(value) > 500 or not value.isprintable():
        raise field_error(name, value, "1-500 printable characters")


def check_names(name: str, values: Sequence[object]) -> None:
    """Raises ManifestError unless the field lists one or more different names."""
    if not values or len(set(values)) != len(values):
        raise field_error(name, values, "one or more different names")
    for number, value in enumerate(values):
        check_name(f"{name}[{number}]", value)


def check_labels(name: str, labels: Mapping[str, object]) -> None:
    """Raises ManifestError unless the field holds at most 64 labels: short keys, with short printable texts."""
    if len(labels) > MOST_LABELS:
        raise field_error(name, f"{len(labels)} labels", f"at most {MOST_LABELS}")
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            expected = "1-63 small letters, digits, '_', '-' and '.', beginning with a letter"
            raise field_error(f"{name} key", key, expected)
        if not isinstance(value, str) or len(value) > 63 or not value.isprintable():
            raise field_error(f"{name}.{key}", value, "at most 63 printable characters")


def check_positive(name: str, value: int, most: int = MOST) -> None:
    """Raises ManifestError unless the field is an integer of 1 to `most`."""
    if not is_integer(value) or not 1 <= value <= most:
        raise field_error(name, value, f"an integer of 1 to {most}")


def check_utc(name: str, value: datetime) -> None:
    """Raises ManifestError unless the time is in UTC."""
    if value.utcoffset() != timedelta(0):
        raise field_error(name, value.isoformat(), "a time in UTC")


def _parse_whole(fields: JsonFields, parse: Callable[[JsonFields], Item]) -> Item:
    item = parse(fields)
    fields.finish()
    return item
