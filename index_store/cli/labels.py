"""Labels as people write them on a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from index_store.errors import InvalidArgumentError

LabelArguments = Annotated[
    list[str], typer.Argument(metavar="KEY=VALUE", help="Labels to set; KEY- removes one.")
]


def parse_labels(words: Sequence[str]) -> dict[str, str | None]:
    """Values by key, None for a label to remove. Raises InvalidArgumentError."""
    labels: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        removed = not equals and key.endswith("-")
        if not (equals or removed) or not key.rstrip("-"):
            raise InvalidArgumentError(f"label {word[:80]!r}: expected KEY=VALUE, or KEY- to remove it")
        key = key[:-1] if removed else key
        if key in labels:
            raise InvalidArgumentError(f"label {key[:80]!r} is given twice, expected it once")
        labels[key] = None if removed else value
    return labels


def with_labels(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The labels after some were set or removed."""
    kept = {key: value for key, value in present.items() if key not in changes}
    return kept | {key: value for key, value in changes.items() if value is not None}


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as they are written."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "-"
