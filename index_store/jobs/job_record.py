"""What is known about one prefill job: its order, which never changes, and what has become of it.

It lies in `job.json` of the job's folder: JSON with a checksum over itself, as a manifest has, replaced all at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Self, TypeVar

from index_store.errors import (
    ContextCorruptError,
    InvalidArgumentError,
    JobCorruptError,
    ManifestError,
    SparseKVError,
)
from index_store.store.description.context_id import is_context_id
from index_store.store.description.dtypes import AS_DTYPE, KV_DTYPES, ROW_CODINGS
from index_store.store.description.json_fields import (
    JsonFields,
    check_labels,
    check_name,
    check_names,
    check_positive,
    check_utc,
    field_error,
    is_integer,
    is_number,
    is_text,
    shown,
)
from index_store.store.description.manifest_json import render_document

JOB_VERSION = 1
MOST_METHODS = 16
MOST_PRIORITY = 100
MOST_NOTES = 20
MOST_REQUEST_CHARACTERS = 128
SHORTEST_TTL, LONGEST_TTL = timedelta(seconds=1), timedelta(days=36_500)

_MOST_CHARACTERS = 2000
_JOB_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
Member = TypeVar("Member", bound=StrEnum)

_REPAIR = "remove the job's folder, or delete its operation, and create the context again"


class JobState(StrEnum):
    """Whether the job is to be worked on, and how it ended otherwise."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobPhase(StrEnum):
    """What a worker does."""

    PREPARING = "preparing"
    READING = "reading"
    INDEXING = "indexing"
    VERIFYING = "verifying"


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What is to be made.

    context: id of the context that will come of it. model: the model's fingerprint. model_name: what people call it.
    name: of the context; "" leaves that of a context that is there. title: its name where it is new. methods: whose
    indexes to build. dtype: of the stored keys and values. ttl: seconds from its publication; None for ever.
    tokens: of the document. conversation: SHA-256 of what is kept
    of the messages that the tokens are; "" for a text. parent: id of the context that is continued, whose tokens the
    document follows; "" for one that stands alone. owner: who asked, "" where nobody was asked for a name. labels:
    to be set. whole: the context is a child that is there, and is to stand alone; no tokens come with such an order.
    rows: how exact rows are stored, one of `ROW_CODINGS`. moves: `name` is taken from the context that has it.
    """

    context: str
    model: str
    model_name: str
    name: str
    title: str
    methods: tuple[str, ...]
    dtype: str
    ttl: float | None
    tokens: int
    conversation: str = ""
    parent: str = ""
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    rows: str = AS_DTYPE
    moves: bool = False

    def __post_init__(self) -> None:
        if self.rows not in ROW_CODINGS:
            raise field_error("order.rows", self.rows, f"one of {', '.join(ROW_CODINGS)}")
        if self.parent and not is_context_id(self.parent):
            raise field_error("order.parent", self.parent, "64 lower-case hex digits, or nothing")
        if self.owner:
            check_name("order.owner", self.owner)
        check_labels("order.labels", self.labels)
        if self.conversation and not _DIGEST.fullmatch(self.conversation):
            raise field_error("order.conversation", self.conversation, "64 lower-case hex digits, or nothing")
        if not is_context_id(self.context):
            raise field_error("order.context", self.context, "64 lower-case hex digits")
        for name in ("model", "model_name", "title"):
            check_name(f"order.{name}", getattr(self, name))
        if self.name:
            check_name("order.name", self.name)
        check_names("order.methods", self.methods)
        if self.dtype not in KV_DTYPES:
            raise field_error("order.dtype", self.dtype, f"one of {', '.join(KV_DTYPES)}")
        if len(self.methods) > MOST_METHODS:
            raise field_error("order.methods", self.methods, f"at most {MOST_METHODS} names")
        least, most = SHORTEST_TTL.total_seconds(), LONGEST_TTL.total_seconds()
        if self.ttl is not None and not (is_number(self.ttl) and least <= self.ttl <= most):
            raise field_error("order.ttl", self.ttl, f"null or seconds from {least:g} to {most:.0f}")
        check_positive("order.tokens", self.tokens)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a worker has come, or had come before it ended. remaining: seconds that the phase takes yet, None where
    nobody knows. layers_total: 0 before it is known."""

    phase: JobPhase = JobPhase.PREPARING
    tokens_done: int = 0
    layers_done: int = 0
    layers_total: int = 0
    bytes_written: int = 0
    remaining: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_done", "layers_done", "layers_total", "bytes_written"):
            value = getattr(self, name)
            if not is_integer(value) or value < 0:
                raise field_error(f"progress.{name}", value, "an integer of 0 or more")
        if self.remaining is not None and not (is_number(self.remaining) and self.remaining >= 0):
            raise field_error("progress.remaining", self.remaining, "seconds, or null")


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The error that a job ended with, all texts printable."""

    reason: str
    message: str
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, error: SparseKVError) -> Self:
        """That of an error, as far as it can be written."""
        metadata = {_printable(name): _printable(value) for name, value in error.metadata.items()}
        if isinstance(error, ContextCorruptError):  # as all kinds of damage are told
            return cls(
                ContextCorruptError.reason, _printable(error.message), {**metadata, "cause": error.reason}
            )
        return cls(error.reason, _printable(error.message), metadata)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job. id: 32 lower-case hex digits. request: the id that a client gave its request, or "". digest: SHA-256 of
    that request, by which a repeat is known.

    priority: higher ones are taken first. furthest: tokens and layers that any worker has come to. attempts: workers
    that have taken it since. notes: sentences for whoever asks. failure: of a failed job. ended_at: None while it is
    open. All times are in UTC.
    """

    id: str
    order: JobOrder
    created_at: datetime
    request: str = ""
    digest: str = ""
    priority: int = 0
    state: JobState = JobState.OPEN
    progress: JobProgress = field(default_factory=JobProgress)
    attempts: int = 0
    notes: tuple[str, ...] = ()
    failure: JobFailure | None = None
    ended_at: datetime | None = None
    furthest: tuple[int, ...] = (0, 0)
    format_version: int = JOB_VERSION

    def __post_init__(self) -> None:
        if not is_job_id(self.id):
            raise field_error("id", self.id, "32 lower-case hex digits")
        if self.format_version != JOB_VERSION:
            raise field_error("format_version", self.format_version, str(JOB_VERSION))
        if not is_integer(self.priority) or abs(self.priority) > MOST_PRIORITY:
            raise field_error("priority", self.priority, f"-{MOST_PRIORITY} to {MOST_PRIORITY}")
        if not is_text(self.request) or len(self.request) > MOST_REQUEST_CHARACTERS:
            raise field_error(
                "request", self.request, f"at most {MOST_REQUEST_CHARACTERS} printable characters"
            )
        if self.digest and not _DIGEST.fullmatch(self.digest):
            raise field_error("digest", self.digest, "64 lower-case hex digits, or nothing")
        if not is_integer(self.attempts) or self.attempts < 0:
            raise field_error("attempts", self.attempts, "an integer of 0 or more")
        if len(self.furthest) != 2 or min(self.furthest) < 0:
            raise field_error("furthest", self.furthest, "two integers of 0 or more")
        if len(self.notes) > MOST_NOTES:
            raise field_error("notes", self.notes, f"at most {MOST_NOTES} texts")
        if (self.failure is None) == (self.state is JobState.FAILED):
            raise field_error("failure", self.failure, "the error of a failed job, and of no other")
        if (self.ended_at is None) != self.open:
            raise field_error("ended_at", self.ended_at, "a time once the job has ended, and no sooner")
        check_utc("created_at", self.created_at)
        if self.ended_at is not None:
            check_utc("ended_at", self.ended_at)

    @property
    def open(self) -> bool:
        """Whether it is still to be worked on."""
        return self.state is JobState.OPEN

    @property
    def turn(self) -> tuple[int, datetime, str]:
        """Jobs are taken in the order of this: by priority, then by age."""
        return (-self.priority, self.created_at, self.id)

    def noted(self, note: str) -> JobRecord:
        """With one sentence more, and the oldest left out where there are too many."""
        return replace(self, notes=(*self.notes, _printable(note))[-MOST_NOTES:])


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_MOST_CHARACTERS]


def is_job_id(text: str) -> bool:
    """Whether the text has the form of a job's id: 32 lower-case hex digits."""
    return _JOB_ID.fullmatch(text) is not None


def check_ttl(seconds: float, field_name: str) -> None:
    """Raises InvalidArgumentError for a time to live out of range."""
    if not SHORTEST_TTL.total_seconds() <= seconds <= LONGEST_TTL.total_seconds():
        raise InvalidArgumentError(
            f"{field_name} is {seconds:g} s, expected 1 s to {LONGEST_TTL.days} days; leave it out to keep the context "
            "for ever",
            field=field_name,
        )


def render_job(record: JobRecord) -> bytes:
    """The contents of the file: always the same bytes for the same record."""
    document = asdict(record)
    document["created_at"] = record.created_at.isoformat()
    document["ended_at"] = None if record.ended_at is None else record.ended_at.isoformat()
    for name in ("parent", "owner", "labels", "whole", "moves"):  # said where there is something to say
        if not document["order"][name]:
            del document["order"][name]
    if record.order.rows == AS_DTYPE:
        del document["order"]["rows"]
    if not any(record.furthest):
        del document["furthest"]
    return render_document(document)


def parse_job(data: bytes, where: str) -> JobRecord:
    """Reads the file; `where` names it in errors. Raises JobCorruptError."""
    try:
        document = json.loads(data)
        sealed = dict(document)
        sealed.pop("checksum", None)
        intact = render_document(sealed) == data
    except (ValueError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise JobCorruptError(
            f"{where}: the job is damaged, its contents do not fit their checksum; {_REPAIR}", path=where
        )
    version = sealed.get("format_version")
    if version != JOB_VERSION:
        raise JobCorruptError(
            f"{where}: the job has format version {shown(version)}, this program reads version {JOB_VERSION}; update "
            f"sparsekv, or {_REPAIR}",
            path=where,
        )
    try:
        return _parse_record(JsonFields(sealed, where))
    except ManifestError as error:
        message = error.message.removeprefix(f"{where}: ")
        raise JobCorruptError(f"{where}: {message}; {_REPAIR}", **{**error.metadata, "path": where}) from None


def _parse_record(fields: JsonFields) -> JobRecord:
    record = JobRecord(
        id=fields.text("id"),
        order=fields.item("order", _parse_order),
        created_at=fields.time("created_at"),
        request=fields.text("request"),
        digest=fields.text("digest"),
        priority=fields.integer("priority"),
        state=_member(JobState, "state", fields.text("state")),
        progress=fields.item("progress", _parse_progress),
        attempts=fields.integer("attempts"),
        notes=fields.texts("notes"),
        failure=fields.optional_item("failure", _parse_failure),
        ended_at=fields.optional_time("ended_at"),
        furthest=fields.integers("furthest") if fields.has("furthest") else (0, 0),
        format_version=fields.integer("format_version"),
    )
    fields.finish()
    return record


def _parse_order(fields: JsonFields) -> JobOrder:
    return JobOrder(
        context=fields.text("context"),
        model=fields.text("model"),
        model_name=fields.text("model_name"),
        name=fields.text("name"),
        title=fields.text("title"),
        methods=fields.texts("methods"),
        dtype=fields.text("dtype"),
        ttl=fields.optional_number("ttl"),
        tokens=fields.integer("tokens"),
        conversation=fields.text("conversation"),
        parent=fields.text("parent") if fields.has("parent") else "",
        owner=fields.text("owner") if fields.has("owner") else "",
        labels=fields.texts_by_name("labels") if fields.has("labels") else {},
        whole=fields.has("whole") and fields.flag("whole"),
        rows=fields.text("rows") if fields.has("rows") else AS_DTYPE,
        moves=fields.has("moves") and fields.flag("moves"),
    )


def _parse_progress(fields: JsonFields) -> JobProgress:
    return JobProgress(
        phase=_member(JobPhase, "progress.phase", fields.text("phase")),
        tokens_done=fields.integer("tokens_done"),
        layers_done=fields.integer("layers_done"),
        layers_total=fields.integer("layers_total"),
        bytes_written=fields.integer("bytes_written"),
        remaining=fields.optional_number("remaining"),
    )


def _parse_failure(fields: JsonFields) -> JobFailure:
    metadata = {name: str(value) for name, value in fields.scalars("metadata").items()}
    return JobFailure(fields.text("reason"), fields.text("message"), metadata)


def _member(kind: type[Member], name: str, text: str) -> Member:
    try:
        return kind(text)
    except ValueError:
        raise field_error(name, text, f"one of {', '.join(kind)}") from None
