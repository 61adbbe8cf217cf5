"""Which contexts a call means, and what it changes of one: names, filters, orders, pages, updates."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from functools import cmp_to_key
from typing import Any

from google.protobuf.duration_pb2 import Duration

from index_store.errors import ContextNotFoundError, InvalidArgumentError, ManifestError
from index_store.jobs.job_record import check_ttl
from index_store.store.catalog import Store, require_free, take_name
from index_store.store.clean_up import KEPT_BEGINNING
from index_store.store.description.callers import Caller
from index_store.store.description.context_id import is_context_id
from index_store.store.description.manifest import Manifest
from index_store.store.listing import STATES, BrokenContext, Entry, Place, place_of, state_of
from sparsekv.v1 import context_pb2

COLLECTION = "contexts/"


def parse_name(name: str, field: str = "name") -> str:
    """The id in a resource name. Raises InvalidArgumentError unless it is `contexts/` and a context id, in any case."""
    id_ = name.removeprefix(COLLECTION).lower()
    if not name.startswith(COLLECTION) or not is_context_id(id_):
        raise InvalidArgumentError(
            f"{field} is {name[:100]!r}, expected {COLLECTION} and 64 hexadecimal digits", field=field
        )
    return id_


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


def row_of(entry: Entry, *, expired: bool, own: bool = True) -> Row:
    """The fields of a context; of one whose manifest cannot be used only its name and state.

    own: it is not another tenant's, which alone is told who made it.
    """
    if isinstance(entry, BrokenContext):
        return Row(entry, {"name": COLLECTION + entry.id, "state": state_of(entry, expired=expired)})
    values: dict[str, Value | None] = {
        "name": COLLECTION + entry.id,
        "display_name": entry.name,
        "model": entry.model.name,
        "state": state_of(entry, expired=expired),
        "create_time": entry.created_at,
        "token_count": entry.token_count,
        "pinned": entry.pinned,
        "is_conversation": entry.conversation is not None,
        "owner": (entry.owner or None) if own else None,
        "expire_time": entry.expires_at,
    }
    return Row(entry, {name: value for name, value in values.items() if value is not None}, entry.labels)


MAX_FILTER_CHARACTERS = 2000
_MAX_DEPTH = 32

Test = Callable[[Row], bool]

_ORDERS: Mapping[str, Callable[[Value, Value], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS: Mapping[ValueType, tuple[str, ...]] = {
    ValueType.TEXT: ("=", "!=", ":"),
    ValueType.NUMBER: tuple(_ORDERS),
    ValueType.TIME: tuple(_ORDERS),
    ValueType.FLAG: ("=", "!="),
    ValueType.STATE: ("=", "!="),
}
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<sign><=|>=|!=|[<>=:()])|(?P<word>[^\s"<>=!:()]+))'
)
_KEYWORDS = frozenset({"AND", "OR", "NOT"})


@dataclass(frozen=True, slots=True)
class _Token:
    """kind: "text", "sign", "word" or "end". place: of its first character, from 1."""

    kind: str
    text: str
    place: int

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text[:60])


def parse_filter(text: str) -> Test:
    """What tells whether a context fits a filter, in a part of AIP-160's language; every one fits an empty filter.

        filter     := part { AND part }            part := term { OR term }
        term       := [NOT | -] ( "(" filter ")" | comparison )
        comparison := FIELD OPERATOR VALUE         OPERATOR := = | != | < | <= | > | >= | :

    OR binds more tightly than AND, as AIP-160 has it. A context without the field fits no comparison but `!=`. Values
    are words or texts in double quotes. Raises InvalidArgumentError, which says at which character what was found.
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise InvalidArgumentError(
            f"filter has {len(text)} characters, expected at most {MAX_FILTER_CHARACTERS}", field="filter"
        )
    if not text.strip():
        return lambda row: True
    parser = _Parser(text)
    test = parser.filter(0)
    parser.expect_end()
    return test


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0

    def filter(self, depth: int) -> Test:
        """Parts that must all hold."""
        parts = [self._part(depth)]
        while self._takes("AND"):
            parts.append(self._part(depth))
        return parts[0] if len(parts) == 1 else lambda row: all(part(row) for part in parts)

    def expect_end(self) -> None:
        if self._ahead.kind != "end":
            raise _expected(self._ahead, "AND, OR or the end")

    def _part(self, depth: int) -> Test:
        terms = [self._term(depth)]
        while self._takes("OR"):
            terms.append(self._term(depth))
        return terms[0] if len(terms) == 1 else lambda row: any(term(row) for term in terms)

    def _term(self, depth: int) -> Test:
        if depth > _MAX_DEPTH:
            raise _expected(self._ahead, f"at most {_MAX_DEPTH} terms inside each other")
        if self._takes("NOT") or self._takes("-"):
            negated = self._term(depth + 1)
            return lambda row: not negated(row)
        if not self._takes("("):
            return self._comparison()
        inner = self.filter(depth + 1)
        if not self._takes(")"):
            raise _expected(self._ahead, "AND, OR or )")
        return inner

    def _comparison(self) -> Test:
        name = self._take()
        if name.kind == "word" and name.text.startswith("-") and len(name.text) > 1:
            positive = self._compared(_Token("word", name.text[1:], name.place + 1))
            return lambda row: not positive(row)
        return self._compared(name)

    def _compared(self, name: _Token) -> Test:
        if name.kind != "word" or name.text in _KEYWORDS:
            raise _expected(name, "a field")
        if name.text == "labels":
            return self._label_there()
        label = name.text.removeprefix("labels.") if name.text.startswith("labels.") else None
        kind = ValueType.TEXT if label is not None else FIELDS.get(name.text)
        if kind is None or label == "":
            raise _expected(name, f"one of {', '.join(FIELDS)}, labels.KEY")
        sign = self._take()
        if sign.kind != "sign" or sign.text not in _OPERATORS[kind]:
            raise _expected(sign, f"one of {', '.join(_OPERATORS[kind])}")
        value = self._take()
        if value.kind not in ("word", "text"):
            raise _expected(value, kind.value)
        wanted = _value(kind, value)
        if label is not None:
            key = label
            if sign.text == ":" and value.kind == "word" and value.text == "*":
                return lambda row: key in row.labels
            return _comparison(lambda row: row.labels.get(key), sign.text, wanted)
        field = name.text
        return _comparison(lambda row: row.values.get(field), sign.text, wanted)

    def _label_there(self) -> Test:
        sign = self._take()
        if sign.text != ":":
            raise _expected(sign, ": and a label's key, or labels.KEY before the sign")
        key = self._take()
        if key.kind not in ("word", "text"):
            raise _expected(key, "a label's key")
        text = _unquoted(key)
        return lambda row: text in row.labels

    @property
    def _ahead(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._ahead
        self._next += token.kind != "end"
        return token

    def _takes(self, text: str) -> bool:
        found = self._ahead.kind != "text" and self._ahead.text == text
        self._next += found
        return found


def _comparison(value_of: Callable[[Row], Value | None], sign: str, wanted: Value) -> Test:
    if sign == ":":
        part = str(wanted).casefold()
        return lambda row: part in str(value_of(row) or "").casefold()
    holds = _ORDERS[sign]

    def test(row: Row) -> bool:
        found = value_of(row)
        return sign == "!=" if found is None else holds(found, wanted)

    return test


def _value(kind: ValueType, token: _Token) -> Value:
    """The value that a token stands for. Raises InvalidArgumentError where it is none of that kind."""
    text = _unquoted(token)
    if kind is ValueType.TEXT:
        return text
    if kind is ValueType.FLAG and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is ValueType.STATE and text in STATES:
        return text
    if kind is ValueType.NUMBER and re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    if kind is ValueType.TIME:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise _expected(token, kind.value) from None
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time
    raise _expected(token, kind.value)


def _unquoted(token: _Token) -> str:
    return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL) if token.kind == "text" else token.text


def _tokens(text: str) -> list[_Token]:
    """The words, texts and signs of a filter, and its end. A word may hold the colons of a time."""
    tokens: list[_Token] = []
    position = 0
    while text[position:].strip():
        match = _TIME.match(text, position) if tokens and tokens[-1].text in _ORDERS else None
        match = match or _TOKEN.match(text, position)
        if match is None:
            rest = text[position:]
            place = position + len(rest) - len(rest.lstrip()) + 1
            found = _Token("sign", rest.strip()[:20], place)
            raise _expected(found, 'a field, a sign, a word, or a text that ends with "')
        kind = match.lastgroup or "word"
        tokens.append(_Token(kind, match[kind], match.start(kind) + 1))
        position = match.end()
    return [*tokens, _Token("end", "", len(text) + 1)]


_TIME = re.compile(r"\s*(?P<word>[0-9]{4}-[0-9]{2}-[0-9]{2}[^\s\"()]*)")


def _expected(found: _Token, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"filter: at character {found.place} found {found.shown}, expected {expected}",
        field="filter",
        position=found.place,
    )


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
    """The order (AIP-132) that a text asks for, fields perhaps followed by `desc`. Raises InvalidArgumentError."""
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


DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
MAX_REFERENCE_CHARACTERS = 600

_SIGNATURE_BYTES = 16


def find_context(store: Store, request: context_pb2.GetContextRequest, model: str) -> Entry:
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


class Pager:
    """Cuts lists of contexts into pages. Tokens are valid for pagers with the same key, and for one list."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def page(self, store: Store, request: context_pb2.ListContextsRequest) -> tuple[list[Entry], str]:
        """One page of the contexts that fit the filter, and the token of the next one ("" for the last page).

        A page starts after the last entry of the page before, wherever that entry would stand now. Its entries are as
        they are now: those that were deleted meanwhile are left out. Raises InvalidArgumentError for a negative size, a
        filter or an order that cannot be read, or a token of another origin or another list.
        """
        size, asked = request.page_size, (request.filter, request.order_by)
        if size < 0:
            raise InvalidArgumentError(f"page_size is {size}, expected 0 or more", field="page_size")
        size = min(size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        fits, order = parse_filter(request.filter), parse_order(request.order_by)
        last: Key | None = None
        if request.page_token:
            values, (broken, age, id_) = self.read(request.page_token, asked)
            last = tuple(values), (broken, age, id_)
        rows = (
            row_of(entry, expired=store.expired(entry), own=store.owns(entry))
            if isinstance(entry, Manifest)
            else row_of(entry, expired=False)
            for entry in store.entries()
        )
        found = order.after([row for row in rows if fits(row)], last)
        listed = found[:size]
        token = self.token(order.key(listed[-1]), asked) if size < len(found) else ""
        page = []
        for row in listed:
            try:
                page.append(store.entry(row.entry.id))
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
                "page_token is of a list with another filter or order_by; pass the same as for the previous page, or "
                "start again without a token",
                field="page_token",
            )
        return place

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, hashlib.sha256)[:_SIGNATURE_BYTES]


_CHANGEABLE = ("display_name", "expire_time", "renew", "labels", "pinned", "readers")
_LABEL = "labels."


def update_context(
    store: Store, id_: str, request: context_pb2.UpdateContextRequest, wait_s: float, caller: Caller
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


def changed_fields(request: context_pb2.UpdateContextRequest) -> tuple[str, ...]:
    """The fields that a request changes, those of labels as `labels.KEY`. They may be none, or none that is there."""
    paths = tuple(dict.fromkeys(request.update_mask.paths)) or _fields_set(request.context)
    return _CHANGEABLE if paths == ("*",) else paths


def parse_update(request: context_pb2.UpdateContextRequest) -> Callable[[Manifest], Manifest]:
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
    wanted = context_pb2.Context()
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


def _fields_set(context: context_pb2.Context) -> tuple[str, ...]:
    set_ = {
        "display_name": bool(context.display_name),
        "expire_time": context.HasField("expire_time"),
        "renew": context.HasField("renew"),
        "labels": bool(context.labels),
        "pinned": context.pinned,
        "readers": bool(context.readers),
    }
    return tuple(name for name in _CHANGEABLE if set_[name])


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


def seconds_of(duration: Duration, name: str) -> float:
    """A time to live. Raises InvalidArgumentError for one out of range."""
    seconds: float = duration.seconds + duration.nanos / 1e9
    check_ttl(seconds, name)
    return seconds


def _expiry(context: context_pb2.Context) -> datetime | None:
    if not context.HasField("expire_time"):
        return None
    try:
        return context.expire_time.ToDatetime(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"expire_time: {error}; expected a time of the years 1 to 9999", field="expire_time"
        ) from None
