"""The paths, the OpenAPI document of them, and what stands before all: tokens, bounds, errors, a line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from decode_engine.errors import CancelledError, TooManyRequestsError
from decode_engine.gateway import generating, resources
from decode_engine.gateway.exchange import Bounds, Exchange, HttpError, refusal
from decode_engine.gateway.resources import CREATE, DETOKENIZE, INPUT_TOKENS, MOST_TOKENS, TOKENIZE, UPDATE
from decode_engine.gateway.wire import reply_structs as replies
from decode_engine.gateway.wire.bodies import CHAT, COMPLETIONS, RESPONSES
from decode_engine.gateway.wire.parameters import Endpoint, Fate, Members, Parameter, Variants
from decode_engine.rpc.door.rights import admit
from decode_engine.rpc.server import GrpcDoor
from index_store.errors import InvalidArgumentError
from index_store.store.listing import STATES

_REF = "#/components/schemas/{name}"
_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Operation:
    """What a handler takes and gives. reads: its body. replies: None for an object that is not described. status: when
    all is well. streams: whether the answer may be events; chunk: of which each is one. query: parameters by name."""

    reads: Endpoint | None = None
    replies: type[msgspec.Struct] | None = None
    status: int = 200
    streams: bool = False
    chunk: type[msgspec.Struct] | None = None
    query: Mapping[str, Mapping[str, Any]] | None = None


_TEXT: Mapping[str, Any] = {"type": "string"}
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
_OPERATIONS: Mapping[str, _Operation] = {
    "chat": _Operation(CHAT, replies.ChatReply, streams=True, chunk=replies.ChatChunk),
    "completions": _Operation(
        COMPLETIONS, replies.CompletionReply, streams=True, chunk=replies.CompletionChunk
    ),
    "responses": _Operation(RESPONSES, replies.ResponseReply, streams=True),
    "count_input": _Operation(INPUT_TOKENS),
    "tokenize": _Operation(TOKENIZE),
    "detokenize": _Operation(DETOKENIZE),
    "create_context": _Operation(CREATE, status=202, streams=True),
    "update_context": _Operation(UPDATE),
    "list_contexts": _Operation(
        query={
            "page_size": {"type": "integer", "minimum": 0, "maximum": 1000},
            **dict.fromkeys(("page_token", "name_prefix"), _TEXT),
            "label": {"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.*$"}},
            "state": {"enum": STATES},
        }
    ),
    "context_tokens": _Operation(
        query={
            "start": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "count": {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS},
        }
    ),
    "delete_context": _Operation(query={"force": {"enum": ["true", "false"]}}),
}
"""By the names of handlers; what is missing takes nothing and replies an object."""
_REPLIES = (
    replies.ErrorReply,
    replies.ChatReply,
    replies.ChatChunk,
    replies.CompletionReply,
    replies.CompletionChunk,
    replies.ResponseReply,
)
_FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "user_data"}},
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_REPLIES, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            described = _described(route)
            paths.setdefault(route.path_format, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sparsekv",
            "version": "1",
            "description": "Generation against stored contexts, as OpenAI's clients ask for it.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _described(route: Route) -> dict[str, Any]:
    name: str = route.endpoint.__name__
    operation = _OPERATIONS.get(name, _Operation())
    whole = _OBJECT if operation.replies is None else _ref(operation.replies)
    content: dict[str, Any] = {"application/json": {"schema": whole}}
    streams: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}
    if operation.chunk is not None:
        streams["text/event-stream"]["x-event"] = _ref(operation.chunk)
    answers: dict[str, dict[str, Any]] = {
        str(operation.status): {"description": "As asked.", "content": content}
    }
    if operation.streams:
        answers.setdefault("200", {"description": "With `stream`.", "content": {}})["content"].update(streams)
    refusal = {"schema": _ref(replies.ErrorReply)} if name != "health" else {"schema": _OBJECT}
    given = [
        {"name": each, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for each in route.param_convertors
    ]
    asked = [
        {"name": each, "in": "query", "required": False, "schema": schema}
        for each, schema in (operation.query or {}).items()
    ]
    made: dict[str, Any] = {
        "operationId": name,
        "summary": (route.endpoint.__doc__ or name).partition("\n")[0],
        "parameters": given + asked,
        "responses": {
            **answers,
            "default": {"description": "Refused.", "content": {"application/json": refusal}},
        },
    }
    if operation.reads is not None:
        read = _members(operation.reads.parameters)
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": read}}}
    if name == "create_file":
        made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    return made


def _ref(reply: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=reply.__name__)}


def _members(
    parameters: Sequence[Parameter],
    others: bool = False,
    by: str = "",
    kinds: Sequence[str] = (),
    usual: str = "",
) -> dict[str, Any]:
    """An object. others: whether it may have members that are not listed. by: the member that says of which kind it is,
    kinds: of these; usual: where it is missing."""
    properties = {one.name: _value(one) for one in parameters if one.fate is not Fate.REFUSED}
    required = [one.name for one in parameters if one.required]
    if by:
        properties[by] = {"enum": [*kinds]}
        required += [] if usual in kinds else [by]
    made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": others}
    return {**made, "required": required} if required else made


def _value(parameter: Parameter) -> dict[str, Any]:
    """The value of a member; null says nothing, but where it has to be there."""
    if parameter.fate is Fate.TAKEN:
        return {"description": f"Does nothing: {parameter.says}"}
    schema: Mapping[str, Any] = parameter.kind.schema
    if parameter.inside is not None:
        schema = _filled(schema, _inside(parameter.inside))
    if not parameter.required:
        unset = [{"enum": [*parameter.neutral]}] if parameter.neutral else []
        schema = {"anyOf": [schema, *unset, {"type": "null"}]}
    return {**schema, "description": parameter.says}


def _filled(schema: Mapping[str, Any], inside: Mapping[str, Any]) -> Mapping[str, Any]:
    if schema.get("type") == "object":
        return inside
    if schema.get("type") == "array":
        return {**schema, "items": _filled(schema["items"], inside)}
    if "anyOf" in schema:
        return {"anyOf": [_filled(one, inside) for one in schema["anyOf"]]}
    return schema


def _inside(inside: Members | Variants) -> dict[str, Any]:
    if isinstance(inside, Members):
        return _members(inside.parameters, inside.others_taken)
    return {"anyOf": [*_variants(inside)]}


def _variants(inside: Variants) -> Iterator[dict[str, Any]]:
    """Every kind of object that is not refused; names of the same kind together."""
    names: dict[int, list[str]] = {}
    for name, one in inside.kinds.items():
        names.setdefault(id(one), []).append(name)
    for same in names.values():
        one = inside.kinds[same[0]]
        if isinstance(one, Variants):
            yield from _variants(one)
        elif isinstance(one, Members):
            yield _members(one.parameters, one.others_taken, inside.by, same, inside.usual)


_NOT_ALLOWED = 405
_METHODS = ("GET", "POST", "PATCH", "DELETE")

ROUTES = (
    Route("/v1/chat/completions", generating.chat, methods=["POST"]),
    Route("/v1/completions", generating.completions, methods=["POST"]),
    Route("/v1/responses", generating.responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", resources.count_input, methods=["POST"]),
    Route("/tokenize", resources.tokenize, methods=["POST"]),
    Route("/detokenize", resources.detokenize, methods=["POST"]),
    Route("/v1/models", resources.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", resources.get_model, methods=["GET"]),
    Route("/v1/contexts", resources.list_contexts, methods=["GET"]),
    Route("/v1/contexts", resources.create_context, methods=["POST"]),
    Route("/v1/operations", resources.list_operations, methods=["GET"]),
    Route("/v1/operations/{operation}", resources.get_operation, methods=["GET"]),
    Route("/v1/operations/{operation}/cancel", resources.cancel_operation, methods=["POST"]),
    Route("/v1/files", resources.create_file, methods=["POST"]),
    Route("/v1/contexts/{context:path}/tokens", resources.context_tokens, methods=["GET"]),
    Route("/v1/contexts/{context:path}", resources.get_context, methods=["GET"]),
    Route("/v1/contexts/{context:path}", resources.update_context, methods=["PATCH"]),
    Route("/v1/contexts/{context:path}", resources.delete_context, methods=["DELETE"]),
    Route("/v1/status", resources.server_status, methods=["GET"]),
    Route("/health", resources.health, methods=["GET"]),
    Route("/live", resources.live, methods=["GET"]),
)


_DOCUMENT = replies.JsonReply(document(ROUTES)).body


async def openapi(_: Request) -> Response:
    """GET /openapi.json: all paths, as OpenAPI describes them."""
    return Response(_DOCUMENT, media_type="application/json")


ALL_ROUTES = (*ROUTES, *resources.PAGE, Route("/openapi.json", openapi, methods=["GET"]))
"""Those of the document, those of the page, and the document's own."""


def make_app(beside: GrpcDoor, bounds: Bounds, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """The application. beside: whose answers and tokens these are. cors_origins: whose pages may ask from browsers."""
    front = Front(Router(ALL_ROUTES, redirect_slashes=False), beside, bounds)
    if not cors_origins:
        return front
    return CORSMiddleware(
        front,
        allow_origins=cors_origins,
        allow_methods=_METHODS,
        allow_headers=["authorization", "content-type"],
    )


class Front:
    """Lets requests in, and turns errors into responses."""

    def __init__(self, router: Router, beside: GrpcDoor, bounds: Bounds) -> None:
        self._router = router
        self._beside = beside
        self._bounds = bounds
        self._open = 0
        self._body_bytes = 0
        self.files = 0
        """That are being taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        exchange = Exchange(scope, send, self._beside, self._hold)
        if self._beside.traces is not None and not exchange.open:
            told = {"http.request.method": exchange.method, "http.route": _route(scope)}
            exchange.begin_span(self._beside.traces, " ".join(told.values()).rstrip(), told)
        self._open += 1
        try:
            await self._serve(exchange, scope, receive)
        except asyncio.CancelledError:  # the server stops
            exchange.facts.setdefault("ended", CancelledError.reason)
            raise
        except Exception as error:
            await self._fail(exchange, error, scope, receive)
        finally:
            self._open -= 1
            exchange.end()

    def _hold(self, nbytes: int) -> None:
        if nbytes > 0 and self._body_bytes + nbytes > self._bounds.body_bytes:
            raise TooManyRequestsError(
                f"open requests have bodies of {self._body_bytes} bytes, the limit is {self._bounds.body_bytes}; try "
                "again later"
            )
        self._body_bytes += nbytes

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        if not exchange.open:
            route, method = _route(scope), "GET" if exchange.method == "HEAD" else exchange.method
            exchange.call_name = f"{method}:{route}"
            exchange.enter(self._beside.door)
            if route:  # otherwise the router says what there is
                admit(exchange.caller, exchange.call_name)
        if self._open > self._bounds.requests and not exchange.open:
            raise TooManyRequestsError(
                f"{self._open - 1} requests are open here, which is the limit; try again later"
            )
        scope["app"] = self  # for the router: errors are raised, not answered
        scope["state"] = {"exchange": exchange}
        await self._router(scope, receive, exchange.send)

    async def _fail(self, exchange: Exchange, error: Exception, scope: Scope, receive: Receive) -> None:
        if isinstance(error, HTTPException):
            message = f"{exchange.method} {exchange.path[:200]}: {error.detail}"
            headers = {"allow": _allowed(scope)} if error.status_code == _NOT_ALLOWED else None
            error = HttpError(error.status_code, message, "not_found", headers)
        if isinstance(error, RecursionError):
            error = InvalidArgumentError(
                "the body has too many objects or lists inside each other; flatten it"
            )
        public = error if isinstance(error, HttpError) else exchange.public(error, self._beside.paths)
        exchange.said = public.message
        if not exchange.begun:
            await refusal(public)(scope, receive, exchange.send)


def _route(scope: Scope) -> str:
    return next((route.path for route in ALL_ROUTES if route.matches(scope)[0] is Match.FULL), "")


def _allowed(scope: Scope) -> str:
    routes = [route for route in ROUTES if route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))
