"""A page for browsers at `/`, and what it asks beside the API: tokens of a context, and what the server does.

The files hold nothing of the server's and need no token; what the page asks by them does.
"""

from __future__ import annotations

import codecs
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_engine.gateway.exchange import ask, exchange_of
from decode_engine.gateway.listing import known_query
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.rpc.client import verbs
from decode_engine.rpc.prompts.stored_messages import StoredMessages
from index_store.errors import InvalidArgumentError

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
            "method_choices": status.choices,
        }
    )


async def context_tokens(request: Request) -> Response:
    """GET /v1/contexts/{context}/tokens: the texts of some of a context's tokens; joined they are the text."""
    known_query(request, "start", "count")
    given = {
        name: request.query_params.get(name, usual) for name, usual in (("start", "0"), ("count", "2048"))
    }
    for name, most in (("start", 2**31 - 1), ("count", MOST_TOKENS)):
        text = given[name]
        if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) <= most):
            raise InvalidArgumentError(
                f"{name} is {text[:100]!r}, expected an integer of 0 to {most}", field=name
            )
    exchange = exchange_of(request)
    answering = exchange.beside.served.answering
    found = await ask(request, verbs.find_context(request.path_params["context"]))
    start, count = int(given["start"]), int(given["count"])

    def read() -> tuple[int, list[str]]:
        manifest = answering.store.manifest(found.name.removeprefix("contexts/"))
        ids = StoredMessages(answering.store, manifest).tokens()
        decoder, bytes_of = codecs.getincrementaldecoder("utf-8")("replace"), answering.vocabulary.token_bytes
        return len(ids), [decoder.decode(bytes_of[token]) for token in ids[start : start + count]]

    total, texts = await answering.long(exchange, partial(answering.store.bounded, read))
    return JsonReply({"object": "tokens", "start": start, "total": total, "texts": texts})
