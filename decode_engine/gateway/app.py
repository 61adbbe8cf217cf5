"""The paths, and what stands before all of them: tokens, bounds, errors in one shape, a line in the log."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_engine.errors import CancelledError, TooManyRequestsError
from decode_engine.gateway import counting, creating, generating, listing
from decode_engine.gateway.behind import Behind
from decode_engine.gateway.bounds import Bounds
from decode_engine.gateway.exchange import HeldBodies
from decode_engine.gateway.failures import HttpError, refusal, unexpected
from decode_engine.gateway.openapi import document
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.rpc.door.rules import Door
from decode_engine.rpc.transport.calls import fact_text
from index_store.errors import InvalidArgumentError, SparseKVError

logger = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/health"})
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
    Route("/v1/contexts/{context:path}", listing.get_context, methods=["GET"]),
    Route("/v1/contexts/{context:path}", listing.update_context, methods=["PATCH"]),
    Route("/v1/contexts/{context:path}", listing.delete_context, methods=["DELETE"]),
    Route("/health", listing.health, methods=["GET"]),
)


_DOCUMENT = JsonReply(document(ROUTES)).body


async def openapi(_: Request) -> Response:
    """GET /openapi.json: all paths, as OpenAPI describes them."""
    return Response(_DOCUMENT, media_type="application/json")


def make_app(behind: Behind, door: Door, bounds: Bounds, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """The application. behind: what answers. cors_origins: whose pages may ask from browsers."""
    front = Front(
        Router((*ROUTES, Route("/openapi.json", openapi, methods=["GET"])), redirect_slashes=False),
        behind,
        door,
        bounds,
    )
    if not cors_origins:
        return front
    return CORSMiddleware(
        front,
        allow_origins=cors_origins,
        allow_methods=_METHODS,
        allow_headers=["authorization", "content-type"],
    )


class Front:
    """Lets requests in, tells the server who asks, and turns errors into responses."""

    def __init__(self, router: Router, behind: Behind, door: Door, bounds: Bounds) -> None:
        self._router = router
        self._behind = behind
        self._door = door
        self._bounds = bounds
        self._open = 0
        self._bodies = HeldBodies(bounds.body_bytes)
        self.files = 0
        """That are being taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        exchange = _Exchange(scope, send)
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
            self._bodies.remove(exchange.body_bytes)
            exchange.log()

    async def _serve(self, exchange: _Exchange, scope: Scope, receive: Receive) -> None:
        if exchange.path not in _OPEN_PATHS:
            exchange.caller = self._door.check(exchange.authorization, exchange.host)
        if self._open > self._bounds.requests and exchange.path not in _OPEN_PATHS:
            raise TooManyRequestsError(
                f"{self._open - 1} requests are open here, which is the limit; try again later"
            )
        scope["app"] = self  # for the router: errors are raised, not answered

        def hold(nbytes: int) -> None:
            self._bodies.add(nbytes)
            exchange.body_bytes += nbytes

        scope["state"] = {
            "behind": self._behind.showing(exchange.metadata()),
            "hold": hold,
            "note": exchange.facts.update,
            "told": exchange.told,
        }
        await self._router(scope, receive, exchange.send)

    async def _fail(self, exchange: _Exchange, error: Exception, scope: Scope, receive: Receive) -> None:
        if isinstance(error, HTTPException):
            message = f"{exchange.method} {exchange.path[:200]}: {error.detail}"
            headers = {"allow": _allowed(scope)} if error.status_code == _NOT_ALLOWED else None
            error = HttpError(error.status_code, message, "not_found", headers)
        if isinstance(error, RecursionError):
            error = InvalidArgumentError(
                "the body has too many objects or lists inside each other; flatten it"
            )
        if not isinstance(error, SparseKVError | HttpError):
            logger.error("request %s failed", exchange.id, exc_info=error, extra={"request_id": exchange.id})
            error = unexpected(exchange.id)
        exchange.said = error.message
        if not exchange.begun:
            await refusal(error)(scope, receive, exchange.send)


def _allowed(scope: Scope) -> str:
    """The methods of a path, of all routes that it has."""
    routes = [route for route in ROUTES if route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


class _Exchange:
    """What is known of one request and its response."""

    def __init__(self, scope: Scope, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.id = secrets.token_hex(8)
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.authorization = headers.get("authorization")
        self.host: str
        self._port: int
        self.host, self._port = scope["client"] or ("", 0)
        self.caller = ""
        self.said = ""
        self.begun = False
        self.facts: dict[str, object] = {"peer": f"{self.host}:{self._port}"}
        """What its log line says. ended: why a response that had begun did not come to its end."""
        self.told: dict[str, str] = {}
        """Further headers of the response."""
        self.body_bytes = 0
        self._status = 0
        self._send = send
        self._started = time.monotonic()

    async def send(self, message: Message) -> None:
        """Passes a part of the response on."""
        if message["type"] == "http.response.start":
            self.begun = True
            self._status = message["status"]
            told = {"x-request-id": self.id, **self.told}
            headers = ((name.encode(), value.encode()) for name, value in told.items())
            message["headers"] = [*message["headers"], *headers]
        await self._send(message)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the server is shown: for whom the gateway asks, and the token of who asks."""
        kind, host = ("ipv6", f"[{self.host}]") if ":" in self.host else ("ipv4", self.host)
        shown = (("sparsekv-forwarded-for", f"{kind}:{host}:{self._port}"),)
        token = self.authorization
        if token is None or not (token.isascii() and token.isprintable()):
            return shown
        return (*shown, ("authorization", token))

    def log(self) -> None:
        """One line about what became of it; none of a health check."""
        spent = (time.monotonic() - self._started) * 1000
        if self.caller:
            self.facts["caller"] = self.caller
        logger.log(
            logging.DEBUG if self.path in _OPEN_PATHS else logging.INFO,
            "%s %s %d in %.1f ms %s%s",
            self.method,
            ascii(self.path[:200])[1:-1],
            self._status,
            spent,
            " ".join(f"{name}={_one_line(fact_text(value))}" for name, value in self.facts.items()),
            f": {_one_line(self.said)}" if self.said else "",
            extra={"request_id": self.id, "milliseconds": round(spent, 3), **self.facts},
        )


def _one_line(text: str) -> str:
    """What a client may have written, without what begins a line of its own."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
