"""The verbs, as values: what is sent, and how the reply is read. Both clients make them in the same way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Generic, Literal, TypedDict, TypeVar
from uuid import uuid4

from google.longrunning import operations_pb2
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from decode_engine.rpc.client.replies import (
    OperationInfo,
    OperationPage,
    read_nothing,
    read_operation,
    read_operations,
    reads,
)
from decode_engine.rpc.prompts.wire_messages import write_conversation, write_messages
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation, Tool
from index_store.models.conversation.messages import Message as ChatMessage
from sparsekv.v1 import context_pb2, conversation_pb2, generation_pb2
from sparsekv.v1.values import ContextInfo, ContextPage, CreateFields, GenerateFields, TokenizedText

ReplyT = TypeVar("ReplyT")
MessageT = TypeVar("MessageT", bound=Message)

METHODS = {
    method.name: method
    for file in (context_pb2, generation_pb2, operations_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Those of all services, by their names."""


@dataclass(frozen=True, slots=True)
class Call(Generic[ReplyT]):
    """One request with one response. method: of METHODS. read: what is made of the response.

    Raises InvalidArgumentError for a request that is larger than servers take: gRPC would refuse it without our reason.
    """

    method: str
    request: Message
    read: Callable[[Any], ReplyT]

    def __post_init__(self) -> None:
        _check_size(self.request, "send less, or upload a document in parts", "request")


def call(method: str, read: Callable[[Any], ReplyT], **fields: Any) -> Call[ReplyT]:
    """The call of a method, by the fields of its request. Raises InvalidArgumentError as `message` does."""
    return Call(method, message(GetMessageClass(METHODS[method].input_type), **fields), read)


@dataclass(frozen=True, slots=True)
class Keep:
    """What becomes of a session: a context that continues the one it was on.

    name: what people call it; that of the context, with digits of its own id, by default. ttl: how long it lives, a
    second or more; None for good. prompt_only: generate nothing, and keep the prompt. move_name: take the name from the
    context that has it.
    """

    name: str = ""
    ttl: timedelta | None = None
    prompt_only: bool = False
    move_name: bool = False

    def message(self) -> generation_pb2.Keep:
        """As a request carries it."""
        return message(
            generation_pb2.Keep,
            display_name=self.name,
            prompt_only=self.prompt_only,
            move_name=self.move_name,
            ttl=self.ttl,
        )


class GenerateOptions(GenerateFields, total=False):
    """What `generate` takes beside the context; what is missing or None is left to the server.

    Exactly one of question, text, token_ids and messages, at most one of keep_ratio, target_mass and token_budget,
    which say how much is kept, and at most one of json_schema (text, or what json.dumps makes it of), regex and
    choices, which say what the answer has to be. keep: makes a context of the session when it ends, the summary's
    `kept_context`. Without a context the prompt is everything from the beginning. tools go with
    messages; tool_choice says whether the model may or has to call some ("auto" where there are tools), tool_name which
    one it has to, single_call that it makes one call at most. One text may stand for a list of it (`stop`).
    """

    token_ids: Sequence[int] | None
    messages: Sequence[ChatMessage] | None
    tools: Sequence[Tool] | None
    tool_choice: Literal["none", "auto", "required"] | None
    tool_name: str | None
    single_call: bool | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    choices: str | Sequence[str] | None
    keep: Keep | None


class CreateOptions(CreateFields, total=False):
    """What `create_context` takes beside the document; sparsekv/v1/context.proto has the ranges.

    ttl_s: seconds. parent: name of a context that the new one continues. rows: "int8" for exact rows in 8 bits.
    request_id: by default a random one, so that the client may repeat the call.
    """


_CONSTRAINTS = ("json_schema", "regex", "choices")
_CALLS = ("tools", "tool_choice", "tool_name", "single_call")
_PROMPTS = ("question", "text", "token_ids", "messages")
_BUDGETS = ("keep_ratio", "target_mass", "token_budget")


def find_context(reference: str) -> Call[ContextInfo]:
    return call("GetContext", reads(ContextInfo), reference=reference)


def list_contexts(page_size: int, page_token: str, filter: str, order_by: str) -> Call[ContextPage]:
    asked = {"page_size": page_size, "page_token": page_token, "filter": filter, "order_by": order_by}
    return call("ListContexts", reads(ContextPage), **asked)


class Never(Enum):
    """The time that does not come."""

    NEVER = "never"


NEVER = Never.NEVER


class ContextChanges(TypedDict, total=False):
    """What `update_context` changes; what is missing or None stays as it is.

    expire_time: NEVER takes it away. labels: by key, None removes the label. move_name: take `display_name` from the
    context that has it.
    """

    display_name: str | None
    move_name: bool | None
    expire_time: datetime | Never | None
    labels: Mapping[str, str | None] | None
    pinned: bool | None


def update_context(name: str, changes: ContextChanges) -> Call[ContextInfo]:
    labels, expires = changes.get("labels") or {}, changes.get("expire_time")
    changed = message(
        context_pb2.Context,
        name=name,
        labels={key: value for key, value in labels.items() if value is not None},
        display_name=changes.get("display_name"),
        pinned=changes.get("pinned"),
        expire_time=None if expires is NEVER else expires,
    )
    others = [field for field in ("display_name", "expire_time", "pinned") if changes.get(field) is not None]
    paths = [*(f"labels.{key}" for key in labels), *others]
    mask = message(FieldMask, paths=paths)
    moves = changes.get("move_name")
    return call("UpdateContext", reads(ContextInfo), context=changed, update_mask=mask, move_name=moves)


def delete_context(name: str, allow_missing: bool, force: bool) -> Call[None]:
    return call("DeleteContext", read_nothing, name=name, allow_missing=allow_missing, force=force)


ONE_MESSAGE_BYTES = MAX_REQUEST_BYTES // 2
"""Text of more bytes is uploaded ahead of the request."""
_PART_BYTES = 1 << 20


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
    others: dict[str, Any] = {**options, "request_id": options.get("request_id") or str(uuid4())}
    ttl = _duration("ttl_s", others.pop("ttl_s", None))
    said = None if messages is None else write_conversation(messages)
    document = {"text": text, "token_ids": token_ids, "messages": said, "upload": upload}
    return call("CreateContext", read_operation, **document, **others, ttl=ttl)


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


def get_operation(name: str) -> Call[OperationInfo]:
    return call("GetOperation", read_operation, name=name)


def wait_operation(name: str, wait_s: float) -> Call[OperationInfo]:
    return call("WaitOperation", read_operation, name=name, timeout=_duration("wait_s", wait_s))


def list_operations(page_size: int, page_token: str) -> Call[OperationPage]:
    return call("ListOperations", read_operations, page_size=page_size, page_token=page_token)


def cancel_operation(name: str) -> Call[None]:
    return call("CancelOperation", read_nothing, name=name)


def _duration(field: str, seconds: float | None) -> timedelta | None:
    try:
        return None if seconds is None else timedelta(seconds=seconds)
    except (ValueError, OverflowError) as error:
        raise _unfit(field, seconds, error) from error


def generate_request(context: str, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Raises InvalidArgumentError for values that no message can carry, and parts that exclude each other."""
    given = {name for name, value in options.items() if value is not None}
    if len(given.intersection(_PROMPTS)) != 1:
        raise InvalidArgumentError(f"give exactly one of {', '.join(_PROMPTS)}", field="prompt")
    if len(given.intersection(_BUDGETS)) > 1:
        raise InvalidArgumentError(f"give at most one of {', '.join(_BUDGETS)}", field="budget")
    if len(given.intersection(_CONSTRAINTS)) > 1:
        raise InvalidArgumentError(f"give at most one of {', '.join(_CONSTRAINTS)}", field="constraint")
    fields = {name: value for name, value in options.items() if name not in (*_CONSTRAINTS, *_CALLS)}
    if (messages := options.get("messages")) is not None:
        fields["messages"] = write_messages(messages, options.get("tools") or ())
    elif options.get("tools"):
        raise InvalidArgumentError("tools are given without messages, expected both", field="tools")
    fields["tool_choice"] = _tool_choice(options)
    if (keep := options.get("keep")) is not None:
        fields["keep"] = keep.message()
    request = message(
        generation_pb2.GenerateRequest, context=context, **fields, constraint=_constraint(options)
    )
    _check_size(request, "shorten the prompt", "prompt")
    return request


def _constraint(options: GenerateOptions) -> generation_pb2.Constraint | None:
    schema, regex, choices = (options.get(name) for name in _CONSTRAINTS)
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return message(generation_pb2.Constraint, json_schema=text)
    if regex is not None:
        return message(generation_pb2.Constraint, regex=regex)
    if choices is not None:
        return generation_pb2.Constraint(choices=message(generation_pb2.Choices, texts=choices))
    return None


def _tool_choice(options: GenerateOptions) -> conversation_pb2.ToolChoice | None:
    mode, name = options.get("tool_choice"), options.get("tool_name")
    if mode is None and name is not None:
        mode = "required"
    made = message(
        conversation_pb2.ToolChoice,
        mode=None if mode is None else mode.upper(),
        name=name,
        single=options.get("single_call"),
    )
    return made if made.ByteSize() else None


def batch_request(context: str, requests: Sequence[GenerateOptions]) -> generation_pb2.BatchGenerateRequest:
    """Raises InvalidArgumentError as `generate_request` does, and says of which request."""
    batch = message(generation_pb2.BatchGenerateRequest, context=context)
    for number, options in enumerate(requests):
        try:
            batch.requests.append(generate_request("", options))
        except InvalidArgumentError as error:
            error.message = f"request {number}: {error.message}"
            raise
    _check_size(batch, "send it in parts", "requests")
    return batch


def _check_size(request: Message, advice: str, field: str) -> None:
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"the request has {request.ByteSize()} bytes, expected at most {MAX_REQUEST_BYTES}; {advice}",
            field=field,
        )


Content = str | Sequence[ChatMessage] | Conversation
"""A text, or messages from the beginning of a conversation."""


def tokenize(content: Content) -> Call[TokenizedText]:
    return call("Tokenize", reads(TokenizedText), **_content(content))


def detokenize(ids: Sequence[int]) -> Call[str]:
    return call("Detokenize", lambda response: str(response.text), ids=ids)


def count_tokens(content: Content) -> Call[int]:
    return call("CountTokens", lambda response: int(response.tokens), **_content(content))


def _content(content: Content) -> dict[str, Any]:
    return {"text": content} if isinstance(content, str) else {"messages": write_conversation(content)}


def message(kind: type[MessageT], **fields: Any) -> MessageT:
    """A message of the fields that are not None. Raises InvalidArgumentError that names a field which does not fit."""
    made = kind()
    for name, value in _in_lists(kind, fields):
        if value is None:
            continue
        try:
            given = generation_pb2.TokenIds(ids=value) if name == "token_ids" else value
            made.MergeFrom(kind(**{name: given}))
        except (ValueError, TypeError, OverflowError) as error:
            raise _unfit(name, value, error) from error
    return made


def _unfit(field: str, value: object, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field} is {_shown(value)}, which no request can carry: {error}", field=field
    )


def _in_lists(kind: type[Message], fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields; one text where there may be several is a list of it, and would be taken for one of its letters."""
    for name, value in fields.items():
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        texts = field is not None and field.is_repeated and field.type == field.TYPE_STRING
        yield name, [value] if texts and isinstance(value, str) else value


def _shown(value: object) -> str:
    text = ascii(value)  # what cannot be sent can often not be printed either
    return text if len(text) <= 60 else f"{text[:57]}..."
