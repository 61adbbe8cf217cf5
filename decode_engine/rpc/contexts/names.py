"""Names of contexts as resources."""

from __future__ import annotations

from index_store.errors import InvalidArgumentError
from index_store.store.description.context_id import is_context_id

COLLECTION = "contexts/"


def parse_name(name: str, field: str = "name") -> str:
    """The id in a resource name. Raises InvalidArgumentError unless it is `contexts/` and a context id, in any case."""
    id_ = name.removeprefix(COLLECTION).lower()
    if not name.startswith(COLLECTION) or not is_context_id(id_):
        raise InvalidArgumentError(
            f"{field} is {name[:100]!r}, expected {COLLECTION} and 64 hexadecimal digits",
            field=field,
        )
    return id_
