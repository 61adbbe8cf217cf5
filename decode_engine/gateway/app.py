"""The paths, and what stands before all of them: tokens, bounds, errors in one shape, a line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from decode_engine.errors import CancelledError, TooManyRequestsError
from decode_engine.gateway import counting, creating, generating, listing, page
from decode_engine.gateway.bounds import Bounds
from decode_engine.gateway.exchange import Exchange, HeldBodies
from decode_engine.gateway.failures import HttpError, refusal
from decode_engine.gateway.openapi import document
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.rpc.server import GrpcDoor
from index_store.errors import InvalidArgumentError

_NOT_ALLOWED = 405
_METHODS = ("GET", "POST", "PATCH", "DELETE")

ROUTES = (
    Route("/v1/chat/completions", generating.chat, methods=["POST"]),
    Route("/v1/completions", generating.completions, methods=["POST"]),
    Route("/v1/responses", generating.responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", counting.count_input, methods=["POST"]),
    Route("/tokenize", counting.tokenize, methods=["POST"]),
    Route("/detokenize", counting.detokenize, methods=["POST"]),
    Route("/v1/models", listing.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", listing.get_model, methods=["GET"]),
    Route("/v1/contexts", listing.list_contexts, methods=["GET"]),
    Route("/v1/contexts", creating.create_context, methods=["POST"]),
    Route("/v1/operations", creating.list_operations, methods=["GET"]),
    Route("/v1/operations/{operation}", creating.get_operation, methods=["GET"]),
    Route("/v1/operations/{operation}/cancel", creating.cancel_operation, methods=["POST"]),
    Route("/v1/files", creating.create_file, methods=["POST"]),
    Route("/v1/contexts/{context:path}/tokens", page.context_tokens, methods=["GET"]),
    Route("/v1/contexts/{context:path}", listing.get_context, methods=["GET"]),
    Route("/v1/contexts/{context:path}", listing.update_context, methods=["PATCH"]),
    Route("/v1/contexts/{context:path}", listing.delete_context, methods=["DELETE"]),
    Route("/v1/status", page.server_status, methods=["GET"]),
    Route("/health", listing.health, methods=["GET"]),
)


_DOCUMENT = JsonReply(document(ROUTES)).body


async def openapi(_: Request) -> Response:
    """GET /openapi.json: all paths, as OpenAPI describes them."""
    return Response(_DOCUMENT, media_type="application/json")


def make_app(beside: GrpcDoor, bounds: Bounds, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """The application. beside: whose answers and tokens these are. cors_origins: whose pages may ask from browsers."""
    routes = (*ROUTES, *page.PAGE, Route("/openapi.json", openapi, methods=["GET"]))
    front = Front(Router(routes, redirect_slashes=False), beside, bounds)
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
        self._bodies = HeldBodies(bounds.body_bytes)
        self.files = 0
        """That are being taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        exchange = Exchange(scope, send, self._beside, self._bodies)
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

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        if not exchange.open:
            exchange.enter(self._beside.door)
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
    """The path as `ROUTES` has it; "" where there is none."""
    return next((route.path for route in ROUTES if route.matches(scope)[0] is Match.FULL), "")


def _allowed(scope: Scope) -> str:
    """The methods of a path, of all routes that it has."""
    routes = [route for route in ROUTES if route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))
