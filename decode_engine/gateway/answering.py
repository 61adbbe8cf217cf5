"""From an order to its reply: the context is found, the model's name compared, the answer sent whole or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from decode_engine.errors import ShuttingDownError
from decode_engine.gateway.exchange import CLIENT_GONE, EventStream, read_json, tell, while_connected
from decode_engine.gateway.failures import HttpError, failure
from decode_engine.gateway.wire.bodies import Order, chat_order, completion_order, response_order
from decode_engine.gateway.wire.response_shape import ResponseShape
from decode_engine.gateway.wire.shapes import Answered, ChatShape, CompletionShape, Shape
from decode_engine.rpc.client import AsyncClient, AsyncGeneration, Piece, Summary, calls_of
from decode_engine.rpc.transport.stalled import forget_error
from decode_engine.rpc.transport.status import reason_of
from index_store.errors import SparseKVError

Note = Callable[[Mapping[str, object]], None]
"""Adds facts to the log line of a request."""

_FIRST_S = 10.0
"""How long a stream may be without a first piece before it is begun nevertheless; errors until then have a status."""


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _answer(request, chat_order, ChatShape)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await _answer(request, completion_order, CompletionShape)


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    return await _answer(request, response_order, ResponseShape)


async def _answer(
    request: Request, read: Callable[[Any], Order], shape_of: Callable[[Order], Shape]
) -> Response:
    order = read(await read_json(request))
    work = (_begin if order.stream else _whole)(request, order, shape_of(order))
    try:
        return await while_connected(request, work) or Response(status_code=CLIENT_GONE)
    except SparseKVError as error:
        order.name_parts(error)
        raise


async def _generate(request: Request, order: Order) -> AsyncGeneration:
    """Raises ContextNotFoundError, InvalidArgumentError, HttpError for another model's name."""
    client: AsyncClient = request.state.client
    status = await client.server_status()
    tell(request, "taken", order.check_hints(status.template_reads))
    name, what, model = "", "this server", status.model
    if order.context:
        context = await client.find_context(order.context)
        name, model, what = context.name, context.model, f"context {order.context[:100]!r}"
    if model and order.model != model:
        served = (await client.server_status()).model
        advice = (
            "name that"
            if served in (model, "")
            else f"this server serves {served!r}: serve {model!r} for this context, or make it again with {served!r}"
        )
        raise HttpError(
            404,
            f"model is {order.model[:100]!r}, but the one of {what} is {model!r}; {advice}",
            "model_not_found",
        )
    return client.generate(name, **order.options)


def _facts(order: Order, summaries: Sequence[Summary]) -> dict[str, object]:
    """What the log says of an answer, of several what is theirs together."""
    first = summaries[0]
    named = {"context": order.context} if order.context else {}
    return {
        **named,
        "method": first.method,
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "generated_tokens": sum(summary.completion_tokens for summary in summaries),
        "queue_ms": first.timings.queue_ns / 1e6,
        "first_token_ms": first.timings.first_token_ns / 1e6,
    }


def _tell_cap(request: Request, order: Order, generation: AsyncGeneration) -> None:
    """Tells how many tokens there may be where that is fewer than were asked for."""
    asked, usage = order.options.get("max_tokens"), generation.usage
    if asked is not None and usage is not None and 0 < usage.max_tokens < asked:
        tell(request, "max-tokens", (str(usage.max_tokens),))


async def _whole(request: Request, order: Order, shape: Shape) -> Response:
    async with await _generate(request, order) as generation:
        note: Note = request.state.note
        pieces = [piece async for piece in generation]
        note(_facts(order, generation.summaries))
        answers = [
            Answered(
                text="".join(piece.text for piece in pieces if piece.index == index),
                logprobs=tuple(told for piece in pieces if piece.index == index for told in piece.logprobs),
                summary=summary,
                calls=calls_of(piece for piece in pieces if piece.index == index),
            )
            for index, summary in enumerate(generation.summaries)
        ]
        _tell_cap(request, order, generation)
        return JSONResponse(shape.whole(answers))


async def _begin(request: Request, order: Order, shape: Shape) -> Response:
    """A stream, whose first piece has come or is late: whoever is refused at once gets a status and no stream."""
    note: Note = request.state.note
    generation = await _generate(request, order)
    pieces = aiter(generation)
    first = asyncio.ensure_future(anext(pieces, None))
    first.add_done_callback(forget_error)

    def release() -> None:
        first.cancel()
        generation.cancel()

    def fail(error: SparseKVError) -> Iterable[str]:
        order.name_parts(error)
        note({"ended": reason_of(error), "error": error.message})
        return shape.fail(failure(error)[1])

    def last_words() -> Iterable[str]:
        return fail(ShuttingDownError("the gateway shut down before this request finished"))

    try:
        await asyncio.wait({first}, timeout=_FIRST_S)
        if first.done():
            first.result()
        _tell_cap(request, order, generation)
        return EventStream(_events(generation, pieces, first, shape, fail, note), release, last_words)
    except BaseException:
        release()
        raise


async def _events(
    generation: AsyncGeneration,
    pieces: AsyncIterator[Piece],
    first: asyncio.Future[Piece | None],
    shape: Shape,
    fail: Callable[[SparseKVError], Iterable[str]],
    note: Note,
) -> AsyncGenerator[str, None]:
    try:
        for text in shape.begin():
            yield text
        piece = await first
        while piece is not None:
            for text in shape.piece(piece):
                yield text
            piece = await anext(pieces, None)
        note(_facts(shape.order, generation.summaries))
        for text in shape.end(generation.summaries):
            yield text
    except SparseKVError as error:
        for text in fail(error):
            yield text
