"""Contexts that are being made: the verbs as values, and operations as plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypedDict
from uuid import uuid4

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from decode_engine.rpc.client.replies import ContextInfo, read_context, read_nothing
from decode_engine.rpc.client.verbs import Call, call
from decode_engine.rpc.prompts.wire_messages import write_conversation
from decode_engine.rpc.transport.status import error_of
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.models.conversation.messages import Conversation
from index_store.models.conversation.messages import Message as ChatMessage
from sparsekv.v1 import context_pb2

ONE_MESSAGE_BYTES = MAX_REQUEST_BYTES // 2
"""Text of more bytes is uploaded ahead of the request."""
_PART_BYTES = 1 << 20

LOOK_S = 30.0
"""Seconds that one call waits for an operation, at most."""
PROGRESS_S = 0.5
"""The same where progress is told."""


@dataclass(frozen=True, slots=True)
class OperationInfo:
    """A context that is being made, or was.

    phase: "queued", "preparing", "reading", "indexing", "verifying" or "ended"; "" where the operation cannot be read.
    remaining_s: seconds that the phase takes yet, None where nobody knows. context: the finished context, None before
    and after an error. error: what it ended with, None otherwise. context_name: `contexts/<id>`, known from the
    beginning. owner: whose token it was created by. waiting_reason: why it would stay queued for ever, "" where
    it would not.
    """

    name: str
    done: bool
    phase: str
    tokens_done: int
    tokens_total: int
    layers_done: int
    layers_total: int
    bytes_written: int
    remaining_s: float | None
    create_time: datetime | None
    jobs_ahead: int
    context_name: str
    notes: tuple[str, ...]
    context: ContextInfo | None
    error: SparseKVError | None
    owner: str = ""
    waiting_reason: str = ""

    def result(self) -> ContextInfo:
        """The context. Raises the operation's error, and InvalidArgumentError before the operation is done."""
        if self.error is not None:
            raise self.error
        if self.context is None:
            raise InvalidArgumentError(f"operation {self.name} is not done; wait for it")
        return self.context


@dataclass(frozen=True, slots=True)
class OperationPage:
    """Some operations, newest first, and the token of the next page, "" behind the last one."""

    operations: tuple[OperationInfo, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """A document that waits to be used."""

    name: str
    size_bytes: int
    sha256: str
    expire_time: datetime


class CreateOptions(TypedDict, total=False):
    """What `create_context` takes beside the document; sparsekv/v1/context.proto has the ranges.

    ttl_s: seconds. parent: name of a context that the new one continues. rows: "int8" for exact rows in 8 bits.
    request_id: by default a random one, so that the client may repeat the call. move_name: `display_name` is taken from
    the context that has it.
    """

    display_name: str | None
    move_name: bool | None
    ttl_s: float | None
    methods: str | Sequence[str] | None
    request_id: str | None
    priority: int | None
    parent: str | None
    labels: Mapping[str, str] | None
    rows: str | None


def create_context(
    options: CreateOptions,
    *,
    text: str | None = None,
    token_ids: Sequence[int] | None = None,
    messages: Sequence[ChatMessage] | Conversation | None = None,
    upload: str | None = None,
) -> Call[OperationInfo]:
    """Raises InvalidArgumentError unless there is one document, and for what no message can carry."""
    if sum(source is not None for source in (text, token_ids, messages, upload)) != 1:
        raise InvalidArgumentError("give exactly one of text, token_ids, messages, upload", field="source")
    ttl_s = options.get("ttl_s")
    others = {
        **options,
        "ttl": None if ttl_s is None else _duration(ttl_s, "ttl_s"),
        "request_id": options.get("request_id") or str(uuid4()),
    }
    others.pop("ttl_s", None)
    said = None if messages is None else write_conversation(messages)
    document = {"text": text, "token_ids": token_ids, "messages": said, "upload": upload}
    return call("CreateContext", read_operation, **document, **others)


def large_document(text: str | None) -> bytes | None:
    """A text that is to be uploaded ahead of the request; None for one that it carries, or none.

    Raises InvalidArgumentError for a text that is not to be written as UTF-8.
    """
    try:
        data = b"" if text is None else text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"text has half a character at {error.start}, which no request can carry", field="text"
        ) from None
    return data if len(data) > ONE_MESSAGE_BYTES else None


def upload_parts(document: bytes) -> Iterator[context_pb2.UploadDocumentRequest]:
    """What is sent of a document, with its checksum."""
    sha256 = hashlib.sha256(document).hexdigest()
    for start in range(0, max(len(document), 1), _PART_BYTES):
        part = document[start : start + _PART_BYTES]
        yield context_pb2.UploadDocumentRequest(data=part, sha256=sha256 if start == 0 else "")


def read_upload(response: context_pb2.Upload) -> UploadInfo:
    """A reply to an upload as a plain value."""
    expires = response.expire_time.ToDatetime(UTC)
    return UploadInfo(response.name, response.size_bytes, response.sha256, expires)


def get_operation(name: str) -> Call[OperationInfo]:
    return call("GetOperation", read_operation, name=name)


def wait_operation(name: str, wait_s: float) -> Call[OperationInfo]:
    return call("WaitOperation", read_operation, name=name, timeout=_duration(wait_s, "wait_s"))


def list_operations(page_size: int, page_token: str) -> Call[OperationPage]:
    return call("ListOperations", _read_page, page_size=page_size, page_token=page_token)


def cancel_operation(name: str) -> Call[None]:
    return call("CancelOperation", read_nothing, name=name)


def read_operation(operation: operations_pb2.Operation) -> OperationInfo:
    """An operation as a plain value."""
    known = context_pb2.CreateContextMetadata()
    there = operation.metadata.Unpack(known)
    made = context_pb2.Context()
    result = operation.WhichOneof("result")
    phase = context_pb2.CreateContextMetadata.Phase.Name(known.phase).lower()
    return OperationInfo(
        name=operation.name,
        done=operation.done,
        phase=phase if there else "",
        tokens_done=known.tokens_done,
        tokens_total=known.tokens_total,
        layers_done=known.layers_done,
        layers_total=known.layers_total,
        bytes_written=known.bytes_written,
        remaining_s=known.remaining.ToTimedelta().total_seconds() if known.HasField("remaining") else None,
        create_time=known.create_time.ToDatetime(UTC) if there else None,
        jobs_ahead=known.jobs_ahead,
        context_name=known.context,
        notes=tuple(known.notes),
        context=read_context(made) if result == "response" and operation.response.Unpack(made) else None,
        error=error_of(operation.error) if result == "error" else None,
        owner=known.owner,
        waiting_reason=known.waiting_reason,
    )


def _read_page(response: operations_pb2.ListOperationsResponse) -> OperationPage:
    return OperationPage(tuple(map(read_operation, response.operations)), response.next_page_token)


def _duration(seconds: float, field: str) -> Duration:
    duration = Duration()
    try:
        duration.FromTimedelta(timedelta(seconds=seconds))
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"{field} is {seconds}, which no request can carry: {error}", field=field
        ) from error
    return duration
