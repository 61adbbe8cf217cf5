"""The service of generation: requests as checked orders, and thin handlers between messages and a door's answers.

Handlers run on the listener's thread and never block it: what reads files goes through `Asker.run`, what waits for
memory through `Asker.run_alone`. Errors are left to the gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from decode_engine.errors import TooManyRequestsError
from decode_engine.orders.fields import FIELDS, split
from decode_engine.orders.order import (
    CallMode,
    Constraint,
    KeepOptions,
    Order,
    ToolChoice,
    check_order,
    constraint_of,
    stop_tokens,
)
from decode_engine.rpc.answers.answering import Answering, Note
from decode_engine.rpc.answers.prompting import check_tokens, conversation_tokens, parse_messages
from decode_engine.rpc.contexts.listing import parse_name
from decode_engine.rpc.describe import describe_methods, describe_status, describe_tenancy, said_message
from decode_engine.rpc.door.access import Sharing
from decode_engine.rpc.transport.asker import Asker
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.status import Paths, to_status
from decode_engine.rpc.transport.work import Bound, merged
from decode_engine.settings.request_bounds import LONGEST_WAIT_S, MAX_BATCH
from index_store.errors import InvalidArgumentError, QuotaExceededError
from index_store.models.conversation.messages import MAX_MESSAGES, Message, Role, refused
from index_store.models.tokenizer import Tokenizer
from sparsekv.v1 import conversation_pb2, generation_pb2_grpc
from sparsekv.v1 import generation_pb2 as pb

_FIELDS = tuple(
    (field, descriptor)
    for field in FIELDS
    if (descriptor := pb.GenerateRequest.DESCRIPTOR.fields_by_name.get(field.name)) is not None
)


def parse_order(request: pb.GenerateRequest) -> Order:
    """Checks all that can be checked without the context. Raises InvalidArgumentError and names the field."""
    order = Order(
        context=parse_name(request.context, "context") if request.context else "",
        **_prompt(request),
        **split(
            {
                field.name: value
                for field, descriptor in _FIELDS
                if (value := _value(request, field.zero, descriptor)) is not None
            }
        ),
        constraint=_constraint(request) if request.HasField("constraint") else None,
        choice=_tool_choice(request),
        keep=_keep(request) if request.HasField("keep") else None,
    )
    check_order(order)
    return order


def _value(request: pb.GenerateRequest, zero: bool, descriptor: Any) -> Any:
    """A field's value as an order has it; None where it says nothing."""
    name = descriptor.name
    if descriptor.has_presence:
        return getattr(request, name) if request.HasField(name) else None
    value = getattr(request, name)
    if descriptor.message_type is not None:  # a map
        return dict(value) or None
    if descriptor.is_repeated:
        return (tuple if descriptor.type == descriptor.TYPE_STRING else stop_tokens)(value) or None
    return None if zero and not value else value


def _prompt(request: pb.GenerateRequest) -> dict[str, Any]:
    given = request.WhichOneof("prompt")
    if given is None:
        raise InvalidArgumentError(
            "the prompt is missing, expected one of text, token_ids, question, messages", field="prompt"
        )
    if given == "messages":
        count = len(request.messages.messages)
        if not 1 <= count <= MAX_MESSAGES:
            raise refused("messages", f"{count} messages", f"1 to {MAX_MESSAGES}")
        turns, tools = parse_messages(request.messages)
        return {"turns": turns, "tools": tools}
    content: Any = request.token_ids.ids if given == "token_ids" else getattr(request, given)
    if given == "question":
        if not content.strip():
            raise InvalidArgumentError("the question is blank, expected words", field=given)
        return {"turns": (Message(Role.USER, content),)}
    # Token ids are not copied: there may be millions, which the model has no positions for.
    return {"text" if given == "text" else "prompt": content}


def _constraint(request: pb.GenerateRequest) -> Constraint:
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError(
            "constraint is empty, expected one of json_schema, regex, choices", field="constraint"
        )
    said = request.constraint.choices.texts if kind == "choices" else getattr(request.constraint, kind)
    return constraint_of(kind, said if kind != "choices" else list(said))


def _tool_choice(request: pb.GenerateRequest) -> ToolChoice:
    choice, modes = request.tool_choice, conversation_pb2.ToolChoice.Mode
    if choice.mode not in modes.values():
        raise refused("tool_choice.mode", str(choice.mode), "one of NONE, AUTO, REQUIRED")
    if choice.mode == conversation_pb2.ToolChoice.MODE_UNSPECIFIED:
        mode = "auto" if request.messages.tools else "none"
    else:
        mode = modes.Name(choice.mode).lower()
    if choice.name and mode != "required":
        raise refused(
            "tool_choice.name", ascii(choice.name[:60]), "the name of a tool, and the mode REQUIRED"
        )
    names = (choice.name,) if choice.name else ()
    return ToolChoice(cast(CallMode, mode), names, choice.single or bool(names))


def _keep(request: pb.GenerateRequest) -> KeepOptions:
    keep = request.keep
    return KeepOptions(
        name=keep.display_name,
        ttl_s=keep.ttl.seconds if keep.HasField("ttl") else None,
        prompt_only=keep.prompt_only,
        turns=request.WhichOneof("prompt") in ("question", "messages"),
        moves=keep.move_name,
    )


def parse_batch(request: pb.BatchGenerateRequest) -> str:
    """The id of a batch's context; "" where it names none. Raises InvalidArgumentError also for too many requests."""
    count = len(request.requests)
    if not 1 <= count <= MAX_BATCH:
        raise InvalidArgumentError(
            f"requests has {count} elements, expected 1 to {MAX_BATCH}", field="requests"
        )
    return parse_name(request.context, "context") if request.context else ""


def content_tokens(request: pb.TokenizeRequest | pb.CountTokensRequest, tokenizer: Tokenizer) -> list[int]:
    """The tokens of what a request is about. Raises InvalidArgumentError where there is nothing."""
    content = request.WhichOneof("content")
    if content is None:
        raise InvalidArgumentError("the content is missing, expected text or messages", field="content")
    if content == "text":
        return tokenizer.encode(request.text)
    return conversation_tokens(*parse_messages(request.messages), tokenizer)


_MAX_BATCHES = 64
"""Calls of BatchGenerate at once: each holds its requests until they are answered."""
_AGAIN_S = 1.0


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Decodes against stored contexts."""

    def __init__(
        self, answering: Answering, paths: Paths, sharing: Sharing, drain: Callable[[float | None], None]
    ) -> None:
        """paths: what no client is told. drain: has the server drain, for so many seconds at most."""
        self._drain = drain
        self._answering = answering
        self._paths = paths
        self._batching = Bound(_MAX_BATCHES, "batches are being answered", sharing)

    async def ListMethods(self, request: pb.ListMethodsRequest, call: Asker) -> pb.ListMethodsResponse:
        facts = self._answering.facts
        return describe_methods(facts.identity.head_dim, facts.kv_dtype)

    async def GetServerStatus(self, request: pb.GetServerStatusRequest, call: Call) -> pb.ServerStatus:
        answering = self._answering
        reads, status = answering.tokenizer.template_reads, await answering.core.status()
        return describe_status(answering.facts.identity, reads, status, call.traffic())

    async def ListTenants(self, request: pb.ListTenantsRequest, call: Asker) -> pb.ListTenantsResponse:
        return describe_tenancy(await self._answering.core.tenancy(), call.caller)

    async def Drain(self, request: pb.DrainRequest, call: Asker) -> pb.DrainResponse:
        limit_s = request.limit.ToTimedelta().total_seconds() if request.HasField("limit") else None
        if limit_s is not None and not 0 <= limit_s <= LONGEST_WAIT_S:
            raise InvalidArgumentError(
                f"limit is {limit_s:g} s, expected 0 to {LONGEST_WAIT_S}", field="limit"
            )
        self._drain(limit_s)
        return pb.DrainResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, call: Asker) -> pb.TokenizeResponse:
        tokenizer, vocabulary = self._answering.tokenizer, self._answering.vocabulary

        def cut() -> pb.TokenizeResponse:
            ids, token_bytes = content_tokens(request, tokenizer), vocabulary.token_bytes
            return pb.TokenizeResponse(ids=ids, texts=[token_bytes[token] for token in ids])

        return await self._answering.long(call, cut)

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Asker) -> pb.DetokenizeResponse:
        check_tokens("ids", request.ids, self._answering.facts.identity)
        decode = partial(self._answering.tokenizer.decode, request.ids)
        return pb.DetokenizeResponse(text=await self._answering.long(call, decode))

    async def CountTokens(self, request: pb.CountTokensRequest, call: Asker) -> pb.CountTokensResponse:
        tokenizer = self._answering.tokenizer
        counted = await self._answering.long(call, lambda: len(content_tokens(request, tokenizer)))
        return pb.CountTokensResponse(tokens=counted)

    async def Generate(self, request: pb.GenerateRequest, call: Asker) -> AsyncIterator[pb.GenerateResponse]:
        async with aclosing(self._answer(request, call, call.note)) as messages:
            async for message in messages:
                yield message

    async def _answer(
        self, request: pb.GenerateRequest, call: Asker, note: Note
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of one request. note: is told what happened to it."""
        answering, order = self._answering, parse_order(request)
        async with aclosing(answering.answer(order, call, note)) as answer:
            async for said in answer:
                if said.prompt_logprobs:  # there may be thousands
                    bytes_of = answering.vocabulary.token_bytes
                    yield await call.run_alone(partial(said_message, said, bytes_of))
                else:
                    bytes_of = answering.vocabulary.token_bytes if said.logprobs else ()
                    yield said_message(said, bytes_of)

    async def BatchGenerate(
        self, request: pb.BatchGenerateRequest, call: Asker
    ) -> AsyncIterator[pb.BatchGenerateResponse]:
        call.note(context=parse_batch(request), requests=len(request.requests))
        sources = [partial(self._answer_in_turn, request.context, each, call) for each in request.requests]
        failed = generated = 0
        async with self._batching.place(call.caller.tenant):
            try:
                async with aclosing(merged(sources, self._answering.facts.max_sessions)) as items:
                    async for number, item in items:
                        if isinstance(item, Exception):
                            failed += 1
                            error = to_status(call.public(item, self._paths))
                            yield pb.BatchGenerateResponse(index=number, error=error)
                        else:
                            generated += len(item.token_ids)
                            yield pb.BatchGenerateResponse(index=number, response=item)
            finally:
                call.note(failed=failed, generated_tokens=generated)

    async def _answer_in_turn(
        self, context: str, request: pb.GenerateRequest, call: Asker
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """As `_answer`, of a request in a batch; it waits for a place, and until its tenant's quota has come back."""
        if request.context:
            raise InvalidArgumentError(
                "context is set in a request of a batch, expected it in the batch alone", field="context"
            )
        request.context = context
        while True:
            try:
                async with aclosing(self._answer(request, call, lambda **facts: None)) as messages:
                    async for message in messages:
                        yield message
                return
            except (TooManyRequestsError, QuotaExceededError) as error:
                # Nothing has been sent yet: who has a place is not refused.
                if isinstance(error, QuotaExceededError) and error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s or _AGAIN_S)
                call.check()
