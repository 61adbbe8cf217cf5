"""The service of generation: thin handlers between messages and a door's answers.

Handlers run on the listener's thread and never block it: what reads files goes through `Asker.run`, what waits for
memory through `Asker.run_alone`. Errors are left to the gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.answers.answering import Answering, Note
from decode_engine.rpc.answers.prompting import check_tokens
from decode_engine.rpc.door.sharing import Sharing
from decode_engine.rpc.messages.describe import describe_methods, describe_status, said_message
from decode_engine.rpc.messages.validation import content_tokens, parse_batch, parse_order
from decode_engine.rpc.transport.asker import Asker
from decode_engine.rpc.transport.bound import Bound
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.merged import merged
from decode_engine.rpc.transport.status import Paths, to_status
from index_store.errors import InvalidArgumentError
from sparsekv.v1 import generation_pb2, generation_pb2_grpc

_MAX_BATCHES = 64
"""Calls of BatchGenerate at once: each holds its requests until they are answered."""
_AGAIN_S = 1.0


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Decodes against stored contexts."""

    def __init__(self, answering: Answering, paths: Paths, sharing: Sharing) -> None:
        """paths: what no client is told."""
        self._answering = answering
        self._paths = paths
        self._batching = Bound(_MAX_BATCHES, "batches are being answered", sharing)

    async def ListMethods(
        self, request: generation_pb2.ListMethodsRequest, call: Asker
    ) -> generation_pb2.ListMethodsResponse:
        facts = self._answering.facts
        return describe_methods(facts.identity.head_dim, facts.kv_dtype)

    async def GetServerStatus(
        self, request: generation_pb2.GetServerStatusRequest, call: Call
    ) -> generation_pb2.ServerStatus:
        answering = self._answering
        reads, status = answering.tokenizer.template_reads, await answering.core.status()
        return describe_status(answering.facts.identity, reads, status, call.traffic())

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, call: Asker
    ) -> generation_pb2.TokenizeResponse:
        tokenizer, vocabulary = self._answering.tokenizer, self._answering.vocabulary

        def cut() -> generation_pb2.TokenizeResponse:
            ids, token_bytes = content_tokens(request, tokenizer), vocabulary.token_bytes
            return generation_pb2.TokenizeResponse(ids=ids, texts=[token_bytes[token] for token in ids])

        return await self._answering.long(call, cut)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, call: Asker
    ) -> generation_pb2.DetokenizeResponse:
        check_tokens("ids", request.ids, self._answering.facts.identity)
        decode = partial(self._answering.tokenizer.decode, request.ids)
        return generation_pb2.DetokenizeResponse(text=await self._answering.long(call, decode))

    async def CountTokens(
        self, request: generation_pb2.CountTokensRequest, call: Asker
    ) -> generation_pb2.CountTokensResponse:
        tokenizer = self._answering.tokenizer
        counted = await self._answering.long(call, lambda: len(content_tokens(request, tokenizer)))
        return generation_pb2.CountTokensResponse(tokens=counted)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, call: Asker
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async with aclosing(self._answer(request, call, call.note)) as messages:
            async for message in messages:
                yield message

    async def _answer(
        self, request: generation_pb2.GenerateRequest, call: Asker, note: Note
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
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
        self, request: generation_pb2.BatchGenerateRequest, call: Asker
    ) -> AsyncIterator[generation_pb2.BatchGenerateResponse]:
        call.note(context=parse_batch(request), requests=len(request.requests))
        sources = [partial(self._answer_in_turn, request.context, each, call) for each in request.requests]
        failed = generated = 0
        async with self._batching.place():
            try:
                async with aclosing(merged(sources, self._answering.facts.max_sessions)) as items:
                    async for number, item in items:
                        if isinstance(item, Exception):
                            failed += 1
                            error = to_status(call.public(item, self._paths))
                            yield generation_pb2.BatchGenerateResponse(index=number, error=error)
                        else:
                            generated += len(item.token_ids)
                            yield generation_pb2.BatchGenerateResponse(index=number, response=item)
            finally:
                call.note(failed=failed, generated_tokens=generated)

    async def _answer_in_turn(
        self,
        context: str,
        request: generation_pb2.GenerateRequest,
        call: Asker,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """As `_answer`, of a request in a batch; where there is no place for it, it waits for one."""
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
            except TooManyRequestsError as error:  # nothing has been sent yet: who has a place is not refused
                await asyncio.sleep(error.retry_after_s or _AGAIN_S)
                call.check()
