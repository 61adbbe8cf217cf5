"""Orders of lists (AIP-132): fields, each perhaps followed by `desc`; what is equal in them stands newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cmp_to_key

from decode_engine.rpc.contexts.context_fields import FIELDS, Row, Value, ValueType
from index_store.errors import InvalidArgumentError
from index_store.store.listing import Place, place_of

ORDERED = tuple(
    name for name, kind in FIELDS.items() if kind in (ValueType.TEXT, ValueType.NUMBER, ValueType.TIME)
)
"""Fields that lists can be ordered by."""

Key = tuple[tuple[str | int | float | None, ...], Place]
"""Where a context stands: its values of the fields (None without one), and its place among those that equal it."""


@dataclass(frozen=True, slots=True)
class ListOrder:
    """fields: with whether the largest comes first."""

    fields: tuple[tuple[str, bool], ...] = ()

    def key(self, row: Row) -> Key:
        """Where a context stands, as numbers and texts."""
        return tuple(_plain(row.values.get(name)) for name, _ in self.fields), place_of(row.entry)

    def after(self, rows: Sequence[Row], last: Key | None) -> list[Row]:
        """The contexts in this order, those without a field behind the others; only those behind `last`.

        They come newest first.
        """
        ordered = list(rows)
        if self.fields:
            ordered.sort(key=cmp_to_key(lambda one, other: self._compare(self.key(one), self.key(other))))
        if last is None:
            return ordered
        return [row for row in ordered if self._compare(self.key(row), last) > 0]

    def _compare(self, one: Key, other: Key) -> int:
        for (_, largest_first), mine, theirs in zip(self.fields, one[0], other[0], strict=True):
            if mine == theirs:
                continue
            if mine is None or theirs is None:
                return 1 if mine is None else -1
            return -1 if (mine > theirs) == largest_first else 1  # type: ignore[operator]  # of one field, one type
        return -1 if one[1] < other[1] else int(one[1] > other[1])


def parse_order(text: str) -> ListOrder:
    """The order that a text asks for. Raises InvalidArgumentError."""
    fields: list[tuple[str, bool]] = []
    for part in text.split(",") if text.strip() else ():
        words = part.split()
        if not words or words[0] not in ORDERED or words[1:] not in ([], ["asc"], ["desc"]):
            raise InvalidArgumentError(
                f"order_by: found {part.strip()[:60]!r}, expected one of {', '.join(ORDERED)}, "
                "perhaps followed by desc",
                field="order_by",
            )
        if words[0] in dict(fields):
            raise InvalidArgumentError(f"order_by names {words[0]} twice, expected it once", field="order_by")
        fields.append((words[0], words[1:] == ["desc"]))
    if fields == [("create_time", True)]:  # as they are listed anyway
        return ListOrder()
    return ListOrder(tuple(fields))


def _plain(value: Value | None) -> str | int | float | None:
    return value.timestamp() if isinstance(value, datetime) else value
