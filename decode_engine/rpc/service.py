"""The gRPC services: thin handlers between messages and the engine. Errors are left to the gate.

Handlers run on the listener's thread and never block it: what reads files goes through `Call.run`, what waits for
memory through `Call.run_alone`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from google.protobuf.empty_pb2 import Empty

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.backend import BackendSlot, ServiceBackend
from decode_engine.rpc.describe import COLLECTION, describe_methods, describe_status
from decode_engine.rpc.generation import Appointments, Clients, check_request, stream_answer
from decode_engine.rpc.pages import Pager, find_context
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.stalled import forget_error
from decode_engine.rpc.validation import parse_name
from index_store.errors import ContextNotFoundError
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

_MAX_WARMING = 8
"""Calls that load contexts ahead of need, at once: each holds a thread while it waits."""


class ContextService(context_pb2_grpc.ContextServiceServicer):
    """Lists, describes, loads and deletes stored contexts."""

    def __init__(self, slot: BackendSlot) -> None:
        self._slot = slot
        self._pager = Pager()
        self._warming = 0

    async def GetContext(self, request: context_pb2.GetContextRequest, call: Call) -> context_pb2.Context:
        context = await call.run(partial(self._get, self._slot.get(), request))
        call.note(context=context.name.removeprefix(COLLECTION))
        return context

    def _get(self, backend: ServiceBackend, request: context_pb2.GetContextRequest) -> context_pb2.Context:
        return backend.describe(find_context(backend.store, request), set(backend.arena.ids()))

    async def ListContexts(
        self, request: context_pb2.ListContextsRequest, call: Call
    ) -> context_pb2.ListContextsResponse:
        backend = self._slot.get()
        return await call.run(partial(backend.store.bounded, partial(self._list, backend, request)))

    def _list(
        self, backend: ServiceBackend, request: context_pb2.ListContextsRequest
    ) -> context_pb2.ListContextsResponse:
        page, next_token = self._pager.page(backend.store, request.page_size, request.page_token)
        resident = set(backend.arena.ids())
        return context_pb2.ListContextsResponse(
            contexts=[backend.describe(entry, resident) for entry in page], next_page_token=next_token
        )

    async def DeleteContext(self, request: context_pb2.DeleteContextRequest, call: Call) -> Empty:
        backend = self._slot.get()
        id_ = parse_name(request.name)
        call.note(context=id_)
        return await call.run(partial(self._delete, backend, id_, request.allow_missing))

    def _delete(self, backend: ServiceBackend, id_: str, allow_missing: bool) -> Empty:
        try:
            backend.store.delete(id_)
        except ContextNotFoundError:
            if not allow_missing:
                raise
        finally:
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
        manifest = backend.servable(id_)
        already = manifest.id in backend.arena.ids()
        before = backend.engine.clock_ns()
        with backend.arena.acquire(backend.store, manifest.id, check=call.check) as resident:
            load_ns = backend.engine.clock_ns() - before
            return context_pb2.WarmContextResponse(
                context=backend.describe(manifest, set(backend.arena.ids())),
                already_resident=already,
                load_ns=load_ns,
                first_layer_ns=resident.first_layer_ns,
                all_layers_ns=resident.all_layers_ns,
            )


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Decodes against stored contexts."""

    def __init__(self, slot: BackendSlot, client_requests: int) -> None:
        """client_requests: that one client address may have here."""
        self._slot = slot
        self._clients = Clients(client_requests)
        self._appointments = Appointments()

    async def ListMethods(
        self, request: generation_pb2.ListMethodsRequest, call: Call
    ) -> generation_pb2.ListMethodsResponse:
        runner = self._slot.get().runner
        return describe_methods(runner.identity.head_dim, runner.kv_dtype)

    async def GetServerStatus(
        self, request: generation_pb2.GetServerStatusRequest, call: Call
    ) -> generation_pb2.ServerStatus:
        backend = self._slot.get()
        return describe_status(backend.engine.stats(), backend.arena.stats(), call.traffic())

    async def Generate(
        self, request: generation_pb2.GenerateRequest, call: Call
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        backend = self._slot.get()
        try:
            with self._clients.place(call.host):
                checked = await call.run(partial(check_request, backend, request, call.check))
                call.note(
                    context=checked.fitted.manifest.id,
                    method=checked.fitted.method.name,
                    prompt_tokens=len(checked.prompt),
                    cached_tokens=checked.fitted.manifest.token_count,
                    generated_tokens=0,
                )
                async with aclosing(stream_answer(backend, checked, call, self._appointments)) as messages:
                    async for message in messages:
                        yield message
        except TooManyRequestsError as error:
            error.retry_after_s = self._appointments.next_s()
            raise
