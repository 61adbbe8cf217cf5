"""What UpdateContext changes of a context (AIP-134)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from index_store.errors import InvalidArgumentError, ManifestError
from index_store.store.catalog import Store, require_free, take_name
from index_store.store.description.manifest import Manifest
from sparsekv.v1 import context_pb2

_FIELDS = ("display_name", "expire_time", "labels", "pinned")
_LABEL = "labels."


def update_context(
    store: Store, id_: str, request: context_pb2.UpdateContextRequest, wait_s: float
) -> Manifest:
    """Changes a context as a request says. Raises NameTakenError, and what `parse_update` and `Store.update` raise."""
    change, name = parse_update(request), request.context.display_name
    before = store.manifest(id_)
    if name == change(before).name and name != before.name and not request.move_name:
        require_free(store, name, before.model.fingerprint, id_)
    changed = store.update(id_, change, wait_s=wait_s)
    return take_name(store, id_, changed.name) if request.move_name else changed


def parse_update(request: context_pb2.UpdateContextRequest) -> Callable[[Manifest], Manifest]:
    """What makes of a context's manifest what is asked for.

    Raises InvalidArgumentError for a field that cannot be changed; what it returns does so for values out of bounds.
    """
    paths = tuple(dict.fromkeys(request.update_mask.paths)) or _fields_set(request.context)
    if paths == ("*",):
        paths = _FIELDS
    for path in paths:
        if path not in _FIELDS and not (path.startswith(_LABEL) and path != _LABEL):
            raise InvalidArgumentError(
                f"update_mask: found {path[:100]!r}, expected some of {', '.join(_FIELDS)}, labels.KEY, or * alone",
                field="update_mask",
            )
    if not paths:
        raise InvalidArgumentError(
            f"nothing to change: set some of {', '.join(_FIELDS)}, or name them in update_mask",
            field="update_mask",
        )
    wanted = context_pb2.Context()
    wanted.CopyFrom(request.context)
    expiry = _expiry(wanted) if "expire_time" in paths else None

    def change(present: Manifest) -> Manifest:
        try:
            return replace(
                present,
                name=wanted.display_name if "display_name" in paths else present.name,
                expires_at=expiry if "expire_time" in paths else present.expires_at,
                labels=_labels(dict(present.labels), wanted, paths),
                pinned=wanted.pinned if "pinned" in paths else present.pinned,
            )
        except ManifestError as error:
            message = error.message.replace("field 'name'", "field 'display_name'")
            raise InvalidArgumentError(message, **error.metadata) from None

    return change


def _fields_set(context: context_pb2.Context) -> tuple[str, ...]:
    set_ = {
        "display_name": bool(context.display_name),
        "expire_time": context.HasField("expire_time"),
        "labels": bool(context.labels),
        "pinned": context.pinned,
    }
    return tuple(name for name in _FIELDS if set_[name])


def _labels(labels: dict[str, str], wanted: context_pb2.Context, paths: tuple[str, ...]) -> dict[str, str]:
    if "labels" in paths:
        labels = dict(wanted.labels)
    for path in paths:
        if path.startswith(_LABEL):
            key = path.removeprefix(_LABEL)
            labels.pop(key, None)
            if key in wanted.labels:
                labels[key] = wanted.labels[key]
    return labels


def _expiry(context: context_pb2.Context) -> datetime | None:
    if not context.HasField("expire_time"):
        return None
    try:
        return context.expire_time.ToDatetime(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"expire_time: {error}; expected a time of the years 1 to 9999", field="expire_time"
        ) from None
