"""The verbs: what is sent, and how the reply is read; for clients, and for doors that answer others in their words."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from types import MappingProxyType
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack
from uuid import uuid4

from google.longrunning import operations_pb2
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from decode_engine.rpc.client.replies import OperationInfo, ServerStatus, read_nothing, read_operation, reads
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation, Tool
from index_store.models.conversation.messages import Message as ChatMessage
from sparsekv.v1 import context_pb2, conversation_pb2, generation_pb2, values

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
    """One request, a message or several, with one response. method: of METHODS. read: what is made of that."""

    method: str
    request: Message | Iterator[Message]
    read: Callable[[Any], ReplyT]


def call(method: str, read: Callable[[Any], ReplyT], **fields: Any) -> Call[ReplyT]:
    """The call of a method, by the fields of its request.

    Raises InvalidArgumentError as `message` does, and for a request that is larger than servers take: gRPC would refuse
    it without our reason.
    """
    request = message(GetMessageClass(METHODS[method].input_type), **fields)
    _check_size(request, "send less, or upload a document in parts", "request")
    return Call(method, request, read)


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


class GenerateOptions(values.GenerateFields, total=False):
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


class CreateOptions(values.CreateFields, total=False):
    """What `create_context` takes beside the document; sparsekv/v1/context.proto has the ranges.

    ttl_s, renew_s: seconds. parent: name of a context that the new one continues. rows: "int8" for exact rows in 8
    bits. request_id: by default a random one, so that the client may repeat the call.
    """


_CONSTRAINTS = ("json_schema", "regex", "choices")
_CALLS = ("tools", "tool_choice", "tool_name", "single_call")
_PROMPTS = ("question", "text", "token_ids", "messages")
_BUDGETS = ("keep_ratio", "target_mass", "token_budget")


class Never(Enum):
    """The time that does not come."""

    NEVER = "never"


NEVER = Never.NEVER


class ContextChanges(TypedDict, total=False):
    """What `update_context` changes; what is missing or None stays as it is.

    expire_time: NEVER takes it away. renew_s: seconds, 0 for no renewal. labels: by key, None removes the label.
    move_name: take `display_name` from the context that has it. readers: tenants, instead of those that there are.
    """

    display_name: str | None
    move_name: bool | None
    expire_time: datetime | Never | None
    renew_s: float | None
    labels: Mapping[str, str | None] | None
    pinned: bool | None
    readers: Sequence[str] | None


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
    again: str | None = None,
) -> Call[OperationInfo]:
    """Raises InvalidArgumentError unless there is one document, and for what no message can carry."""
    sources = (text, token_ids, messages, upload, again)
    if sum(source is not None for source in sources) != 1:
        raise InvalidArgumentError(
            "give exactly one of text, token_ids, messages, upload, again", field="source"
        )
    others: dict[str, Any] = {**options, "request_id": options.get("request_id") or str(uuid4())}
    times = {name: _duration(f"{name}_s", others.pop(f"{name}_s", None)) for name in ("ttl", "renew")}
    said = None if messages is None else _conversation(messages)
    document = {"text": text, "token_ids": token_ids, "messages": said, "upload": upload, "again": again}
    return call("CreateContext", read_operation, **document, **others, **times)


def upload_parts(document: bytes) -> Iterator[context_pb2.UploadDocumentRequest]:
    """What is sent of a document, with its checksum."""
    sha256 = hashlib.sha256(document).hexdigest()
    for start in range(0, max(len(document), 1), _PART_BYTES):
        part = document[start : start + _PART_BYTES]
        yield context_pb2.UploadDocumentRequest(data=part, sha256=sha256 if start == 0 else "")


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
        fields["messages"] = _conversation(messages, options.get("tools") or ())
    elif options.get("tools"):
        raise InvalidArgumentError("tools are given without messages, expected both", field="tools")
    fields["tool_choice"] = _tool_choice(options)
    if (keep := options.get("keep")) is not None:
        fields["keep"] = message(
            generation_pb2.Keep,
            display_name=keep.name,
            prompt_only=keep.prompt_only,
            move_name=keep.move_name,
            ttl=keep.ttl,
        )
    if given.intersection(_CONSTRAINTS):
        schema, regex, choices = (options.get(name) for name in _CONSTRAINTS)
        fields["constraint"] = message(
            generation_pb2.Constraint,
            json_schema=schema if schema is None or isinstance(schema, str) else json.dumps(schema),
            regex=regex,
            choices=None if choices is None else message(generation_pb2.Choices, texts=choices),
        )
    request = message(generation_pb2.GenerateRequest, context=context, **fields)
    _check_size(request, "shorten the prompt", "prompt")
    return request


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


def _conversation(
    said: Sequence[ChatMessage] | Conversation, tools: Sequence[Tool] = ()
) -> conversation_pb2.Conversation:
    """Messages and tools as the API has them. Raises as `message`."""
    messages, tools = (said.messages, said.tools) if isinstance(said, Conversation) else (said, tools)
    return conversation_pb2.Conversation(
        messages=[
            message(
                conversation_pb2.Message,
                f"messages[{number}].",
                role=each.role.name,
                content=each.content,
                name=each.name,
                tool_calls=[
                    message(
                        conversation_pb2.ToolCall,
                        f"messages[{number}].tool_calls.",
                        id=one.id,
                        name=one.name,
                        arguments_json=one.arguments,
                    )
                    for one in each.tool_calls
                ],
                tool_call_id=each.tool_call_id,
            )
            for number, each in enumerate(messages)
        ],
        tools=[
            message(
                conversation_pb2.Tool,
                f"tools[{number}].",
                name=tool.name,
                description=tool.description,
                parameters_json=tool.parameters,
                strict=tool.strict,
            )
            for number, tool in enumerate(tools)
        ],
    )


def _content(content: Content) -> dict[str, Any]:
    return {"text": content} if isinstance(content, str) else {"messages": _conversation(content)}


def message(kind: type[MessageT], within: str = "", /, **fields: Any) -> MessageT:
    """A message of the fields that are not None; one text where there may be several is a list of it.

    Raises InvalidArgumentError that names a field which does not fit, `within` before it.
    """
    made = kind()
    for name, value in fields.items():
        if value is None:
            continue
        field = kind.DESCRIPTOR.fields_by_name.get(name)
        texts = field is not None and field.is_repeated and field.type == field.TYPE_STRING
        try:
            given = generation_pb2.TokenIds(ids=value) if name == "token_ids" else value
            given = [given] if texts and isinstance(given, str) else given
            made.MergeFrom(kind(**{name: given}))
        except (ValueError, TypeError, OverflowError) as error:
            enum = None if field is None else field.enum_type
            reason = f"expected one of {', '.join([*enum.values_by_name][1:])}" if enum else error
            raise _unfit(within + name, value, reason) from error
    return made


def _unfit(field: str, value: object, reason: object) -> InvalidArgumentError:
    text = ascii(value)  # what cannot be sent can often not be printed either
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return InvalidArgumentError(f"{field} is {shown}, which no request can carry: {reason}", field=field)


LOOK_S = 30.0
"""Seconds that one call waits for an operation, at most."""
PROGRESS_S = 0.5
"""The same where progress is told."""


class Verbs(ABC):
    """The verbs whose replies are single messages, for coroutines; children say how one is sent."""

    @abstractmethod
    async def run(self, call: Call[ReplyT]) -> ReplyT:
        """What is made of the reply to a call."""

    async def _ask(self, method: str, read: Callable[[Any], ReplyT], **fields: Any) -> ReplyT:
        return await self.run(call(method, read, **fields))

    async def list_contexts(
        self,
        page_size: int = 0,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] = MappingProxyType({}),
        state: str = "",
    ) -> AsyncIterator[values.ContextInfo]:
        """Contexts, newest first: those whose names begin so, that have these labels, and are in this state.

        They are fetched page by page (0: the server's page size).
        """
        token: str | None = ""
        while token is not None:
            page = await self.list_page(page_size, token, name_prefix=name_prefix, labels=labels, state=state)
            for context in page.contexts:
                yield context
            token = page.next_page_token or None

    async def list_page(
        self,
        page_size: int = 0,
        page_token: str = "",
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] = MappingProxyType({}),
        state: str = "",
    ) -> values.ContextPage:
        """One page of contexts as of `list_contexts`. page_token: of the page before, "" for the first one."""
        return await self._ask(
            "ListContexts",
            reads(values.ContextPage),
            page_size=page_size,
            page_token=page_token,
            name_prefix=name_prefix,
            labels=labels,
            state=state or None,
        )

    async def get_context(self, name: str) -> values.ContextInfo:
        """One context by its resource name, `contexts/<id>`. Raises ContextNotFoundError."""
        return await self._ask("GetContext", reads(values.ContextInfo), name=name)

    async def find_context(self, reference: str) -> values.ContextInfo:
        """The context that a reference means: an id, its first 6 or more digits, a resource or display name.

        Raises ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
        """
        return await self._ask("GetContext", reads(values.ContextInfo), reference=reference)

    async def update_context(self, name: str, **changes: Unpack[ContextChanges]) -> values.ContextInfo:
        """Changes what a context is called, when it expires, single labels, whether it is pinned, and who reads it.

        Returns the context as it is then. Raises ContextNotFoundError, or ContextBusyError where a job writes it for
        longer than two seconds; nothing is repeated then, `retry_after_s` says when to.
        """
        labels, expires = changes.get("labels") or {}, changes.get("expire_time")
        changed = message(
            context_pb2.Context,
            name=name,
            labels={key: value for key, value in labels.items() if value is not None},
            display_name=changes.get("display_name"),
            pinned=changes.get("pinned"),
            expire_time=None if expires is NEVER else expires,
            renew=_duration("renew_s", changes.get("renew_s") or None),
            readers=changes.get("readers"),
        )
        names = {name: name for name in ("display_name", "expire_time", "pinned", "readers")} | {
            "renew_s": "renew"
        }
        others = (field for name, field in names.items() if changes.get(name) is not None)
        mask = message(FieldMask, paths=[*(f"labels.{key}" for key in labels), *others])
        asked = {"context": changed, "update_mask": mask, "move_name": changes.get("move_name")}
        return await self._ask("UpdateContext", reads(values.ContextInfo), **asked)

    async def delete_context(self, name: str, *, allow_missing: bool = False, force: bool = False) -> None:
        """Deletes a context. Raises ContextNotFoundError unless `allow_missing`.

        force: and those that continue it; without it raises ContextHasChildrenError where there are some.
        """
        await self._ask("DeleteContext", read_nothing, name=name, allow_missing=allow_missing, force=force)

    async def warm_context(self, name: str) -> values.WarmResult:
        """Loads a context into the server's memory and verifies it."""
        return await self._ask("WarmContext", reads(values.WarmResult), name=name)

    async def create_context(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | Conversation | None = None,
        upload: str | None = None,
        again: str | None = None,
        wait: bool = True,
        on_progress: Callable[[OperationInfo], None] | None = None,
        **options: Unpack[CreateOptions],
    ) -> OperationInfo:
        """Has a context made of exactly one of a text, tokens, messages, an uploaded text (`uploads/<id>`), and what an
        expired context (`again`: its name or id) was made of.

        A text that is larger than a message is uploaded. wait: until the operation is done; on_progress is told how it
        goes meanwhile, and errors of the operation are raised. Otherwise it goes on while nobody waits.
        """
        try:
            document = b"" if text is None else text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"text has half a character at {error.start}, which no request can carry", field="text"
            ) from None
        if len(document) > ONE_MESSAGE_BYTES:
            upload, text = (await self.upload_document(document)).name, None
        ordered = create_context(
            options, text=text, token_ids=token_ids, messages=messages, upload=upload, again=again
        )
        operation = await self.run(ordered)
        if wait:
            operation = await self.wait_operation(operation.name, on_progress=on_progress)
            operation.result()
        return operation

    async def upload_document(self, document: bytes) -> values.UploadInfo:
        """Sends a UTF-8 text ahead of the request that uses it."""
        return await self.run(Call("UploadDocument", upload_parts(document), reads(values.UploadInfo)))

    async def wait_operation(
        self,
        name: str,
        wait_s: float | None = None,
        on_progress: Callable[[OperationInfo], None] | None = None,
    ) -> OperationInfo:
        """Waits until an operation is done, or for so many seconds, and returns what it is then."""
        end = None if wait_s is None else time.monotonic() + wait_s
        while True:
            most_s = LOOK_S if on_progress is None else PROGRESS_S
            left_s = most_s if end is None else min(most_s, max(0.0, end - time.monotonic()))
            operation = await self._ask(
                "WaitOperation", read_operation, name=name, timeout=_duration("wait_s", left_s)
            )
            if on_progress is not None:
                on_progress(operation)
            if operation.done or (end is not None and time.monotonic() >= end):
                return operation

    async def get_operation(self, name: str) -> OperationInfo:
        """An operation, `operations/<id>`, as it is now. Raises JobNotFoundError."""
        return await self._ask("GetOperation", read_operation, name=name)

    async def list_operations(self, page_size: int = 0) -> AsyncIterator[OperationInfo]:
        """All operations, newest first, fetched page by page (0: the server's page size)."""
        token: str | None = ""
        while token is not None:
            page = await self._ask("ListOperations", lambda page: page, page_size=page_size, page_token=token)
            for operation in page.operations:
                yield read_operation(operation)
            token = page.next_page_token or None

    async def cancel_operation(self, name: str) -> None:
        """Has an operation end as cancelled, unless it has ended already."""
        await self._ask("CancelOperation", read_nothing, name=name)

    async def delete_operation(self, name: str) -> None:
        """Forgets an operation that has ended. Raises JobUnfinishedError."""
        await self._ask("DeleteOperation", read_nothing, name=name)

    async def list_methods(self) -> values.MethodList:
        """The server's methods, with their sizes for its model."""
        return await self._ask("ListMethods", reads(values.MethodList))

    async def server_status(self) -> ServerStatus:
        """What the server does now, and did since it started."""
        return await self._ask("GetServerStatus", reads(ServerStatus))

    async def tenants(self) -> values.TenantList:
        """What tenants use of their quotas: the caller's own, or with the right admin all."""
        return await self._ask("ListTenants", reads(values.TenantList))

    async def drain(self, limit_s: float | None = None) -> None:
        """Has the server take nothing new, and end when nothing runs any more, or after so many seconds."""
        await self._ask("Drain", read_nothing, limit=_duration("limit_s", limit_s))

    async def tokenize(self, content: Content) -> values.TokenizedText:
        """A text, or a conversation from its beginning, as the model's tokens."""
        return await self._ask("Tokenize", reads(values.TokenizedText), **_content(content))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return await self._ask("Detokenize", lambda response: str(response.text), ids=ids)

    async def count_tokens(self, content: Content) -> int:
        """How many tokens these would be."""
        return await self._ask("CountTokens", lambda response: int(response.tokens), **_content(content))
