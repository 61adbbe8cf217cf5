"""The service of generation: thin handlers between messages and the engine.

Handlers run on the listener's thread and never block it: what reads files goes through `Call.run`, what waits for
memory through `Call.run_alone`. Errors are left to the gate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from google.rpc.status_pb2 import Status

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.backend import ServiceBackend
from decode_engine.rpc.contexts.names import COLLECTION
from decode_engine.rpc.generation import check_request, stream_answer
from decode_engine.rpc.messages.describe import describe_methods, describe_status
from decode_engine.rpc.messages.validation import check_tokens, content_tokens, parse_batch
from decode_engine.rpc.transport.appointments import Appointments, Clients
from decode_engine.rpc.transport.bound import Bound
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.merged import merged
from decode_engine.rpc.transport.status import public_error, to_status
from index_store.errors import ContextExpiredError, ContextNotFoundError, InvalidArgumentError, SparseKVError
from sparsekv.v1 import generation_pb2, generation_pb2_grpc

_MAX_BATCHES = 64
"""Calls of BatchGenerate at once: each holds its requests until they are answered."""
_MAX_LONG = 16
"""Calls that cut texts or compile constraints, at once: each holds a thread meanwhile."""

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Decodes against stored contexts."""

    def __init__(self, backend: ServiceBackend, client_requests: int) -> None:
        """client_requests: that one client address may have here."""
        self._backend = backend
        self._clients = Clients(client_requests)
        self._appointments = Appointments()
        self._batches = 0
        self._working = Bound(_MAX_LONG, "other calls compile constraints or cut long texts")

    async def ListMethods(
        self, request: generation_pb2.ListMethodsRequest, call: Call
    ) -> generation_pb2.ListMethodsResponse:
        runner = self._backend.runner
        return describe_methods(runner.identity.head_dim, runner.kv_dtype)

    async def GetServerStatus(
        self, request: generation_pb2.GetServerStatusRequest, call: Call
    ) -> generation_pb2.ServerStatus:
        backend = self._backend
        runner, choices = backend.runner, backend.costs.told()
        reads = runner.tokenizer.template_reads
        stats = (backend.engine.stats(), backend.beginnings.stats(), backend.arena.stats())
        return describe_status(runner.identity, reads, *stats, call.traffic(), choices)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, call: Call
    ) -> generation_pb2.TokenizeResponse:
        runner = self._backend.runner

        def cut() -> generation_pb2.TokenizeResponse:
            ids, token_bytes = content_tokens(request, runner.tokenizer), runner.vocabulary.token_bytes
            return generation_pb2.TokenizeResponse(ids=ids, texts=[token_bytes[token] for token in ids])

        return await self._long(call, cut)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, call: Call
    ) -> generation_pb2.DetokenizeResponse:
        runner = self._backend.runner
        check_tokens("ids", request.ids, runner.identity)
        text = await self._long(call, partial(runner.tokenizer.decode, request.ids))
        return generation_pb2.DetokenizeResponse(text=text)

    async def CountTokens(
        self, request: generation_pb2.CountTokensRequest, call: Call
    ) -> generation_pb2.CountTokensResponse:
        tokenizer = self._backend.runner.tokenizer
        counted = await self._long(call, lambda: len(content_tokens(request, tokenizer)))
        return generation_pb2.CountTokensResponse(tokens=counted)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, call: Call
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        try:
            async with aclosing(self._answer(self._backend, request, call, call.note)) as messages:
                async for message in messages:
                    yield message
        except TooManyRequestsError as error:
            error.retry_after_s = self._appointments.next_s()
            raise

    async def _answer(
        self,
        backend: ServiceBackend,
        request: generation_pb2.GenerateRequest,
        call: Call,
        note: Callable[..., None],
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The messages of one request. note: is told what happened to it."""
        with self._clients.place(call.host):
            check = partial(check_request, backend, request, call.check)
            compiled = request.HasField("constraint") or request.messages.tools or request.tool_choice.mode
            begun = False
            while True:
                checked = await (self._long(call, check) if compiled else call.run(check))
                note(
                    context=checked.context.removeprefix(COLLECTION),
                    method=checked.fitted.method.name,
                    prompt_tokens=len(checked.prompt),
                    cached_tokens=checked.cached,
                    generated_tokens=0,
                )
                answer = stream_answer(backend, checked, call, self._appointments, note)
                try:
                    async with aclosing(answer) as messages:
                        async for message in messages:
                            begun = begun or bool(message.token_ids) or message.HasField("summary")
                            yield message
                    return
                except (ContextNotFoundError, ContextExpiredError):
                    if begun or request.context:
                        raise
                    # A beginning that was found went before it was in use: there are others, or none.

    async def BatchGenerate(
        self, request: generation_pb2.BatchGenerateRequest, call: Call
    ) -> AsyncIterator[generation_pb2.BatchGenerateResponse]:
        backend = self._backend
        call.note(context=parse_batch(request), requests=len(request.requests))
        if self._batches >= _MAX_BATCHES:
            raise TooManyRequestsError(
                f"{self._batches} batches are being answered, which is the limit; try again later",
                limit=_MAX_BATCHES,
            )
        self._batches += 1
        sources = [
            partial(self._answer_in_turn, backend, request.context, each, call) for each in request.requests
        ]
        failed = generated = 0
        try:
            async with aclosing(merged(sources, backend.engine.max_sessions)) as items:
                async for number, item in items:
                    if isinstance(item, Exception):
                        failed += 1
                        error = self._public_status(item, backend, call)
                        yield generation_pb2.BatchGenerateResponse(index=number, error=error)
                    else:
                        generated += len(item.token_ids)
                        yield generation_pb2.BatchGenerateResponse(index=number, response=item)
        finally:
            self._batches -= 1
            call.note(failed=failed, generated_tokens=generated)

    async def _answer_in_turn(
        self,
        backend: ServiceBackend,
        context: str,
        request: generation_pb2.GenerateRequest,
        call: Call,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """As `_answer`, of a request in a batch; where there is no place for it, it waits for one."""
        if request.context:
            raise InvalidArgumentError(
                "context is set in a request of a batch, expected it in the batch alone", field="context"
            )
        request.context = context
        while True:
            try:
                async with aclosing(self._answer(backend, request, call, lambda **facts: None)) as messages:
                    async for message in messages:
                        yield message
                return
            except TooManyRequestsError:  # nothing has been sent yet: who has a place is not refused
                await asyncio.sleep(self._appointments.next_s())
                call.check()

    def _public_status(self, error: Exception, backend: ServiceBackend, call: Call) -> Status:
        public = public_error(error, call.id, backend.paths)
        if public is not error and not isinstance(error, SparseKVError):
            logger.error("a request of batch %s failed", call.id, exc_info=error)
        return to_status(public)

    async def _long(self, call: Call, work: Callable[[], ResultT]) -> ResultT:
        """What may take seconds, on a thread of its own. Raises TooManyRequestsError where too many do."""
        return await self._working.run(partial(call.run_alone, work))
