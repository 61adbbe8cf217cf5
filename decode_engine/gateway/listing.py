"""What there is to ask: contexts and models, and whether anybody answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from decode_engine.gateway.exchange import ask, exchange_of, read_given
from decode_engine.gateway.failures import HttpError
from decode_engine.gateway.wire.parameters import LABELS, TTL, Endpoint, Parameter
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.orders.kinds import FLAG, TEXT
from decode_engine.rpc.client import NEVER, ContextChanges, ContextInfo, Never, verbs
from index_store.errors import InvalidArgumentError

_MOST_ON_A_PAGE = 1000

EXPIRY = (
    Parameter("expire_time", TEXT, "When it expires, as 2030-01-31T12:00:00Z, or `never`."),
    Parameter("ttl_seconds", TTL, "The same as seconds from now; one of both."),
)

UPDATE = Endpoint(
    "/v1/contexts/{context}",
    (
        Parameter("display_name", TEXT, "What people call the context."),
        Parameter("move_name", FLAG, "Take `display_name` from the context that has it, which keeps its id."),
        *EXPIRY,
        Parameter("labels", LABELS, "Labels to set; null takes one away. Others stay."),
        Parameter("pinned", FLAG, "Whether it is kept from expiring and from being removed."),
    ),
)


async def health(request: Request) -> Response:
    """GET /health: whether the server takes requests, and what it does while it starts. Needs no token."""
    found = exchange_of(request).beside.listener.health
    if found.serving:
        return JsonReply({"status": "ok"})
    starting = {"status": "starting", "phase": found.phase}
    return JsonReply(starting if found.phase else {"status": "unavailable"}, status_code=503)


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
    """GET /v1/contexts: a page, newest first unless `order_by` says otherwise."""
    known_query(request, "page_size", "page_token", "filter", "order_by")
    size = request.query_params.get("page_size", "0")
    if not (size.isascii() and size.isdigit() and len(size) < 10 and int(size) <= _MOST_ON_A_PAGE):
        raise InvalidArgumentError(
            f"page_size is {size[:100]!r}, expected an integer of 0 to {_MOST_ON_A_PAGE}", field="page_size"
        )
    given = (request.query_params.get(name, "") for name in ("page_token", "filter", "order_by"))
    page = await ask(request, verbs.list_contexts(int(size), *given))
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
    others = {name: value for name, value in given.items() if name not in ("expire_time", "ttl_seconds")}
    changes = cast(ContextChanges, {**others, "expire_time": expiry_of(given)})
    context = await _find(request)
    return JsonReply(context_object(await ask(request, verbs.update_context(context.name, changes))))


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
    await ask(request, verbs.delete_context(context.name, False, force == "true"))
    return JsonReply({"id": _id(context), "object": "context", "deleted": True})


async def _find(request: Request) -> ContextInfo:
    return await ask(request, verbs.find_context(request.path_params["context"]))


def context_object(context: ContextInfo) -> dict[str, Any]:
    """A context as JSON: the fields of the API's message, times as ISO 8601."""
    fields = asdict(context)
    times = {name: value.isoformat() for name, value in fields.items() if isinstance(value, datetime)}
    return {"id": _id(context), "object": "context", **fields, **times}


def _id(context: ContextInfo) -> str:
    return context.name.removeprefix("contexts/")


def known_query(request: Request, *names: str) -> None:
    """Raises InvalidArgumentError for a parameter of the address that is none of these."""
    for name in request.query_params:
        if name not in names:
            raise InvalidArgumentError(
                f"{name[:100]!r} is no parameter of {request.url.path[:100]}; docs/api.md lists them",
                field=name[:100],
            )
