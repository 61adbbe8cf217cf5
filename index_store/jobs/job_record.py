"""What is known about one prefill job: its order, which never changes, and what has become of it.

It lies in `job.json` of the job's folder: JSON with a checksum over itself, as a manifest has, replaced all at once.

Beside it lie `tokens` (uint32) and perhaps `conversation` (the messages that they are), both until it has ended,
`cancel` (a file that says that it is not wanted any more), and whatever its workers keep there to go on from.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from index_store.errors import (
    ContextCorruptError,
    InvalidArgumentError,
    JobCorruptError,
    JobNotFoundError,
    SparseKVError,
)
from index_store.store.description.callers import check_tenant
from index_store.store.description.context_id import is_context_id
from index_store.store.description.dtypes import AS_DTYPE, KV_DTYPES, ROW_CODINGS
from index_store.store.description.json_fields import (
    Count,
    Number,
    Sealed,
    check_labels,
    check_name,
    check_names,
    check_positive,
    check_utc,
    field_error,
    is_text,
)
from index_store.store.description.manifest import LONGEST_TTL, SHORTEST_TTL
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    new_file,
    permissions_in,
    remove_tree,
    replace_file,
    storing,
    sync_path,
    sync_tree,
    unused_name,
)
from index_store.store.files.reading import WrongFileError, read_file, unavailable

DENSE_KEEP = 0.02
"""Share of the keys that the exact selection may have by which layers are found that stay dense."""

DENSE_ERROR = 0.1
"""Relative output error above which such a layer stays dense."""


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How a document is read; the defaults are those of `prefill-worker run` and of contexts made over the network.

    dense_layers: those that are given; None to find them out. query_sample: queries per layer and KV head. calibration:
    fingerprint of the calibration prompts, "" without any. approximation: settings of approximate attention, None where
    it is exact. rows: how exact rows are stored, one of `ROW_CODINGS`.
    """

    dense_layers: tuple[int, ...] | None = None
    query_sample: int = 8192
    seed: int = 0
    calibration: str = ""
    approximation: Mapping[str, object] | None = None
    rows: str = AS_DTYPE

    def describe(self) -> dict[str, object]:
        """As it counts for a context's id."""
        automatic = {"keep": DENSE_KEEP, "threshold": DENSE_ERROR}
        return {
            "dense_layers": automatic if self.dense_layers is None else list(self.dense_layers),
            "query_sample": self.query_sample,
            "seed": self.seed,
            "calibration": self.calibration,
            **({} if self.approximation is None else {"attention": self.approximation}),
            **({} if self.rows == AS_DTYPE else {"rows": self.rows}),
        }


MOST_METHODS = 16
MOST_PRIORITY = 100
MOST_NOTES = 20
MOST_REQUEST_CHARACTERS = 128

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
    tenant: whose the context is to be, and the job is. renew: see `Manifest`.
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
    tenant: str = ""
    renew: Number | None = None

    def __post_init__(self) -> None:
        check_tenant("order.tenant", self.tenant)
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
        for name in ("ttl", "renew"):
            seconds = getattr(self, name)
            if seconds is not None and not least <= seconds <= most:
                raise field_error(f"order.{name}", seconds, f"null or seconds from {least:g} to {most:.0f}")
        check_positive("order.tokens", self.tokens)

    @property
    def unsaid(self) -> Collection[str]:
        """Fields that the file says nothing of."""
        rows = ("rows",) if self.rows == AS_DTYPE else ()
        names = ("parent", "owner", "labels", "whole", "moves", "tenant", "renew")
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
    open. All times are in UTC. traceparent: of the span in which it was ordered, "" without one.
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
    traceparent: str = ""

    def __post_init__(self) -> None:
        if not is_job_id(self.id):
            raise field_error("id", self.id, "32 lower-case hex digits")
        for name in ("request", "traceparent"):
            if not is_text(text := getattr(self, name)) or len(text) > MOST_REQUEST_CHARACTERS:
                raise field_error(name, text, f"at most {MOST_REQUEST_CHARACTERS} printable characters")
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
        said = {"furthest": any(self.furthest), "traceparent": bool(self.traceparent)}
        return tuple(name for name, there in said.items() if not there)

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


_RECORD, _TOKENS, _CONVERSATION, _CANCEL = "job.json", "tokens", "conversation", "cancel"
_LARGEST = 1 << 20
_LARGEST_CONVERSATION = 1 << 28


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A record that was read. stamp: what tells its file from a later one."""

    record: JobRecord
    stamp: tuple[int, int, int]


class JobFolder:
    """One job's files, which need not be there. What reads may raise StoreUnavailableError."""

    def __init__(self, id_: str, path: Path) -> None:
        self.path = path
        self._id = id_

    def read(self, known: ReadRecord | None) -> ReadRecord:
        """The record as it is now: `known` itself where that is it. Raises JobNotFoundError, JobCorruptError."""
        path = self.path / _RECORD
        try:
            if known is not None and known.stamp == _stamp(os.stat(path)):
                return known
            data, status = read_file(path, _LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            if self.path.is_dir():
                raise _damaged(path, "not there") from None
            raise self._missing() from None
        except WrongFileError as error:
            raise _damaged(path, error.strerror or "no file") from error
        except OSError as error:
            raise unavailable(path, error) from error
        record = JOBS.parse(data, str(path))
        if record.id != self._id:
            raise _damaged(path, f"of job {record.id}")
        return ReadRecord(record, _stamp(status))

    def write(self, record: JobRecord) -> None:
        """Replaces the record, durably. Raises StoreFullError or StoreError."""
        path = self.path / _RECORD
        with storing("writing a job", path):
            replace_file(path, JOBS.render(record), permissions_in(self.path.parent))

    def create(
        self, record: JobRecord, tokens: NDArray[np.uint32] | None, conversation: bytes | None
    ) -> None:
        """Makes the folder appear with all of its files at once; without the document where the job has ended."""
        permissions = permissions_in(self.path.parent)
        folder = unused_name(self.path.parent, f"{TEMPORARY_PREFIX}{record.id}")
        folder.mkdir(permissions)
        try:
            if record.open and tokens is not None:
                with new_file(folder / _TOKENS, permissions) as file:
                    file.write(np.ascontiguousarray(tokens, dtype="<u4").data)
                if conversation is not None:
                    with new_file(folder / _CONVERSATION, permissions) as file:
                        file.write(conversation)
            with new_file(folder / _RECORD, permissions) as file:
                file.write(JOBS.render(record))
            sync_tree(folder)
            os.rename(folder, self.path)
            sync_path(self.path.parent)
        except BaseException:
            remove_tree(folder)
            raise

    def clear(self) -> None:
        """Removes all of an ended job but its record."""
        with storing("removing what a job needs no more", self.path):
            for path in self.path.iterdir() if self.path.is_dir() else ():
                if path.name != _RECORD:
                    remove_tree(path)

    @property
    def unwanted(self) -> bool:
        """Whether the job is to be cancelled."""
        return (self.path / _CANCEL).exists()

    def mark_unwanted(self) -> None:
        """Notes, durably, that the job is to be cancelled. Raises JobNotFoundError."""
        with storing("cancelling a job", self.path):
            try:
                new_file(self.path / _CANCEL, permissions_in(self.path.parent)).close()
                sync_path(self.path)
            except FileNotFoundError as error:
                raise self._missing() from error

    def _missing(self) -> JobNotFoundError:
        return unknown_job(self._id)

    def _read(self, name: str, most: int) -> bytes:
        path = self.path / name
        try:
            return read_file(path, most)[0]
        except (FileNotFoundError, WrongFileError) as error:
            raise _damaged(path, error.strerror or "not there") from error
        except OSError as error:
            raise unavailable(path, error) from error


class Claim(JobFolder):
    """A job that this process works on: its lock is held. To be used by one thread. record: as it is now."""

    def __init__(self, id_: str, path: Path, record: JobRecord) -> None:
        super().__init__(id_, path)
        self.record = record

    def write(self, record: JobRecord) -> None:
        super().write(record)
        self.record = record

    def end(self, record: JobRecord) -> None:
        """Has the job have ended, and removes what only an open one needs."""
        self.write(record)
        self.clear()

    def tokens(self) -> NDArray[np.uint32]:
        """The document, uint32 [tokens]. Raises JobCorruptError."""
        expected = self.record.order.tokens * 4
        data = self._read(_TOKENS, expected)
        if len(data) != expected:
            raise _damaged(self.path / _TOKENS, f"{len(data)} bytes, expected {expected}")
        return np.frombuffer(data, dtype="<u4")

    def conversation(self) -> bytes | None:
        """What is kept of the messages that the tokens are, None for a text. Raises JobCorruptError."""
        expected = self.record.order.conversation
        if not expected:
            return None
        data = self._read(_CONVERSATION, _LARGEST_CONVERSATION)
        if hashlib.sha256(data).hexdigest() != expected:
            raise _damaged(self.path / _CONVERSATION, "not what was written")
        return data


def unknown_job(id_: str) -> JobNotFoundError:
    """The error of a job that is not there, or not for who asks."""
    return JobNotFoundError(f"there is no operation {id_}", operation=id_)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ino, status.st_size


def _damaged(path: Path, found: str) -> JobCorruptError:
    return JobCorruptError(
        f"{path}: the file is {found}; remove the job's folder, or delete its operation, and create the context again",
        path=path,
    )
