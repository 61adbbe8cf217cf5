"""The gRPC services: thin handlers between messages and the engine. Errors are left to the interceptor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Finished, FinishReason, Request, Stream, Token
from decode_engine.engine.session_memory import session_bytes
from decode_engine.engine.text import TextStream
from decode_engine.errors import CancelledError, DeadlineExceededError, NotReadyError
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc.describe import (
    describe_broken,
    describe_context,
    describe_methods,
    describe_remainder,
    describe_status,
)
from decode_engine.rpc.pages import Pager
from decode_engine.rpc.validation import (
    Order,
    choose_method,
    fit_max_tokens,
    parse_name,
    parse_order,
    prompt_tokens,
)
from index_store.errors import ContextCorruptError, ContextNotFoundError, FormatVersionError, SparseKVError
from index_store.memory.arena import Arena
from index_store.methods.method import FittedMethod
from index_store.store.catalog import BrokenContext, Store
from index_store.store.manifest import Manifest
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

_LONGEST_DEADLINE_S = 10 * 365 * 86400.0

logger = logging.getLogger(__name__)

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.GenerationSummary.STOP,
    FinishReason.LENGTH: generation_pb2.GenerationSummary.LENGTH,
    FinishReason.END_OF_SEQUENCE: generation_pb2.GenerationSummary.END_OF_SEQUENCE,
}


@dataclass(frozen=True, slots=True)
class ServiceBackend:
    """What the services serve from."""

    store: Store
    arena: Arena
    runner: ModelRunner
    engine: Engine[Session]

    def servable(self, id_: str) -> Manifest:
        """The manifest of a context that can be decoded against by the loaded model.

        Raises what `Store.manifest` raises, ContextExpiredError, ModelMismatchError or DtypeMismatchError.
        """
        manifest = self.store.manifest(id_)
        self.store.check_expiry(manifest)
        self.runner.check(manifest)
        return manifest

    def describe(self, entry: Manifest | BrokenContext, resident: set[str]) -> context_pb2.Context:
        """A context of the store as the API shows it; `resident` are the ids in memory."""
        if isinstance(entry, BrokenContext):
            return describe_broken(entry)
        return describe_context(
            entry,
            self.tuned_default(entry.id),
            expired=self.store.expired(entry),
            resident=entry.id in resident,
            placement=self.arena.placement(entry),
        )

    def tuned_default(self, id_: str) -> TunedDefault | None:
        """What the context was tuned to, if it was; a record that cannot be read is logged and not used."""
        try:
            return self.store.default_method(id_)
        except SparseKVError as error:
            logger.warning("the tuned default of context %s is not used: %s", id_, error)
            return None


class BackendSlot:
    """Holds the backend once it is loaded; until then every call is told to come back later."""

    def __init__(self) -> None:
        self._backend: ServiceBackend | None = None

    def fill(self, backend: ServiceBackend) -> None:
        """From here on calls are served."""
        self._backend = backend

    def get(self) -> ServiceBackend:
        """Raises NotReadyError while there is none."""
        if self._backend is None:
            raise NotReadyError("the server is loading its model; try again in a moment")
        return self._backend


class ContextService(context_pb2_grpc.ContextServiceServicer):
    """Lists, describes, loads and deletes stored contexts."""

    def __init__(self, slot: BackendSlot) -> None:
        self._slot = slot
        self._pager = Pager()

    def GetContext(
        self, request: context_pb2.GetContextRequest, context: grpc.ServicerContext
    ) -> context_pb2.Context:
        backend = self._slot.get()
        id_ = parse_name(request.name)
        entry: Manifest | BrokenContext
        try:
            entry = backend.store.manifest(id_)
        except (ContextCorruptError, FormatVersionError) as error:
            entry = BrokenContext(id_, error)
        return backend.describe(entry, set(backend.arena.ids()))

    def ListContexts(
        self, request: context_pb2.ListContextsRequest, context: grpc.ServicerContext
    ) -> context_pb2.ListContextsResponse:
        backend = self._slot.get()
        page, next_token = self._pager.page(backend.store.entries(), request.page_size, request.page_token)
        resident = set(backend.arena.ids())
        return context_pb2.ListContextsResponse(
            contexts=[backend.describe(entry, resident) for entry in page], next_page_token=next_token
        )

    def DeleteContext(
        self, request: context_pb2.DeleteContextRequest, context: grpc.ServicerContext
    ) -> Empty:
        backend = self._slot.get()
        id_ = parse_name(request.name)
        try:
            backend.store.delete(id_)
        except ContextNotFoundError:
            if not request.allow_missing:
                raise
        finally:
            backend.arena.drop(id_)
        return Empty()

    def WarmContext(
        self, request: context_pb2.WarmContextRequest, context: grpc.ServicerContext
    ) -> context_pb2.WarmContextResponse:
        backend = self._slot.get()
        manifest = backend.servable(parse_name(request.name))
        already = manifest.id in backend.arena.ids()
        before = backend.engine.clock_ns()
        check = _call_check(context, backend, _deadline_ns(context, before))
        with backend.arena.acquire(backend.store, manifest.id, check=check) as resident:
            load_ns = backend.engine.clock_ns() - before
            return context_pb2.WarmContextResponse(
                context=backend.describe(manifest, set(backend.arena.ids())),
                already_resident=already,
                load_ns=load_ns,
                first_layer_ns=resident.first_layer_ns,
                all_layers_ns=resident.all_layers_ns,
            )


@dataclass(frozen=True, slots=True)
class _CheckedOrder:
    """An order and what it means on its context.

    fitted: the method on the context. memory: bytes that its session may come to hold. arrived_ns: when the call came,
    on the engine's clock.
    """

    order: Order
    fitted: FittedMethod
    prompt: list[int]
    max_tokens: int
    memory: int
    arrived_ns: int


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Decodes against stored contexts."""

    def __init__(self, slot: BackendSlot) -> None:
        self._slot = slot

    def ListMethods(
        self, request: generation_pb2.ListMethodsRequest, context: grpc.ServicerContext
    ) -> generation_pb2.ListMethodsResponse:
        runner = self._slot.get().runner
        return describe_methods(runner.identity.head_dim, runner.kv_dtype)

    def GetServerStatus(
        self, request: generation_pb2.GetServerStatusRequest, context: grpc.ServicerContext
    ) -> generation_pb2.ServerStatus:
        backend = self._slot.get()
        return describe_status(backend.engine.stats(), backend.arena.stats())

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        backend = self._slot.get()
        checked = _check(backend, request)
        deadline_ns = _deadline_ns(context, checked.arrived_ns)
        check = _call_check(context, backend, deadline_ns)
        stream, load_ns, submitted_ns = _submit(backend, checked, deadline_ns, check)
        try:
            if not context.add_callback(stream.cancel):
                stream.cancel()
            for event in stream:
                if isinstance(event, Token):
                    yield generation_pb2.GenerateResponse(token_ids=[event.token_id], text=event.text)
                else:
                    summary = _summarise(checked, event, load_ns, submitted_ns - checked.arrived_ns)
                    yield generation_pb2.GenerateResponse(text=event.text, summary=summary)
        finally:
            stream.cancel()


def _check(backend: ServiceBackend, request: generation_pb2.GenerateRequest) -> _CheckedOrder:
    """Checks a request against its context, before anything is loaded."""
    arrived_ns = backend.engine.clock_ns()
    order = parse_order(request)
    manifest = backend.servable(order.context_id)
    method = choose_method(order, manifest, None if order.method else backend.tuned_default(manifest.id))
    fitted = method.on(manifest)
    identity = backend.runner.identity
    prompt = prompt_tokens(order, backend.runner.tokenizer, identity.vocab_size)
    max_tokens = fit_max_tokens(order, manifest, identity, len(prompt))
    memory = session_bytes(fitted, len(prompt) + max_tokens)
    return _CheckedOrder(order, fitted, prompt, max_tokens, memory, arrived_ns)


def _submit(
    backend: ServiceBackend, checked: _CheckedOrder, deadline_ns: int | None, check: Callable[[], None]
) -> tuple[Stream, int, int]:
    """Has the context loaded, and queues the request.

    While other contexts that are in use leave no memory for it, the call waits; its place bounds how many do. When
    nobody else is served, the request begins while its context is still being loaded, and runs behind that; otherwise
    the call waits until all is there, lest the others wait with the model for its layers.
    Returns the stream, the nanoseconds of loading and the time of submission. The context's lease goes over to the
    engine, which ends it when it has let go of the session.
    """
    id_ = checked.fitted.manifest.id
    place = backend.engine.reserve(id_, checked.memory)
    with ExitStack() as stack:
        stack.callback(place.release)
        before = backend.engine.clock_ns()
        lease = backend.arena.acquire(backend.store, id_, check=check, wait_for_memory=True, early=True)
        resident = stack.enter_context(lease)
        if backend.engine.places > 1:
            resident.wait_for_layers(check)
        submitted_ns = backend.engine.clock_ns()
        tokenizer = backend.runner.tokenizer
        request: Request[Any] = Request(
            start=lambda: backend.runner.start(resident, checked.fitted),
            prompt=checked.prompt,
            max_tokens=checked.max_tokens,
            sampling=checked.order.sampling,
            sink=TextStream(tokenizer.decode, checked.prompt, checked.order.stops),
            end_ids=frozenset(tokenizer.eos_ids),
            deadline_ns=deadline_ns,
            on_close=stack.pop_all().close,
            context=id_,
            memory=checked.memory,
        )
    return backend.engine.submit(place, request), submitted_ns - before, submitted_ns


def _deadline_ns(context: grpc.ServicerContext, now_ns: int) -> int | None:
    """When the call's deadline passes, on the engine's clock; None without a deadline."""
    remaining: float | None = context.time_remaining()
    if remaining is None or remaining > _LONGEST_DEADLINE_S:
        return None
    return now_ns + int(remaining * 1e9)


def _call_check(
    context: grpc.ServicerContext, backend: ServiceBackend, deadline_ns: int | None
) -> Callable[[], None]:
    """What raises DeadlineExceededError or CancelledError once the call needs no answer any more."""

    def check() -> None:
        if deadline_ns is not None and backend.engine.clock_ns() >= deadline_ns:
            raise DeadlineExceededError("the deadline passed before the context was in memory")
        if not context.is_active():
            raise CancelledError("the client ended the call")

    return check


def _summarise(
    checked: _CheckedOrder, end: Finished, load_ns: int, before_ns: int
) -> generation_pb2.GenerationSummary:
    """The last message's summary. before_ns: from the arrival of the call to the submission to the engine."""
    times, figures, method = end.times, end.figures, checked.fitted.method
    searched = figures.sparse_available > 0
    return generation_pb2.GenerationSummary(
        finish_reason=_FINISH_REASONS[end.reason],
        usage=generation_pb2.Usage(
            context_tokens=checked.fitted.manifest.token_count,
            prompt_tokens=len(checked.prompt),
            completion_tokens=end.completion_tokens,
        ),
        timings=generation_pb2.Timings(
            load_ns=load_ns,
            queue_ns=times.queue_ns,
            prompt_ns=times.prompt_ns,
            first_token_ns=before_ns + times.first_token_ns,
            search_ns=figures.search_ns,
            gather_ns=figures.gather_ns,
            attend_ns=figures.attend_ns,
            append_ns=figures.append_ns,
            decode_steps=times.decode_steps,
            decode_ns=times.decode_ns,
            total_ns=before_ns + times.total_ns,
            device_wait_for_host_ns=figures.device_wait_for_host_ns,
            host_bytes_read=figures.host_bytes_read,
            rows_reused=figures.rows_reused,
        ),
        selection=generation_pb2.SelectionFigures(
            searches=figures.searches,
            keys_kept=figures.kept,
            keys_attended=figures.sparse_attended,
            keys_available=figures.sparse_available,
            fraction_sparse=figures.sparse_fraction if searched else None,
            fraction_all=figures.fraction,
        ),
        method=method.name,
        seed=end.seed,
        budget="" if method.budget is None else method.budget.label,
        remainder=describe_remainder(method),
    )
