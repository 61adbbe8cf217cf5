"""The gRPC services: thin handlers between messages and the engine. Errors are left to the gate.

Handlers run on the listener's thread and never block it: what reads files goes through `Call.run`, what waits for
memory through `Call.run_alone`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.empty_pb2 import Empty
from google.rpc.status_pb2 import Status

from decode_engine.errors import TooManyRequestsError, UnfinishedCallError
from decode_engine.rpc.backend import BackendSlot, ServiceBackend
from decode_engine.rpc.contexts.names import COLLECTION, parse_name
from decode_engine.rpc.contexts.pages import Pager, find_context
from decode_engine.rpc.contexts.updates import parse_update
from decode_engine.rpc.creation.operations import parse_operation
from decode_engine.rpc.describe import describe_methods, describe_status, describe_upload
from decode_engine.rpc.generation import check_request, stream_answer
from decode_engine.rpc.transport.appointments import Appointments, Clients
from decode_engine.rpc.transport.bound import Bound
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.merged import merged
from decode_engine.rpc.transport.stalled import forget_error
from decode_engine.rpc.transport.status import public_error, to_status
from decode_engine.rpc.validation import check_tokens, content_tokens, parse_batch
from index_store.errors import ContextNotFoundError, InvalidArgumentError, SparseKVError
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

_MAX_WARMING = 8
"""Calls that load contexts ahead of need, at once: each holds a thread while it waits."""
_MAX_ORDERING = 8
"""Calls that order contexts, at once: each holds a thread while its document is cut into tokens."""
_MAX_UPLOADING = 8
_UPLOAD_S = 600
_MAX_WAITS = 64
"""Calls that wait for operations, at once: each has the store looked into every quarter of a second."""
_LOOK_S = 0.25
_DEFAULT_WAIT_S, _LONGEST_WAIT_S = 60.0, 600.0
_MAX_BATCHES = 64
"""Calls of BatchGenerate at once: each holds its requests until they are answered."""

_MAX_LONG = 16
"""Calls that cut texts or compile constraints, at once: each holds a thread meanwhile."""

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

_BUSY_S = 2.0
"""How long an update waits for others of the same context; a job that writes it takes longer."""


class ContextService(context_pb2_grpc.ContextServiceServicer):
    """Lists, describes, changes, loads and deletes stored contexts."""

    def __init__(self, slot: BackendSlot) -> None:
        self._slot = slot
        self._pager = Pager()
        self._warming = 0
        self._ordering = Bound(_MAX_ORDERING, "contexts are being ordered")
        self._uploading = Bound(_MAX_UPLOADING, "documents are being uploaded")

    async def CreateContext(
        self, request: context_pb2.CreateContextRequest, call: Call
    ) -> operations_pb2.Operation:
        backend = self._slot.get()
        with (
            self._ordering.place()
        ):  # who leaves has the order made or not made, and finds out by its request_id
            work = call.run_alone(partial(self._create, backend, request, call))
            operation = await asyncio.shield(asyncio.ensure_future(work))
        call.note(operation=operation.name)
        return operation

    def _create(
        self, backend: ServiceBackend, request: context_pb2.CreateContextRequest, call: Call
    ) -> operations_pb2.Operation:
        return backend.operations().show(backend.workshop.order(request, call.check, call.caller))

    async def UploadDocument(
        self, requests: AsyncIterator[context_pb2.UploadDocumentRequest], call: Call
    ) -> context_pb2.Upload:
        uploads, sha256 = self._slot.get().workshop.uploads, ""
        with self._uploading.place():
            writing = await call.run(uploads.begin)
            try:
                async with asyncio.timeout(_UPLOAD_S):
                    async for request in requests:
                        sha256 = request.sha256 or sha256
                        await call.run(partial(writing.add, request.data))
                upload = await call.run(partial(writing.finish, sha256))
            except TimeoutError as error:
                raise UnfinishedCallError(
                    f"the document did not come within {_UPLOAD_S} s; send it anew"
                ) from error
            finally:
                await asyncio.shield(call.run(writing.discard))
        return describe_upload(upload)

    async def GetContext(self, request: context_pb2.GetContextRequest, call: Call) -> context_pb2.Context:
        context = await call.run(partial(self._get, self._slot.get(), request))
        call.note(context=context.name.removeprefix(COLLECTION))
        return context

    def _get(self, backend: ServiceBackend, request: context_pb2.GetContextRequest) -> context_pb2.Context:
        entry = find_context(backend.store, request)
        return backend.describe(entry, set(backend.arena.ids()), backend.children())

    async def ListContexts(
        self, request: context_pb2.ListContextsRequest, call: Call
    ) -> context_pb2.ListContextsResponse:
        backend = self._slot.get()
        return await call.run(partial(backend.store.bounded, partial(self._list, backend, request)))

    def _list(
        self, backend: ServiceBackend, request: context_pb2.ListContextsRequest
    ) -> context_pb2.ListContextsResponse:
        page, next_token = self._pager.page(backend.store, request)
        resident, children = set(backend.arena.ids()), backend.children()
        return context_pb2.ListContextsResponse(
            contexts=[backend.describe(entry, resident, children) for entry in page],
            next_page_token=next_token,
        )

    async def UpdateContext(
        self, request: context_pb2.UpdateContextRequest, call: Call
    ) -> context_pb2.Context:
        backend = self._slot.get()
        id_ = parse_name(request.context.name, "context.name")
        call.note(context=id_)
        return await call.run(partial(self._update, backend, id_, request))

    def _update(
        self, backend: ServiceBackend, id_: str, request: context_pb2.UpdateContextRequest
    ) -> context_pb2.Context:
        changed = backend.store.update(id_, parse_update(request), wait_s=_BUSY_S)
        backend.arena.note(changed)
        return backend.describe(changed, set(backend.arena.ids()), backend.children())

    async def DeleteContext(self, request: context_pb2.DeleteContextRequest, call: Call) -> Empty:
        backend = self._slot.get()
        id_ = parse_name(request.name)
        call.note(context=id_)
        return await call.run(partial(self._delete, backend, id_, request))

    def _delete(self, backend: ServiceBackend, id_: str, request: context_pb2.DeleteContextRequest) -> Empty:
        try:
            backend.store.delete(id_, recursive=request.force)
        except ContextNotFoundError:
            backend.arena.drop(id_)
            if not request.allow_missing:
                raise
        else:
            backend.arena.drop(id_)
        return Empty()

    async def WarmContext(
        self, request: context_pb2.WarmContextRequest, call: Call
    ) -> context_pb2.WarmContextResponse:
        backend = self._slot.get()
        id_ = parse_name(request.name)
        call.note(context=id_)
        if self._warming >= _MAX_WARMING:
            raise TooManyRequestsError(
                f"{self._warming} contexts are being loaded ahead of need, which is the limit; try again later",
                limit=_MAX_WARMING,
            )
        self._warming += 1
        work = asyncio.ensure_future(call.run_alone(partial(self._warm, backend, id_, call)))
        work.add_done_callback(self._end_warming)
        return await asyncio.shield(work)

    def _end_warming(self, work: asyncio.Future[context_pb2.WarmContextResponse]) -> None:
        self._warming -= 1
        forget_error(work)

    def _warm(self, backend: ServiceBackend, id_: str, call: Call) -> context_pb2.WarmContextResponse:
        ground = backend.ground(id_)
        base, expired = ground.base.id, ground.own_tokens > 0
        already = base in backend.arena.ids()
        before = backend.engine.clock_ns()
        with backend.arena.acquire(backend.store, base, check=call.check, expired=expired) as resident:
            ground.read(backend.store)
            load_ns = backend.engine.clock_ns() - before
            return context_pb2.WarmContextResponse(
                context=backend.describe(ground.named, set(backend.arena.ids()), backend.children()),
                already_resident=already,
                load_ns=load_ns,
                first_layer_ns=resident.first_layer_ns,
                all_layers_ns=resident.all_layers_ns,
            )


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # without types
    """Lists, waits for, cancels and forgets the operations that make contexts."""

    def __init__(self, slot: BackendSlot) -> None:
        self._slot = slot
        self._waiting = Bound(_MAX_WAITS, "calls wait for operations")

    async def ListOperations(
        self, request: operations_pb2.ListOperationsRequest, call: Call
    ) -> operations_pb2.ListOperationsResponse:
        backend = self._slot.get()
        return await call.run(partial(backend.store.bounded, partial(backend.operations().page, request)))

    async def GetOperation(
        self, request: operations_pb2.GetOperationRequest, call: Call
    ) -> operations_pb2.Operation:
        return await self._look(parse_operation(request.name), call)

    async def WaitOperation(
        self, request: operations_pb2.WaitOperationRequest, call: Call
    ) -> operations_pb2.Operation:
        id_ = parse_operation(request.name)
        asked = request.timeout.ToTimedelta().total_seconds() if request.HasField("timeout") else None
        wait_s = _DEFAULT_WAIT_S if asked is None else min(max(asked, 0.0), _LONGEST_WAIT_S)
        end = time.monotonic() + wait_s
        with self._waiting.place():
            while True:
                operation = await self._look(id_, call)
                left = end - time.monotonic()
                if operation.done or left <= 0:
                    return operation
                await asyncio.sleep(min(left, _LOOK_S))

    async def CancelOperation(self, request: operations_pb2.CancelOperationRequest, call: Call) -> Empty:
        queue = self._slot.get().workshop.queue
        await call.run(partial(queue.cancel, parse_operation(request.name)))
        return Empty()

    async def DeleteOperation(self, request: operations_pb2.DeleteOperationRequest, call: Call) -> Empty:
        queue = self._slot.get().workshop.queue
        await call.run(partial(queue.remove, parse_operation(request.name)))
        return Empty()

    async def _look(self, id_: str, call: Call) -> operations_pb2.Operation:
        backend = self._slot.get()
        return await call.run(partial(backend.store.bounded, partial(backend.operations().get, id_)))


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Decodes against stored contexts."""

    def __init__(self, slot: BackendSlot, client_requests: int) -> None:
        """client_requests: that one client address may have here."""
        self._slot = slot
        self._clients = Clients(client_requests)
        self._appointments = Appointments()
        self._batches = 0
        self._working = 0

    async def ListMethods(
        self, request: generation_pb2.ListMethodsRequest, call: Call
    ) -> generation_pb2.ListMethodsResponse:
        runner = self._slot.get().runner
        return describe_methods(runner.identity.head_dim, runner.kv_dtype)

    async def GetServerStatus(
        self, request: generation_pb2.GetServerStatusRequest, call: Call
    ) -> generation_pb2.ServerStatus:
        backend = self._slot.get()
        model, choices = backend.runner.identity.name, backend.costs.told()
        engine, arena = backend.engine.stats(), backend.arena.stats()
        return describe_status(model, engine, arena, call.traffic(), choices)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, call: Call
    ) -> generation_pb2.TokenizeResponse:
        runner = self._slot.get().runner

        def cut() -> generation_pb2.TokenizeResponse:
            ids, token_bytes = content_tokens(request, runner.tokenizer), runner.vocabulary.token_bytes
            return generation_pb2.TokenizeResponse(ids=ids, texts=[token_bytes[token] for token in ids])

        return await self._long(call, cut)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, call: Call
    ) -> generation_pb2.DetokenizeResponse:
        runner = self._slot.get().runner
        check_tokens("ids", request.ids, runner.identity)
        text = await self._long(call, partial(runner.tokenizer.decode, request.ids))
        return generation_pb2.DetokenizeResponse(text=text)

    async def CountTokens(
        self, request: generation_pb2.CountTokensRequest, call: Call
    ) -> generation_pb2.CountTokensResponse:
        tokenizer = self._slot.get().runner.tokenizer
        counted = await self._long(call, lambda: len(content_tokens(request, tokenizer)))
        return generation_pb2.CountTokensResponse(tokens=counted)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, call: Call
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        try:
            async with aclosing(self._answer(self._slot.get(), request, call, call.note)) as messages:
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
            checked = await (self._long(call, check) if compiled else call.run(check))
            note(
                context=checked.ground.named.id,
                method=checked.fitted.method.name,
                prompt_tokens=len(checked.prompt),
                cached_tokens=checked.ground.named.token_count,
                generated_tokens=0,
            )
            answer = stream_answer(backend, checked, call, self._appointments, note)
            async with aclosing(answer) as messages:
                async for message in messages:
                    yield message

    async def BatchGenerate(
        self, request: generation_pb2.BatchGenerateRequest, call: Call
    ) -> AsyncIterator[generation_pb2.BatchGenerateResponse]:
        backend = self._slot.get()
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
            except TooManyRequestsError:  # nothing has been sent yet: places are taken before
                await asyncio.sleep(self._appointments.next_s())
                call.check()

    def _public_status(self, error: Exception, backend: ServiceBackend, call: Call) -> Status:
        public = public_error(error, call.id, backend.paths)
        if public is not error and not isinstance(error, SparseKVError):
            logger.error("a request of batch %s failed", call.id, exc_info=error)
        return to_status(public)

    async def _long(self, call: Call, work: Callable[[], ResultT]) -> ResultT:
        """What may take seconds, on a thread of its own. Raises TooManyRequestsError where too many do."""
        if self._working >= _MAX_LONG:
            raise TooManyRequestsError(
                f"{self._working} other calls compile constraints or cut long texts, which is the limit; try again "
                "later",
                limit=_MAX_LONG,
            )
        self._working += 1
        task = asyncio.ensure_future(call.run_alone(work))
        task.add_done_callback(self._end_long)
        return await asyncio.shield(task)

    def _end_long(self, task: asyncio.Future[ResultT]) -> None:
        self._working -= 1
        forget_error(task)
