"""From an order to its reply: the context is found, the model's name compared, the answer sent whole or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from decode_engine.errors import ShuttingDownError
from decode_engine.gateway.exchange import (
    CLIENT_GONE,
    EventStream,
    Exchange,
    HttpError,
    end_tasks,
    exchange_of,
    failure,
    read_json,
    tell,
    while_connected,
)
from decode_engine.gateway.wire.bodies import Asked, chat_order, completion_order, response_order
from decode_engine.gateway.wire.reply_structs import JsonReply
from decode_engine.gateway.wire.shapes import Answered, ChatShape, CompletionShape, ResponseShape, Shape
from decode_engine.orders.order import Order
from decode_engine.rpc.answers.answering import Said, Summary
from decode_engine.rpc.contexts.listing import find_context
from decode_engine.rpc.transport.status import reason_of
from decode_engine.rpc.transport.work import forget_error, merged
from index_store.errors import SparseKVError
from index_store.store.description.manifest import Manifest
from sparsekv.v1 import context_pb2
from sparsekv.v1.values import Usage

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


async def _answer(request: Request, read: Callable[[Any], Asked], shape_of: type[Shape]) -> Response:
    asked = await read_json(request, read)
    answering = exchange_of(request).beside.served.answering
    tokenizer, bytes_of = answering.tokenizer, answering.vocabulary.token_bytes.__getitem__
    shape = shape_of(asked, bytes_of, {*tokenizer.hidden.values(), *tokenizer.eos_ids})
    work = (_begin if asked.stream else _whole)(request, asked, shape)
    try:
        return await while_connected(request, work) or Response(status_code=CLIENT_GONE)
    except SparseKVError as error:
        asked.name_parts(error)
        raise


class _Running:
    """An answer that is read. usage: once it is known, of several prompts that with least room for its answer.

    summaries: of those answers that have ended.
    """

    def __init__(self, said: AsyncGenerator[Said, None]) -> None:
        self._said = said
        self.usage: Usage | None = None
        self.summaries: dict[int, Summary] = {}

    async def pieces(self) -> AsyncGenerator[Said, None]:
        """What is part of an answer."""
        async with aclosing(self._said):
            async for said in self._said:
                if said.usage is not None and (
                    self.usage is None or said.usage.max_tokens < self.usage.max_tokens
                ):
                    self.usage = said.usage
                if said.summary is not None:
                    self.summaries[said.answer] = said.summary
                if said.token_ids or said.text or said.calls:
                    yield said

    def tell_cap(self, request: Request, asked: Asked) -> None:
        """Tells how many tokens there may be where that is fewer than were asked for."""
        most, usage = asked.order.max_tokens, self.usage
        if most is not None and usage is not None and 0 < usage.max_tokens < most:
            tell(request, "max-tokens", (str(usage.max_tokens),))

    @property
    def ended(self) -> list[Summary]:
        return [self.summaries[index] for index in sorted(self.summaries)]


async def _run(request: Request, asked: Asked) -> _Running:
    """Raises ContextNotFoundError, InvalidArgumentError, HttpError for another model's name."""
    exchange = exchange_of(request)
    answering = exchange.beside.served.answering
    order = await _find(request, asked)
    tell(request, "taken", asked.check_hints(answering.tokenizer.template_reads))
    if asked.others:
        return _Running(
            _several([order, *(replace(other, context=order.context) for other in asked.others)], exchange)
        )
    return _Running(answering.answer(order, exchange, exchange.note))


async def _several(orders: Sequence[Order], exchange: Exchange) -> AsyncGenerator[Said, None]:
    """Answers to several prompts as to one, numbered prompt by prompt. The first error ends all."""
    answering, each = exchange.beside.served.answering, orders[0].answers
    sources = [partial(answering.answer, order, exchange) for order in orders]
    exchange.note(context=orders[0].context, prompts=len(orders))
    async with aclosing(merged(sources, max(1, answering.facts.max_sessions // each))) as told:
        async for number, said in told:
            if isinstance(said, Exception):
                raise said
            said.answer += number * each
            yield said


async def _find(request: Request, asked: Asked) -> Order:
    """The order with its context's id. Raises as `_run` does."""
    exchange, order = exchange_of(request), asked.order
    answering = exchange.beside.served.answering
    served = answering.facts.identity
    what, model = "this server", served.name
    if order.context:
        named = context_pb2.GetContextRequest(reference=order.context)
        store = answering.store.seen_by(exchange.caller)
        entry = await exchange.run(partial(find_context, store, named, served.fingerprint))
        what = f"context {order.context[:100]!r}"
        model = entry.model.name if isinstance(entry, Manifest) else asked.model
        order = replace(order, context=entry.id)
    if asked.model != model:
        advice = (
            "name that"
            if served.name == model
            else f"this server serves {served.name!r}: serve {model!r} for this context, or make it again with "
            f"{served.name!r}"
        )
        raise HttpError(
            404,
            f"model is {asked.model[:100]!r}, but the one of {what} is {model!r}; {advice}",
            "model_not_found",
        )
    return order


async def _whole(request: Request, asked: Asked, shape: Shape) -> Response:
    running = await _run(request, asked)
    answers = [Answered() for _ in range(asked.answers)]
    async with aclosing(running.pieces()) as pieces:
        async for said in pieces:
            answers[said.answer].add(said)
    running.tell_cap(request, asked)
    return JsonReply(shape.whole(answers, running.ended))


async def _begin(request: Request, asked: Asked, shape: Shape) -> Response:
    """A stream, whose first piece has come or is late: whoever is refused at once gets a status and no stream."""
    exchange = exchange_of(request)
    running = await _run(request, asked)
    pieces = running.pieces()
    first = asyncio.ensure_future(anext(pieces, None))
    first.add_done_callback(forget_error)

    async def release() -> None:
        await end_tasks(first)
        await pieces.aclose()

    def fail(error: Exception) -> bytes:
        if isinstance(error, SparseKVError):
            asked.name_parts(error)
        public = exchange.public(error, exchange.beside.paths)
        exchange.note(ended=reason_of(public), error=public.message)
        return shape.fail(failure(public)[1])

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            said = await first
            yield shape.begin()  # not before: clients take it for the first token, and measure when it came
            while said is not None:
                yield shape.piece(said)
                said = await anext(pieces, None)
            yield shape.end(running.ended)
        except Exception as error:
            yield fail(error)

    def last_words() -> bytes:
        return fail(ShuttingDownError("the server shut down before this request finished"))

    try:
        await asyncio.wait({first}, timeout=_FIRST_S)
        if first.done():
            first.result()
        running.tell_cap(request, asked)
        return EventStream(events(), release, last_words)
    except BaseException:
        await release()
        raise
