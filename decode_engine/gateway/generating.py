"""From an order to its reply: the context is found, the model's name compared, the answer sent whole or in pieces."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from decode_engine.errors import ShuttingDownError
from decode_engine.gateway.behind import Behind
from decode_engine.gateway.exchange import CLIENT_GONE, EventStream, read_json, tell, while_connected
from decode_engine.gateway.failures import HttpError, failure
from decode_engine.gateway.wire.bodies import Asked, chat_order, completion_order, response_order
from decode_engine.gateway.wire.response_shape import ResponseShape
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.gateway.wire.shapes import Answered, ChatShape, CompletionShape, Shape
from decode_engine.rpc.client import AsyncGeneration, Piece, Summary, calls_of
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
    request: Request, read: Callable[[Any], Asked], shape_of: Callable[[Asked], Shape]
) -> Response:
    asked = read(await read_json(request))
    work = (_begin if asked.stream else _whole)(request, asked, shape_of(asked))
    try:
        return await while_connected(request, work) or Response(status_code=CLIENT_GONE)
    except SparseKVError as error:
        asked.name_parts(error)
        raise


async def _generate(request: Request, asked: Asked) -> AsyncGeneration:
    """Raises ContextNotFoundError, InvalidArgumentError, HttpError for another model's name."""
    behind: Behind = request.state.behind
    order, facts = asked.order, await behind.facts()
    what, model = "this server", facts.model
    if order.context:
        order, model = await behind.find(order)
        what = f"context {asked.order.context[:100]!r}"
    if model and asked.model != model:
        served = (facts := await behind.facts_anew()).model
        if not order.context:
            model = served
        if asked.model != model:
            advice = (
                "name that"
                if served in (model, "")
                else f"this server serves {served!r}: serve {model!r} for this context, or make it again with "
                f"{served!r}"
            )
            raise HttpError(
                404,
                f"model is {asked.model[:100]!r}, but the one of {what} is {model!r}; {advice}",
                "model_not_found",
            )
    tell(request, "taken", asked.check_hints(facts.template_reads))
    return behind.answer(order)


def _facts(asked: Asked, summaries: Sequence[Summary]) -> dict[str, object]:
    """What the log says of an answer, of several what is theirs together."""
    first = summaries[0]
    named = {"context": asked.order.context} if asked.order.context else {}
    return {
        **named,
        "method": first.method,
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
        "generated_tokens": sum(summary.completion_tokens for summary in summaries),
        "queue_ms": first.timings.queue_ns / 1e6,
        "first_token_ms": first.timings.first_token_ns / 1e6,
    }


def _tell_cap(request: Request, asked: Asked, generation: AsyncGeneration) -> None:
    """Tells how many tokens there may be where that is fewer than were asked for."""
    most, usage = asked.order.max_tokens, generation.usage
    if most is not None and usage is not None and 0 < usage.max_tokens < most:
        tell(request, "max-tokens", (str(usage.max_tokens),))


async def _whole(request: Request, asked: Asked, shape: Shape) -> Response:
    async with await _generate(request, asked) as generation:
        note: Note = request.state.note
        pieces: dict[int, list[Piece]] = defaultdict(list)
        async for piece in generation:
            pieces[piece.index].append(piece)
        note(_facts(asked, generation.summaries))
        answers = [
            Answered(
                text="".join(piece.text for piece in pieces[index]),
                logprobs=tuple(told for piece in pieces[index] for told in piece.logprobs),
                summary=summary,
                calls=calls_of(pieces[index]),
            )
            for index, summary in enumerate(generation.summaries)
        ]
        _tell_cap(request, asked, generation)
        return JsonReply(shape.whole(answers))


async def _begin(request: Request, asked: Asked, shape: Shape) -> Response:
    """A stream, whose first piece has come or is late: whoever is refused at once gets a status and no stream."""
    note: Note = request.state.note
    generation = await _generate(request, asked)
    pieces = aiter(generation)
    first = asyncio.ensure_future(anext(pieces, None))
    first.add_done_callback(forget_error)

    def release() -> None:
        first.cancel()
        generation.cancel()

    def fail(error: SparseKVError) -> bytes:
        asked.name_parts(error)
        note({"ended": reason_of(error), "error": error.message})
        return shape.fail(failure(error)[1])

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield shape.begin()
            piece = await first
            if piece is not None:
                yield shape.piece(piece)
            async for piece in pieces:
                yield shape.piece(piece)
            note(_facts(asked, generation.summaries))
            yield shape.end(generation.summaries)
        except SparseKVError as error:
            yield fail(error)

    def last_words() -> bytes:
        return fail(ShuttingDownError("the gateway shut down before this request finished"))

    try:
        await asyncio.wait({first}, timeout=_FIRST_S)
        if first.done():
            first.result()
        _tell_cap(request, asked, generation)
        return EventStream(events(), release, last_words)
    except BaseException:
        release()
        raise
