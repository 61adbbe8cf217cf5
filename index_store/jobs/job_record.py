"""What is known about one prefill job: its order, which never changes, and what has become of it.

It lies in `job.json` of the job's folder: JSON with a checksum over itself, as a manifest has, replaced all at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Self

from msgspec import Meta

from index_store.errors import (
    ContextCorruptError,
    InvalidArgumentError,
    JobCorruptError,
    SparseKVError,
)
from index_store.store.description.context_id import is_context_id
from index_store.store.description.dtypes import AS_DTYPE, KV_DTYPES, ROW_CODINGS
from index_store.store.description.json_fields import (
    Count,
    Number,
    check_labels,
    check_name,
    check_names,
    check_positive,
    check_utc,
    field_error,
    is_text,
)
from index_store.store.description.sealed import Sealed

MOST_METHODS = 16
MOST_PRIORITY = 100
MOST_NOTES = 20
MOST_REQUEST_CHARACTERS = 128
SHORTEST_TTL, LONGEST_TTL = timedelta(seconds=1), timedelta(days=36_500)

_MOST_CHARACTERS = 2000
_JOB_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
    ttl: Number | None
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
        if self.ttl is not None and not least <= self.ttl <= most:
            raise field_error("order.ttl", self.ttl, f"null or seconds from {least:g} to {most:.0f}")
        check_positive("order.tokens", self.tokens)

    @property
    def unsaid(self) -> Collection[str]:
        """Fields that the file says nothing of."""
        rows = ("rows",) if self.rows == AS_DTYPE else ()
        names = ("parent", "owner", "labels", "whole", "moves")
        return (*rows, *(name for name in names if not getattr(self, name)))


Seconds = Count | Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a worker has come, or had come before it ended. remaining: seconds that the phase takes yet, None where
    nobody knows. layers_total: 0 before it is known."""

    phase: JobPhase = JobPhase.PREPARING
    tokens_done: Count = 0
    layers_done: Count = 0
    layers_total: Count = 0
    bytes_written: Count = 0
    remaining: Seconds | None = None


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
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    state: JobState = JobState.OPEN
    progress: JobProgress = field(default_factory=JobProgress)
    attempts: Count = 0
    notes: tuple[str, ...] = ()
    failure: JobFailure | None = None
    ended_at: datetime | None = None
    furthest: tuple[Count, Count] = (0, 0)

    def __post_init__(self) -> None:
        if not is_job_id(self.id):
            raise field_error("id", self.id, "32 lower-case hex digits")
        if not is_text(self.request) or len(self.request) > MOST_REQUEST_CHARACTERS:
            raise field_error(
                "request", self.request, f"at most {MOST_REQUEST_CHARACTERS} printable characters"
            )
        if self.digest and not _DIGEST.fullmatch(self.digest):
            raise field_error("digest", self.digest, "64 lower-case hex digits, or nothing")
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
    def unsaid(self) -> Collection[str]:
        """Fields that the file says nothing of."""
        return () if any(self.furthest) else ("furthest",)

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


JOBS = Sealed(
    JobRecord,
    "the job",
    "remove the job's folder, or delete its operation, and create the context again",
    wrong=JobCorruptError,
    damaged=JobCorruptError,
    foreign=JobCorruptError,
)
"""Files `job.json`."""
