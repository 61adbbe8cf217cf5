"""What fields of stored records may hold, and files of JSON with a checksum over themselves (`Sealed`).

Every error names the field, the value found and what was expected.

Numbers and texts have bounds, so that whatever a file holds can be computed with, shown and sent: integers fit into
64 bits with their sign, numbers are finite, texts are printable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Generic, TypeVar

import google_crc32c
import msgspec
from msgspec import Meta

from index_store.errors import ManifestError, SparseKVError

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


Record = TypeVar("Record")

_INDENT = re.compile(rb"\n *(?=[^\n ])")
_DIGITS = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True)
class Sealed(Generic[Record]):
    """One kind of sealed file; its `Record` is a frozen dataclass.

    A record with a property `unsaid` names fields there that are left out of the file, since they say nothing. Its
    checks raise the error of `field_error`.

    what: its name in errors. repair: what to do about a file that cannot be used. wrong, damaged, foreign: errors of a
    file with a field that cannot be, of one that was altered, and of another version. versions: those that are read,
    of which the last is written, unless `written` says which. check: raises what a record's own checks do not. upgrade:
    changes the JSON of an older version, in place, to what the record has.
    """

    kind: type[Record]
    what: str
    repair: str
    wrong: type[SparseKVError]
    damaged: type[SparseKVError]
    foreign: type[SparseKVError]
    versions: tuple[int, ...] = (1,)
    written: Callable[[Record], int] | None = None
    check: Callable[[Record], None] = lambda record: None
    upgrade: Callable[[dict[str, Any]], None] = lambda document: None

    def __post_init__(self) -> None:
        # msgspec looks at a class when it first reads one, and crashes where two threads do so at once: it looks now.
        msgspec.json.Decoder(self.kind)

    def render(self, record: Record) -> bytes:
        """The file's contents: always the same bytes for the same record. Raises ManifestError for one that could not
        be read again."""
        version = self.versions[-1] if self.written is None else self.written(record)
        document: dict[str, Any] = plain(record) | {"format_version": version}
        self._record(dict(document))
        try:
            return render_document(document)
        except ValueError as error:
            raise ManifestError(f"{self.what} holds a value that is not JSON ({error})") from None

    def parse(self, data: bytes, where: str) -> Record:
        """Reads a file's contents; `where` names it in errors. Raises `wrong`, `damaged` or `foreign`."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.wrong(
                f"{where}: {self.what} is damaged: it is not JSON ({error}); {self.repair}", path=where
            ) from None
        try:
            if not isinstance(document, dict):
                raise field_error(self.what, document, "a JSON object")
            self._check_seal(document, data, where)
            self.upgrade(document)
            return self._record(document)
        except ManifestError as error:
            raise self.wrong(
                f"{where}: {error.message}; {self.repair}", **{**error.metadata, "path": where}
            ) from None

    def _record(self, document: dict[str, Any]) -> Record:
        if "format_version" not in {field.name for field in fields(self.kind)}:  # type: ignore[arg-type]
            del document["format_version"]
        record = from_plain(document, self.kind)
        self.check(record)
        return record

    def _check_seal(self, document: dict[str, Any], data: bytes, where: str) -> None:
        """Takes the checksum out of a file's JSON, and compares it and the version."""
        expected, version = document.pop("checksum", None), document.get("format_version")
        foreign = type(version) is int and version not in self.versions
        if not (foreign and expected is None):
            self._compare(document, expected, data, where)
        if version is None:
            raise ManifestError("field 'format_version' is missing", field="format_version")
        if type(version) is not int:
            raise field_error("format_version", version, f"{self.versions[-1]}")
        if foreign:
            first, last = self.versions[0], self.versions[-1]
            reads = f"version {last}" if first == last else f"versions {first} to {last}"
            made = "it was made by an older sparsekv:" if version < first else "update sparsekv, or"
            raise self.foreign(
                f"{where}: {self.what} has format version {version}, this program reads {reads}; {made} {self.repair}",
                found=version,
                expected=last,
                path=where,
            )

    def _compare(self, document: dict[str, Any], expected: object, data: bytes, where: str) -> None:
        try:
            found = _checksum(document)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{self.what} holds a value that is not JSON ({error})") from None
        # Comparing the bytes as well finds damage that JSON does not see: white space, duplicate keys, escapes. Without
        # indents, since those take longer to write than all the rest takes to read.
        sealed = json.dumps({"checksum": expected, **document}, sort_keys=True, separators=(",", ": "))
        if found == expected and _INDENT.sub(b"", data) == sealed.encode("ascii") + b"\n":
            return
        if expected is None:
            said = f"has no field 'checksum', expected crc32c {found}"
        elif found != expected:
            said = f"is damaged: its contents have crc32c {found}, its checksum is {shown(expected)}"
        else:
            said = "is damaged: its bytes are not those that were written"
        raise self.damaged(
            f"{where}: {self.what} {said}; {self.repair}", found=found, expected=shown(expected), path=where
        )


def render_document(document: Mapping[str, object]) -> bytes:
    """A JSON object, without its checksum, as a sealed file's bytes."""
    sealed = {"checksum": _checksum(document), **document}
    return (json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def plain(value: object) -> Any:
    """A record as JSON has it, in the order of its fields."""
    if is_dataclass(value):
        unsaid = _unsaid(value)
        return {
            each.name: plain(getattr(value, each.name)) for each in fields(value) if each.name not in unsaid
        }
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else value


def from_plain(document: object, kind: type[Record]) -> Record:
    """The record that JSON tells of. Raises ManifestError, which names the first field that is wrong and its value."""
    try:
        record = msgspec.convert(document, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter of half a letter
        raise _told(str(error), document) from None
    _check_whole(document, record, "")
    return record


def _checksum(document: Mapping[str, object]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{google_crc32c.value(canonical.encode('ascii')):08x}"


def _unsaid(record: object) -> Collection[str]:
    names: Collection[str] = getattr(record, "unsaid", ())
    return names


def _told(error: str, document: object) -> ManifestError:
    """msgspec's error as that of a field."""
    said, _, path = error.removesuffix("`").partition(" - at `$")
    place = path.removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`?", said):
        return _missing(_joined(place, missing[1].removesuffix("`")))
    found: Any = document
    for name, number in re.findall(r"(\w+)|\[(\d+)\]", path):
        found = found[int(number) if number else name]
    expected = re.fullmatch(r"Expected (.*?)(, got .*)?", said)
    return field_error(
        place or "manifest", found, expected[1] if expected else f"another value ({said.lower()})"
    )


def _missing(name: str) -> ManifestError:
    return ManifestError(f"field {name!r} is missing", field=name)


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _check_whole(found: Any, record: Any, place: str) -> None:
    """Refuses what msgspec passes over: fields that dataclasses do not have or may leave out, unprintable texts."""
    if is_dataclass(record):
        _check_fields(found, record, place)
    elif isinstance(found, dict):
        for name, value in found.items():
            _check_whole(name, name, f"{place} name")
            _check_whole(value, record[name], _joined(place, name))
    elif (
        isinstance(found, list) and found and isinstance(found[0], str | dict)
    ):  # not numbers, which may be many
        for at, (value, each) in enumerate(zip(found, record, strict=True)):
            _check_whole(value, each, f"{place}[{at}]")
    elif isinstance(found, str) and not is_text(found) and not _DIGITS.fullmatch(found):
        raise field_error(place, found, "a printable text")


def _check_fields(found: dict[str, Any], record: Any, place: str) -> None:
    known, unsaid = [each.name for each in fields(record)], _unsaid(record)
    for name, value in found.items():
        if name not in known:
            raise field_error(_joined(place, name), value, "no such field")
    for name in known:
        if name in found:
            _check_whole(found[name], getattr(record, name), _joined(place, name))
        elif name not in unsaid:
            raise _missing(_joined(place, name))
