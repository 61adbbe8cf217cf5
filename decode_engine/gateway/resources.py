"""All that is asked over HTTP but answers: contexts, operations, files, models, tokens, health, and a page at `/`.

The page's files hold nothing of the server's and need no token; what it asks by them does.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_engine.errors import TooManyRequestsError
from decode_engine.gateway.exchange import (
    EventStream,
    HttpError,
    LocalVerbs,
    bounded_receive,
    exchange_of,
    failure,
    read_given,
)
from decode_engine.gateway.wire.bodies import RESPONSES, TEMPLATE, rename_parts, response_turns
from decode_engine.gateway.wire.messages_shape import MESSAGE, TOOL, tools_of, turns_of
from decode_engine.gateway.wire.parameters import (
    LABELS,
    LABELS_ONLY,
    MESSAGES,
    RENEW,
    TOOLS,
    TTL,
    Endpoint,
    Parameter,
    pick,
    refused,
    taken,
)
from decode_engine.gateway.wire.reply_structs import JsonReply, event
from decode_engine.gateway.wire.shapes import DONE
from decode_engine.orders.fields import BY_NAME, FLAG, TEXT, TOKENS, Range
from decode_engine.rpc.answers.prompting import StoredMessages
from decode_engine.rpc.client import (
    NEVER,
    ContextChanges,
    ContextInfo,
    CreateOptions,
    Never,
    OperationInfo,
    verbs,
)
from index_store.errors import InvalidArgumentError
from index_store.jobs.uploads import MOST_DOCUMENT_BYTES
from index_store.methods.default import DEFAULT_METHOD
from index_store.models.conversation.messages import Conversation, Message

_MOST_ON_A_PAGE = 1000

EXPIRY = (
    Parameter("expire_time", TEXT, "When it expires, as 2030-01-31T12:00:00Z, or `never`."),
    Parameter("ttl_seconds", TTL, "The same as seconds from now; one of both."),
    Parameter(
        "renew_seconds",
        RENEW,
        "Time to live that every use begins anew; the first one where nothing else says when it expires. 0: none.",
    ),
)

UPDATE = Endpoint(
    "/v1/contexts/{context}",
    (
        Parameter("display_name", TEXT, "What people call the context."),
        Parameter("move_name", FLAG, "Take `display_name` from the context that has it, which keeps its id."),
        *EXPIRY,
        Parameter("labels", LABELS, "Labels to set; null takes one away. Others stay."),
        Parameter("pinned", FLAG, "Whether it is kept from expiring and from being removed."),
        Parameter("readers", BY_NAME["choices"].kind, "Tenants that may read it, too; `*` stands for all."),
    ),
)


async def health(request: Request) -> Response:
    """GET /health: whether the server takes requests, and what it does while it starts. Needs no token."""
    found = exchange_of(request).beside.listener.health
    if found.serving:
        return JsonReply({"status": "ok"})
    starting = {"status": "starting", "phase": found.phase}
    otherwise = {"status": "draining" if found.draining else "unavailable"}
    return JsonReply(starting if found.phase else otherwise, status_code=503)


async def live(request: Request) -> Response:
    """GET /live: that the process answers, whether it takes requests or not. Needs no token."""
    return JsonReply({"status": "ok"})


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    return JsonReply({"object": "list", "data": [_model(request)]})


async def get_model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    model = _model(request)
    name = request.path_params["model"]
    if name != model["id"]:
        raise HttpError(404, f"model is {name[:100]!r}, but {model['id']!r} is served", "model_not_found")
    return JsonReply(model)


def _model(request: Request) -> dict[str, Any]:
    identity = exchange_of(request).beside.served.answering.facts.identity
    named = {"id": identity.name, "object": "model", "created": 0, "owned_by": "sparsekv"}
    # As vLLM calls it, and as OpenRouter does.
    return {**named, "max_model_len": identity.max_positions, "context_length": identity.max_positions}


async def list_contexts(request: Request) -> Response:
    """GET /v1/contexts: a page, newest first."""
    known_query(request, "page_size", "page_token", "name_prefix", "label", "state")
    size = _integer(request, "page_size", "0", _MOST_ON_A_PAGE)
    token, prefix, state = (
        request.query_params.get(name, "") for name in ("page_token", "name_prefix", "state")
    )
    words = request.query_params.getlist("label")
    if unlike := [word for word in words if "=" not in word]:
        raise InvalidArgumentError(f"label is {ascii(unlike[0])[:60]}, expected KEY=VALUE", field="label")
    labels = dict(word.partition("=")[::2] for word in words)
    page = await LocalVerbs(request).list_page(size, token, name_prefix=prefix, labels=labels, state=state)
    return JsonReply(
        {
            "object": "list",
            "data": [context_object(context) for context in page.contexts],
            "has_more": bool(page.next_page_token),
            "next_page_token": page.next_page_token or None,
        }
    )


async def get_context(request: Request) -> Response:
    """GET /v1/contexts/{context}: by display name, id, or the id's first digits."""
    known_query(request)
    return JsonReply(context_object(await _find(request)))


async def update_context(request: Request) -> Response:
    """PATCH /v1/contexts/{context}."""
    known_query(request)
    given = await read_given(request, UPDATE)
    if not any(value != {} for value in given.values()):
        names = ", ".join(parameter.name for parameter in UPDATE.parameters)
        raise InvalidArgumentError(f"nothing to change, expected some of {names}")
    times = ("expire_time", "ttl_seconds", "renew_seconds")
    others = {name: value for name, value in given.items() if name not in times}
    said = {"expire_time": expiry_of(given), "renew_s": given.get("renew_seconds")}
    changes = cast(ContextChanges, {**others, **said})
    context = await _find(request)
    return JsonReply(context_object(await LocalVerbs(request).update_context(context.name, **changes)))


def expiry_of(given: Mapping[str, Any]) -> datetime | Never | None:
    """When a context expires by what was given; None where that says nothing. Raises InvalidArgumentError."""
    if "ttl_seconds" not in given:
        return _time(given["expire_time"]) if "expire_time" in given else None
    if "expire_time" in given:
        raise InvalidArgumentError(
            "expire_time and ttl_seconds are given, expected one of both", field="expire_time"
        )
    return datetime.now(UTC) + timedelta(seconds=given["ttl_seconds"])


def _time(text: str) -> datetime | Never:
    if text == NEVER.value:
        return NEVER
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = datetime.min
    if found.tzinfo is None:
        raise InvalidArgumentError(
            f"expire_time is {text[:100]!r}, expected a time with its zone as 2030-01-31T12:00:00Z, or never",
            field="expire_time",
        )
    return found


async def delete_context(request: Request) -> Response:
    """DELETE /v1/contexts/{context}; with `force` those that continue it, too."""
    known_query(request, "force")
    force = request.query_params.get("force", "false")
    if force not in ("true", "false"):
        raise InvalidArgumentError(f"force is {force[:100]!r}, expected true or false", field="force")
    context = await _find(request)
    await LocalVerbs(request).delete_context(context.name, force=force == "true")
    return JsonReply({"id": _id(context), "object": "context", "deleted": True})


async def _find(request: Request) -> ContextInfo:
    return await LocalVerbs(request).find_context(request.path_params["context"])


def context_object(context: ContextInfo) -> dict[str, Any]:
    """A context as JSON: the fields of the API's message, times as ISO 8601."""
    fields = asdict(context)
    times = {name: value.isoformat() for name, value in fields.items() if isinstance(value, datetime)}
    return {"id": _id(context), "object": "context", **fields, **times}


def _id(context: ContextInfo) -> str:
    return context.name.removeprefix("contexts/")


def _integer(request: Request, name: str, usual: str, most: int) -> int:
    """A parameter of the address. Raises InvalidArgumentError."""
    text = request.query_params.get(name, usual)
    if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) <= most):
        raise InvalidArgumentError(
            f"{name} is {text[:100]!r}, expected an integer of 0 to {most}", field=name
        )
    return int(text)


def known_query(request: Request, *names: str) -> None:
    """Raises InvalidArgumentError for a parameter of the address that is none of these."""
    for name in request.query_params:
        if name not in names:
            raise InvalidArgumentError(
                f"{name[:100]!r} is no parameter of {request.url.path[:100]}; docs/api.md lists them",
                field=name[:100],
            )


CREATE = Endpoint(
    "/v1/contexts",
    (
        Parameter(
            "text", TEXT, "The document. Exactly one of `text`, `token_ids`, `messages`, `file_id`, `again`."
        ),
        Parameter("token_ids", TOKENS, "The document as tokens."),
        Parameter(
            "messages", MESSAGES, "The document as messages, which those of requests follow.", inside=MESSAGE
        ),
        Parameter("tools", TOOLS, "With `messages`: functions that the model may call.", inside=TOOL),
        Parameter("file_id", TEXT, "The document as a file that /v1/files took, by its id."),
        Parameter("again", TEXT, "What an expired or removed context of that name or id was made of."),
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
_SOURCES = ("text", "token_ids", "messages", "file_id", "again")
_FILE_PREFIX = "file-"
_PURPOSE = "user_data"
_WAIT_S = 1.0
_FILE_S = 600.0
"""How long a file may take to arrive."""
_MOST_FILES = 4
"""Files that are taken at once: each may lie in memory whole."""


async def create_context(request: Request) -> Response:
    """POST /v1/contexts: an operation, or with `stream` its progress. What was begun goes on when the client goes."""
    given = await read_given(request, CREATE)
    if len(pick(given, _SOURCES)) != 1:
        raise InvalidArgumentError(f"give exactly one of {', '.join(_SOURCES)}")
    parent, upload = given.get("parent"), _upload_of(given.get("file_id"))
    if parent is not None:
        parent = (await LocalVerbs(request).find_context(parent)).name
    others = {name: given[name] for name in CreateOptions.__annotations__ if name in given}
    options = cast(
        CreateOptions,
        {**others, "ttl_s": _lives_s(given), "renew_s": given.get("renew_seconds") or None, "parent": parent},
    )
    order = verbs.create_context(
        options,
        text=given.get("text"),
        token_ids=given.get("token_ids"),
        messages=_messages_of(given),
        upload=upload,
        again=given.get("again"),
    )
    operation = await LocalVerbs(request).run(order)
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
    found = [operation_object(each) async for each in LocalVerbs(request).list_operations()]
    return JsonReply({"object": "list", "data": found, "has_more": False})


async def get_operation(request: Request) -> Response:
    """GET /v1/operations/{operation}."""
    return JsonReply(operation_object(await _operation(request)))


async def cancel_operation(request: Request) -> Response:
    """POST /v1/operations/{operation}/cancel."""
    await LocalVerbs(request).cancel_operation(_operation_name(request))
    return JsonReply(operation_object(await _operation(request)))


async def _operation(request: Request) -> OperationInfo:
    return await LocalVerbs(request).get_operation(_operation_name(request))


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
    bounded = Request(request.scope, bounded_receive(request.receive, MOST_DOCUMENT_BYTES + 2**16, _FILE_S))
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
    upload = await LocalVerbs(request).upload_document(document)
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
            operation = await LocalVerbs(request).wait_operation(operation.name, _WAIT_S)
    except Exception as error:
        yield event(failure(exchange.public(error, exchange.beside.paths))[1], "error")
    yield event(DONE)


def operation_object(operation: OperationInfo) -> dict[str, Any]:
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


_COUNTED = frozenset(
    (
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "reasoning",
        "truncation",
        "previous_response_id",
        "conversation",
    )
)
INPUT_TOKENS = Endpoint(
    "/v1/responses/input_tokens",
    (*(one for one in RESPONSES.parameters if one.name in _COUNTED), *taken("model", "one model is served")),
)
TOKENIZE = Endpoint(
    "/tokenize",
    (
        Parameter("prompt", TEXT, "A text. Exactly one of `prompt` and `messages`."),
        Parameter("messages", MESSAGES, "A conversation from its beginning.", inside=MESSAGE),
        Parameter("tools", TOOLS, "With `messages`: functions that the model is told of.", inside=TOOL),
        *taken("model", "one model is served"),
        refused("add_special_tokens", "a template says them all; of a text the tokens of its words are told"),
        Parameter("return_token_strs", FLAG, "Whether the tokens' texts are told, too."),
        *(each for each in TEMPLATE if each.name != "add_special_tokens"),
    ),
)
DETOKENIZE = Endpoint(
    "/detokenize",
    (Parameter("tokens", TOKENS, "The tokens.", required=True), *taken("model", "one model is served")),
)


async def tokenize(request: Request) -> Response:
    """POST /tokenize: tokens of a text, or of a conversation up to where the answer begins."""
    given = await read_given(request, TOKENIZE)
    if ("prompt" in given) == ("messages" in given):
        raise InvalidArgumentError("give exactly one of prompt and messages", field="prompt")
    said: str | Conversation = given.get("prompt", "")
    if "messages" in given:
        said = Conversation(turns_of(given["messages"]), tools_of(given.get("tools", [])))
    found = await LocalVerbs(request).tokenize(said)
    texts = [text.decode("utf-8", "replace") for text in found.texts]
    return JsonReply(
        {
            "count": len(found.ids),
            "max_model_len": exchange_of(request).beside.served.answering.facts.identity.max_positions,
            "tokens": found.ids,
            "token_strs": texts if given.get("return_token_strs") else None,
        }
    )


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of tokens."""
    given = await read_given(request, DETOKENIZE)
    return JsonReply({"prompt": await LocalVerbs(request).detokenize(given["tokens"])})


async def count_input(request: Request) -> Response:
    """POST /v1/responses/input_tokens: how many tokens a response would begin with, without a context."""
    given = await read_given(request, INPUT_TOKENS)
    turns, places = response_turns(given)
    said = Conversation(turns, tools_of(given.get("tools", [])))
    try:
        counted = await LocalVerbs(request).count_tokens(said)
    except InvalidArgumentError as error:
        rename_parts(error, places)
        raise
    return JsonReply({"object": "response.input_tokens", "input_tokens": counted})


_FOLDER = Path(__file__).parent / "browser"
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
MOST_TOKENS = 16_384
"""That are told at once."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page_file(request: Request) -> Response:
    """GET /, /page.css, /page.js."""
    name, kind = _FILES[request.url.path]
    content = (_FOLDER / name).read_bytes()
    if not exchange_of(request).beside.door.is_open:
        content = content.replace(b'<html lang="en">', b'<html lang="en" data-tokens>', 1)
    return Response(content, media_type=kind, headers=_HEADERS)


PAGE = tuple(Route(path, page_file, methods=["GET"]) for path in _FILES)
"""Open to everybody: they are the same everywhere."""


async def server_status(request: Request) -> Response:
    """GET /v1/status: what the server does now, and did since it started."""
    known_query(request)
    answering = exchange_of(request).beside.served.answering
    status = await answering.core.status()
    return JsonReply(
        {
            "object": "status",
            "model": answering.facts.identity.name,
            "max_sessions": answering.facts.max_sessions,
            **status.engine,
            **status.beginnings,
            **status.arena,
            **status.objects,
            "method_choices": status.choices,
        }
    )


async def context_tokens(request: Request) -> Response:
    """GET /v1/contexts/{context}/tokens: the texts of some of a context's tokens; joined they are the text."""
    known_query(request, "start", "count")
    start = _integer(request, "start", "0", 2**31 - 1)
    count = _integer(request, "count", "2048", MOST_TOKENS)
    exchange = exchange_of(request)
    answering = exchange.beside.served.answering
    found = await LocalVerbs(request).find_context(request.path_params["context"])

    def read() -> tuple[int, list[str]]:
        manifest = answering.store.manifest(found.name.removeprefix("contexts/"))
        ids = StoredMessages(answering.store, manifest).tokens()
        decoder, bytes_of = codecs.getincrementaldecoder("utf-8")("replace"), answering.vocabulary.token_bytes
        return len(ids), [decoder.decode(bytes_of[token]) for token in ids[start : start + count]]

    total, texts = await answering.long(exchange, partial(answering.store.bounded, read))
    return JsonReply({"object": "tokens", "start": start, "total": total, "texts": texts})
