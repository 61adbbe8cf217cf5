"""Which contexts a call means, and what it changes of one: names, lists in pages, updates."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from index_store.errors import ContextNotFoundError, InvalidArgumentError, ManifestError
from index_store.jobs.job_record import check_ttl
from index_store.store.catalog import Store, require_free, take_name
from index_store.store.clean_up import KEPT_BEGINNING
from index_store.store.description.callers import Caller
from index_store.store.description.context_id import is_context_id
from index_store.store.description.manifest import Manifest
from index_store.store.listing import STATES, BrokenContext, Entry, place_of, state_of
from sparsekv.v1 import context_pb2 as pb

COLLECTION = "contexts/"


def parse_name(name: str, field: str = "name") -> str:
    """The id in a resource name. Raises InvalidArgumentError unless it is `contexts/` and a context id, in any case."""
    id_ = name.removeprefix(COLLECTION).lower()
    if not name.startswith(COLLECTION) or not is_context_id(id_):
        raise InvalidArgumentError(
            f"{field} is {name[:100]!r}, expected {COLLECTION} and 64 hexadecimal digits", field=field
        )
    return id_


DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
MAX_REFERENCE_CHARACTERS = 600

_SIGNATURE_BYTES = 16


def page_size(request: pb.ListContextsRequest | operations_pb2.ListOperationsRequest) -> int:
    """Entries that a page may have. Raises InvalidArgumentError for a negative size."""
    if request.page_size < 0:
        raise InvalidArgumentError(f"page_size is {request.page_size}, expected 0 or more", field="page_size")
    return min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def find_context(store: Store, request: pb.GetContextRequest, model: str) -> Entry:
    """The context that a request names or calls something. model: whose contexts are meant first, by its fingerprint.

    Raises InvalidArgumentError, ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
    """
    if bool(request.name) == bool(request.reference):
        raise InvalidArgumentError("give exactly one of name, reference", field="name")
    if len(request.reference) > MAX_REFERENCE_CHARACTERS:
        raise InvalidArgumentError(
            f"reference has {len(request.reference)} characters, expected at most {MAX_REFERENCE_CHARACTERS}",
            field="reference",
        )
    return store.entry(parse_name(request.name) if request.name else store.resolve(request.reference, model))


def fits(entry: Entry, request: pb.ListContextsRequest, state: str) -> bool:
    """Whether a context is one of those that a list asks for. state: its own, one of STATES.

    One whose manifest cannot be used has no name and no labels.
    """
    if request.state and state != pb.Context.State.Name(request.state):
        return False
    name, labels = ("", {}) if isinstance(entry, BrokenContext) else (entry.name, entry.labels)
    return name.startswith(request.name_prefix) and request.labels.items() <= labels.items()


class Pager:
    """Cuts lists of contexts into pages. Tokens are valid for pagers with the same key, and for one list."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def page(self, store: Store, request: pb.ListContextsRequest) -> tuple[list[Entry], str]:
        """One page of the contexts that fit, newest first, and the token of the next one ("" for the last page).

        A page starts after the last entry of the page before. Its entries are as they are now: those that were deleted
        meanwhile are left out. Raises InvalidArgumentError for a negative size, a filter or an order of the language
        that there was, an unknown state, or a token of another origin or another list.
        """
        for field in ("filter", "order_by"):
            if given := getattr(request, field):
                raise InvalidArgumentError(
                    f"{field} is {given[:100]!r}, expected none: lists come newest first, of the contexts with a "
                    "name_prefix, labels and a state, which are fields of their own",
                    field=field,
                )
        if request.state not in pb.Context.State.values():
            raise InvalidArgumentError(
                f"state is {request.state}, expected one of {', '.join(STATES)}", field="state"
            )
        size = page_size(request)
        asked = (request.name_prefix, str(sorted(request.labels.items())), str(request.state))
        last = tuple(self.read(request.page_token, asked)) if request.page_token else None
        found = [
            entry
            for entry in store.entries()
            if (last is None or place_of(entry) > last)
            and fits(
                entry, request, state_of(entry, expired=isinstance(entry, Manifest) and store.expired(entry))
            )
        ]
        token = self.token(place_of(found[size - 1]), asked) if size < len(found) else ""
        page = []
        for entry in found[:size]:
            try:
                page.append(store.entry(entry.id))
            except ContextNotFoundError:
                continue
        return page, token

    def token(self, place: object, of: tuple[str, ...]) -> str:
        """A token that only `read` makes something of. of: what the list was asked by, no two lists the same."""
        payload = json.dumps((place, of)).encode()
        return base64.urlsafe_b64encode(self._sign(payload) + payload).decode()

    def read(self, token: str, of: tuple[str, ...]) -> Any:
        """The place in a list. Raises InvalidArgumentError for a token of another origin or another list."""
        try:
            raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raw = b""
        signature, payload = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(payload)):
            raise InvalidArgumentError(
                "page_token is not one that this server issued since it started; "
                "pass next_page_token of the previous page unchanged, or start again without one",
                field="page_token",
            )
        place, was_of = json.loads(payload)
        if tuple(was_of) != of:
            raise InvalidArgumentError(
                "page_token is of a list of other contexts; ask for the same as for the previous page, or start again "
                "without a token",
                field="page_token",
            )
        return place

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, hashlib.sha256)[:_SIGNATURE_BYTES]


_CHANGEABLE = ("display_name", "expire_time", "renew", "labels", "pinned", "readers")
_LABEL = "labels."


def update_context(
    store: Store, id_: str, request: pb.UpdateContextRequest, wait_s: float, caller: Caller
) -> Manifest:
    """Changes a context as a request says. Raises NameTakenError, what `parse_update` and `Store.update` raise, and
    PermissionDeniedError for a pin, or a label of the server's own, without the right admin, and for an earlier end
    without the right delete."""
    change, name = parse_update(request), request.context.display_name
    if "pinned" in request.update_mask.paths or request.context.pinned:
        caller.require("admin")
    store.require_own(id_)

    def allowed(present: Manifest) -> Manifest:
        changed = change(present)
        if changed.renew is not None and changed.expires_at is None:
            changed = replace(changed, expires_at=store.now()).renewed(store.now())
        if changed.pinned != present.pinned:
            caller.require("admin")
        require_own_labels(caller, changed.labels.keys() - present.labels.keys())
        end = changed.expires_at
        if end is not None and (present.expires_at is None or end < present.expires_at):
            caller.require("delete")
        return changed

    before = store.manifest(id_)
    if name == allowed(before).name and name != before.name and not request.move_name:
        require_free(store, name, before.model.fingerprint, id_, before.tenant)
    changed = store.update(id_, allowed, wait_s=wait_s)
    return take_name(store, id_, changed.name) if request.move_name else changed


def require_own_labels(caller: Caller, labels: Collection[str]) -> None:
    """Raises PermissionDeniedError for a label without the right admin by which a server knows what it may drop: what
    has it counts against the room that all have for such contexts."""
    if KEPT_BEGINNING in labels:
        caller.require("admin")


def changed_fields(request: pb.UpdateContextRequest) -> tuple[str, ...]:
    """The fields that a request changes, those of labels as `labels.KEY`. They may be none, or none that is there."""
    paths = tuple(dict.fromkeys(request.update_mask.paths)) or _fields_set(request.context)
    return _CHANGEABLE if paths == ("*",) else paths


def parse_update(request: pb.UpdateContextRequest) -> Callable[[Manifest], Manifest]:
    """What makes of a context's manifest what is asked for.

    Raises InvalidArgumentError for a field that cannot be changed; what it returns does so for values out of bounds.
    """
    paths = changed_fields(request)
    for path in paths:
        if path not in _CHANGEABLE and not (path.startswith(_LABEL) and path != _LABEL):
            raise InvalidArgumentError(
                f"update_mask: found {path[:100]!r}, expected some of {', '.join(_CHANGEABLE)}, labels.KEY, or * alone",
                field="update_mask",
            )
    if not paths:
        raise InvalidArgumentError(
            f"nothing to change: set some of {', '.join(_CHANGEABLE)}, or name them in update_mask",
            field="update_mask",
        )
    wanted = pb.Context()
    wanted.CopyFrom(request.context)
    expiry = _expiry(wanted) if "expire_time" in paths else None
    renew = seconds_of(wanted.renew, "renew") if "renew" in paths and wanted.HasField("renew") else None
    for_good = "expire_time" in paths and expiry is None

    def change(present: Manifest) -> Manifest:
        try:
            return replace(
                present,
                name=wanted.display_name if "display_name" in paths else present.name,
                expires_at=expiry if "expire_time" in paths else present.expires_at,
                renew=renew if "renew" in paths or for_good else present.renew,
                labels=_labels(dict(present.labels), wanted, paths),
                pinned=wanted.pinned if "pinned" in paths else present.pinned,
                readers=tuple(wanted.readers) if "readers" in paths else present.readers,
            )
        except ManifestError as error:
            message = error.message.replace("field 'name'", "field 'display_name'")
            raise InvalidArgumentError(message, **error.metadata) from None

    return change


def _fields_set(context: pb.Context) -> tuple[str, ...]:
    set_ = {
        "display_name": bool(context.display_name),
        "expire_time": context.HasField("expire_time"),
        "renew": context.HasField("renew"),
        "labels": bool(context.labels),
        "pinned": context.pinned,
        "readers": bool(context.readers),
    }
    return tuple(name for name in _CHANGEABLE if set_[name])


def _labels(labels: dict[str, str], wanted: pb.Context, paths: tuple[str, ...]) -> dict[str, str]:
    if "labels" in paths:
        labels = dict(wanted.labels)
    for path in paths:
        if path.startswith(_LABEL):
            key = path.removeprefix(_LABEL)
            labels.pop(key, None)
            if key in wanted.labels:
                labels[key] = wanted.labels[key]
    return labels


def seconds_of(duration: Duration, name: str) -> float:
    """A time to live. Raises InvalidArgumentError for one out of range."""
    seconds: float = duration.seconds + duration.nanos / 1e9
    check_ttl(seconds, name)
    return seconds


def _expiry(context: pb.Context) -> datetime | None:
    if not context.HasField("expire_time"):
        return None
    try:
        return context.expire_time.ToDatetime(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"expire_time: {error}; expected a time of the years 1 to 9999", field="expire_time"
        ) from None
