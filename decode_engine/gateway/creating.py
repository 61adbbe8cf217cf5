"""Contexts that are made on request, the operations that follow them, and files to make them of."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from decode_engine.errors import TooManyRequestsError
from decode_engine.gateway.exchange import EventStream, ask, bounded_receive, exchange_of, read_given
from decode_engine.gateway.failures import HttpError, failure
from decode_engine.gateway.listing import EXPIRY, context_object, expiry_of, known_query
from decode_engine.gateway.wire.messages_shape import MESSAGE, turns_of
from decode_engine.gateway.wire.parameters import (
    LABELS_ONLY,
    MESSAGES,
    TOOLS,
    Endpoint,
    Parameter,
    pick,
)
from decode_engine.gateway.wire.sent_events import JsonReply, event
from decode_engine.gateway.wire.shapes import DONE
from decode_engine.gateway.wire.tool_shapes import TOOL, tools_of
from decode_engine.orders.fields import BY_NAME
from decode_engine.orders.kinds import FLAG, TEXT, TOKENS, Range
from decode_engine.rpc.client import NEVER, CreateOptions, OperationInfo, UploadInfo, verbs
from decode_engine.rpc.client.replies import read_reply
from index_store.errors import InvalidArgumentError
from index_store.jobs.uploads import MOST_DOCUMENT_BYTES
from index_store.methods.default import DEFAULT_METHOD
from index_store.models.conversation.messages import Conversation, Message

ItemT = TypeVar("ItemT")

CREATE = Endpoint(
    "/v1/contexts",
    (
        Parameter(
            "text", TEXT, "The document. Exactly one of `text`, `token_ids`, `messages` and `file_id`."
        ),
        Parameter("token_ids", TOKENS, "The document as tokens."),
        Parameter(
            "messages",
            MESSAGES,
            "The document as messages, which those of requests follow.",
            inside=MESSAGE,
        ),
        Parameter("tools", TOOLS, "With `messages`: functions that the model may call.", inside=TOOL),
        Parameter("file_id", TEXT, "The document as a file that /v1/files took, by its id."),
        Parameter(
            "parent",
            TEXT,
            "A context that the new one continues, by display name, id, or the id's first digits. A child has the "
            "parent's indexes, and stores what follows alone.",
        ),
        Parameter("labels", LABELS_ONLY, "Labels of the context."),
        Parameter(
            "display_name", TEXT, "What people call the context; the document's first words by default."
        ),
        Parameter("move_name", FLAG, "Take `display_name` from the context that has it, which keeps its id."),
        *EXPIRY,
        Parameter(
            "methods",
            BY_NAME["choices"].kind,
            f"Methods whose indexes to build; `{DEFAULT_METHOD}` by default.",
        ),
        Parameter("rows", TEXT, "`int8`: exact keys and values in 8 bits; `dtype` by default, as they are."),
        Parameter(
            "request_id", TEXT, "Makes a repeat of the request harmless: it returns the same operation."
        ),
        Parameter("priority", Range(-100, 100, whole=True).kind, "Higher ones are made first."),
        Parameter("stream", FLAG, "Send the progress as server-sent events, the context at the end."),
    ),
)
_SOURCES = ("text", "token_ids", "messages", "file_id")
_FILE_PREFIX = "file-"
_PURPOSE = "user_data"
_WAIT_S = 1.0
_MOST_FILES = 4
"""Files that are taken at once: each may lie in memory whole."""


async def create_context(request: Request) -> Response:
    """POST /v1/contexts: an operation, or with `stream` its progress. What was begun goes on when the client goes."""
    given = await read_given(request, CREATE)
    if len(pick(given, _SOURCES)) != 1:
        raise InvalidArgumentError(f"give exactly one of {', '.join(_SOURCES)}")
    parent, upload = given.get("parent"), _upload_of(given.get("file_id"))
    if parent is not None:
        parent = (await ask(request, verbs.find_context(parent))).name
    others = {name: given[name] for name in CreateOptions.__annotations__ if name in given}
    options = cast(CreateOptions, {**others, "ttl_s": _lives_s(given), "parent": parent})
    order = verbs.create_context(
        options,
        text=given.get("text"),
        token_ids=given.get("token_ids"),
        messages=_messages_of(given),
        upload=upload,
    )
    operation = await ask(request, order)
    if given.get("stream"):
        return EventStream(_progress(request, operation), _no_work)
    return JsonReply(operation_object(operation), status_code=202)


def _lives_s(given: dict[str, Any]) -> float | None:
    """How long the context lives from now on; None for good."""
    expires = expiry_of(given)
    if expires is None or expires is NEVER:
        return None
    return max((expires - datetime.now(UTC)).total_seconds(), 1.0)


def _messages_of(given: dict[str, Any]) -> Sequence[Message] | Conversation | None:
    tools = tools_of(given.get("tools") or [])
    if "messages" not in given:
        if tools:
            raise InvalidArgumentError("tools are given without messages, expected both", field="tools")
        return None
    turns = turns_of(given["messages"])
    return turns if "parent" in given and not tools else Conversation(turns, tools)


async def list_operations(request: Request) -> Response:
    """GET /v1/operations: the newest ones."""
    known_query(request)
    found, token = list[dict[str, Any]](), None
    while token != "":
        page = await ask(request, verbs.list_operations(0, token or ""))
        found += [operation_object(operation) for operation in page.operations]
        token = page.next_page_token
    return JsonReply({"object": "list", "data": found, "has_more": False})


async def get_operation(request: Request) -> Response:
    """GET /v1/operations/{operation}."""
    return JsonReply(operation_object(await _operation(request)))


async def cancel_operation(request: Request) -> Response:
    """POST /v1/operations/{operation}/cancel."""
    await ask(request, verbs.cancel_operation(_operation_name(request)))
    return JsonReply(operation_object(await _operation(request)))


async def _operation(request: Request) -> OperationInfo:
    return await ask(request, verbs.get_operation(_operation_name(request)))


async def create_file(request: Request) -> Response:
    """POST /v1/files: a document of plain text that a context is to be made of, within a day."""
    if request.app.files >= _MOST_FILES:
        raise TooManyRequestsError(
            f"{_MOST_FILES} files are being taken, which is the limit; try again later"
        )
    request.app.files += 1
    try:
        return await _take_file(request)
    finally:
        request.app.files -= 1


async def _take_file(request: Request) -> Response:
    bounded = Request(request.scope, bounded_receive(request.receive, MOST_DOCUMENT_BYTES + 2**16))
    try:
        async with bounded.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            unknown = set(form) - {"file", "purpose"}
            if unknown or not isinstance(file, UploadFile) or purpose != _PURPOSE:
                found = ", ".join(sorted(map(ascii, form)))[:200] or "nothing"
                raise InvalidArgumentError(
                    f"the form has {found}, purpose {ascii(purpose)[:40]}, "
                    f"expected a file under the name file, and the purpose {_PURPOSE}",
                    field="purpose" if isinstance(file, UploadFile) else "file",
                )
            document = await file.read()
            filename = file.filename or ""
    except HTTPException as error:
        raise InvalidArgumentError(f"the body is no form: {error.detail}", field="file") from error
    exchange, parts = exchange_of(request), _each(verbs.upload_parts(document))
    sent = await exchange.handler("UploadDocument")(parts, exchange)
    upload = read_reply(UploadInfo, sent)
    return JsonReply(
        {
            "id": _FILE_PREFIX + upload.name.removeprefix("uploads/"),
            "object": "file",
            "bytes": upload.size_bytes,
            "created_at": int(time.time()),
            "expires_at": int(upload.expire_time.timestamp()),
            "filename": filename,
            "purpose": _PURPOSE,
            "status": "processed",
        }
    )


async def _each(parts: Iterable[ItemT]) -> AsyncIterator[ItemT]:
    for part in parts:
        yield part


async def _no_work() -> None:
    """What was begun goes on."""


async def _progress(request: Request, operation: OperationInfo) -> AsyncGenerator[bytes, None]:
    """Events `progress` at every change, then `context` or `error`."""
    exchange, last = exchange_of(request), cast("OperationInfo | None", None)
    try:
        while True:
            if operation != last:
                yield event(operation_object(operation), "progress")
                last = operation
            if operation.done:
                yield event(context_object(operation.result()), "context")
                break
            operation = await ask(request, verbs.wait_operation(operation.name, _WAIT_S))
    except Exception as error:
        yield event(failure(exchange.public(error, exchange.beside.paths))[1], "error")
    yield event(DONE)


def operation_object(operation: OperationInfo) -> dict[str, Any]:
    """An operation as JSON."""
    fields = {name: value for name, value in asdict(operation).items() if name not in ("context", "error")}
    created = cast("datetime | None", fields.pop("create_time"))
    return {
        "id": operation.name.removeprefix("operations/"),
        "object": "operation",
        **fields,
        "create_time": None if created is None else created.isoformat(),
        "context": None if operation.context is None else context_object(operation.context),
        "error": None if operation.error is None else failure(operation.error)[1].error,
    }


def _operation_name(request: Request) -> str:
    return f"operations/{request.path_params['operation'].removeprefix('operations/')}"


def _upload_of(file_id: str | None) -> str | None:
    if file_id is None:
        return None
    if not file_id.startswith(_FILE_PREFIX):
        raise HttpError(
            404,
            f"there is no file {file_id[:100]!r}; POST /v1/files takes one and tells its id",
            "file_not_found",
        )
    return f"uploads/{file_id.removeprefix(_FILE_PREFIX)}"
