"""What lists of contexts are filtered and ordered by: the fields of a context, with their types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from decode_engine.rpc.contexts.names import COLLECTION
from index_store.store.listing import STATES, BrokenContext, Entry, state_of

Value = str | int | bool | datetime


class ValueType(Enum):
    """Types of fields, by the words that errors use for a value of one."""

    TEXT = "a text"
    NUMBER = "a whole number"
    TIME = "a time such as 2026-11-23T12:00:00Z"
    FLAG = "true or false"
    STATE = f"one of {', '.join(STATES)}"


FIELDS: Mapping[str, ValueType] = {
    "name": ValueType.TEXT,
    "display_name": ValueType.TEXT,
    "model": ValueType.TEXT,
    "state": ValueType.STATE,
    "create_time": ValueType.TIME,
    "expire_time": ValueType.TIME,
    "token_count": ValueType.NUMBER,
    "pinned": ValueType.FLAG,
    "is_conversation": ValueType.FLAG,
    "owner": ValueType.TEXT,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A context as lists see it. values: of the fields that it has."""

    entry: Entry
    values: Mapping[str, Value]
    labels: Mapping[str, str] = field(default_factory=dict)


def row_of(entry: Entry, *, expired: bool) -> Row:
    """The fields of a context; of one whose manifest cannot be used only its name and state."""
    if isinstance(entry, BrokenContext):
        return Row(entry, {"name": COLLECTION + entry.id, "state": state_of(entry, expired=expired)})
    values: dict[str, Value] = {
        "name": COLLECTION + entry.id,
        "display_name": entry.name,
        "model": entry.model.name,
        "state": state_of(entry, expired=expired),
        "create_time": entry.created_at,
        "token_count": entry.token_count,
        "pinned": entry.pinned,
        "is_conversation": entry.conversation is not None,
    }
    if entry.owner:
        values["owner"] = entry.owner
    if entry.expires_at is not None:
        values["expire_time"] = entry.expires_at
    return Row(entry, values, entry.labels)
