"""What fields of stored records may hold; every error names the field, the value found and what was expected.

Numbers and texts have bounds, so that whatever a file holds can be computed with, shown and sent: integers fit into
64 bits with their sign, numbers are finite, texts are printable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated

from msgspec import Meta

from index_store.errors import ManifestError

MOST = 2**63 - 1
"""The largest integer of a stored file, and the most bytes of a context."""

Whole = Annotated[int, Meta(ge=-MOST, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Number = Whole | float
"""Stays what it is: a field that is only `float` makes 1.0 of 1, and a file that is written again would differ."""

Scalar = str | Whole | float | bool

MOST_LABELS = 64
"""Of a context."""

_LABEL_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_MOST_CHARACTERS = 10_000
_SHOWN_CHARACTERS = 120


def shown(value: object) -> str:
    """A value as errors show it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def field_error(field: str, found: object, expected: str) -> ManifestError:
    """The error of a field that does not hold what it must."""
    value, field = shown(found), field[:_SHOWN_CHARACTERS]
    field = field if field.isprintable() else ascii(field)
    return ManifestError(f"field {field!r} is {value}, expected {expected}", field=field, value=value)


def is_integer(value: object) -> bool:
    """Whether the value is an int of at most 64 bits; booleans are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and -MOST <= value <= MOST


def is_text(value: object) -> bool:
    """Whether the value is a string that can be printed: no control characters, nothing that has no UTF-8."""
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()


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
