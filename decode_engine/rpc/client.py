"""A typed client of the services.

    with Client("127.0.0.1:50051") as client:
        with client.generate("contexts/...", question="Who lit the lamp?", stop=["\\n"]) as generation:
            for piece in generation:
                print(piece.text, end="")
        print(generation.summary)

Errors are the classes of index_store.errors and decode_engine.errors, as if the work were done in this process: a
context that is not there raises ContextNotFoundError. `reason` and `metadata` are those that the server sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.config import DEFAULT_LISTEN, MAX_REQUEST_BYTES
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    ServerUnreachableError,
)
from decode_engine.rpc.client_generation import Generation
from decode_engine.rpc.replies import (
    ContextInfo,
    IndexInfo,
    MethodInfo,
    MethodList,
    Piece,
    SelectionFigures,
    ServerStatus,
    Summary,
    Timings,
    Usage,
    Waiting,
    WarmResult,
    read_context,
    read_reply,
)
from decode_engine.rpc.transport.status import error_info, retry_info
from index_store.errors import (
    InvalidArgumentError,
    SparseKVError,
)
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

__all__ = [
    "Client",
    "ContextInfo",
    "Generation",
    "IndexInfo",
    "MethodInfo",
    "MethodList",
    "Piece",
    "SelectionFigures",
    "ServerStatus",
    "Summary",
    "Timings",
    "Usage",
    "Waiting",
    "WarmResult",
]

MessageT = TypeVar("MessageT", bound=Message)

_HEALTH_TIMEOUT_S = 5.0

# Only calls that change nothing are repeated, and only when no server took them.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": "sparsekv.v1.ContextService", "method": "GetContext"},
                {"service": "sparsekv.v1.ContextService", "method": "ListContexts"},
                {"service": "sparsekv.v1.ContextService", "method": "WarmContext"},
                {"service": "sparsekv.v1.GenerationService", "method": "ListMethods"},
                {"service": "sparsekv.v1.GenerationService", "method": "GetServerStatus"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


class Client:
    """A connection to a server, usable from several threads."""

    def __init__(self, address: str = DEFAULT_LISTEN, *, timeout_s: float | None = None) -> None:
        """timeout_s: deadline of every call that is not given one of its own; None waits as long as it takes."""
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
                ("grpc.max_receive_message_length", -1),
            ],
        )
        self._contexts = context_pb2_grpc.ContextServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._generations = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def is_serving(self) -> bool:
        """Whether the server has loaded its model and takes calls; False also when no server answers."""
        try:
            response = self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=self._timeout_s or _HEALTH_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def list_contexts(self, page_size: int = 0) -> Iterator[ContextInfo]:
        """All contexts, newest first, fetched page by page (0: the server's page size)."""
        token = ""
        while True:
            request = _message(context_pb2.ListContextsRequest, page_size=page_size, page_token=token)
            with self._translated():
                response = self._contexts.ListContexts(request, timeout=self._timeout_s)
            yield from map(read_context, response.contexts)
            token = response.next_page_token
            if not token:
                return

    def get_context(self, name: str) -> ContextInfo:
        """One context by its resource name, `contexts/<id>`. Raises ContextNotFoundError."""
        with self._translated():
            request = _message(context_pb2.GetContextRequest, name=name)
            return read_context(self._contexts.GetContext(request, timeout=self._timeout_s))

    def find_context(self, reference: str) -> ContextInfo:
        """The context that a reference means: an id, its first 6 or more digits, a resource or display name.

        Raises ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
        """
        with self._translated():
            request = _message(context_pb2.GetContextRequest, reference=reference)
            return read_context(self._contexts.GetContext(request, timeout=self._timeout_s))

    def delete_context(self, name: str, *, allow_missing: bool = False) -> None:
        """Deletes a context. Raises ContextNotFoundError unless `allow_missing`."""
        with self._translated():
            request = _message(context_pb2.DeleteContextRequest, name=name, allow_missing=allow_missing)
            self._contexts.DeleteContext(request, timeout=self._timeout_s)

    def warm_context(self, name: str) -> WarmResult:
        """Loads a context into the server's memory and verifies it."""
        with self._translated():
            request = _message(context_pb2.WarmContextRequest, name=name)
            response = self._contexts.WarmContext(request, timeout=self._timeout_s)
        return read_reply(WarmResult, response)

    def list_methods(self) -> MethodList:
        """The server's methods, with their sizes for its model."""
        with self._translated():
            response = self._generations.ListMethods(
                generation_pb2.ListMethodsRequest(), timeout=self._timeout_s
            )
        return read_reply(MethodList, response)

    def server_status(self) -> ServerStatus:
        """What the server does now, and did since it started."""
        with self._translated():
            response = self._generations.GetServerStatus(
                generation_pb2.GetServerStatusRequest(), timeout=self._timeout_s
            )
        return read_reply(ServerStatus, response)

    def generate(
        self,
        context: str,
        *,
        question: str | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        method: str | None = None,
        keep_ratio: float | None = None,
        target_mass: float | None = None,
        token_budget: int | None = None,
        search_period: int = 0,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = lambda waiting: None,
    ) -> Generation:
        """Continues the context `contexts/<id>` by a question, a text or tokens (exactly one of them).

        At most one of keep_ratio, target_mass and token_budget says how much is kept. What is None is left to the
        server; sparsekv/v1/generation.proto has the ranges. patience_s: how long a request that a busy server refuses
        is repeated, each time when the server says. on_wait: told now and then what an accepted request waits for.
        Errors are raised while the generation is read. Raises InvalidArgumentError here for values that no message can
        carry.
        """
        if sum(prompt is not None for prompt in (question, text, token_ids)) != 1:
            raise InvalidArgumentError("give exactly one of question, text, token_ids", field="prompt")
        if sum(size is not None for size in (keep_ratio, target_mass, token_budget)) > 1:
            raise InvalidArgumentError(
                "give at most one of keep_ratio, target_mass, token_budget", field="budget"
            )
        request = _message(
            generation_pb2.GenerateRequest,
            context=context,
            question=question,
            text=text,
            token_ids=token_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            method=method,
            keep_ratio=keep_ratio,
            target_mass=target_mass,
            token_budget=token_budget,
            search_period=search_period,
        )
        _check_size(request)
        return Generation(
            partial(self._generations.Generate, request),
            self._translate,
            timeout_s=timeout_s or self._timeout_s,
            patience_s=patience_s,
            on_wait=on_wait,
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: grpc.RpcError) -> SparseKVError:
        """The error of a failed call: the server's own by its reason, else one by the status code."""
        info = error_info(error)
        call = cast(grpc.Call, error)
        code, details = call.code(), call.details() or ""
        if info is not None:
            translated = _classes_by_reason().get(info.reason, InternalError)(details)
            translated.metadata = dict(info.metadata)
            translated.retry_after_s = retry_info(error)
            return translated
        if code == grpc.StatusCode.UNAVAILABLE:
            return ServerUnreachableError(
                f"no server answers at {self._address}; start one with `decode-engine serve`, or name another with "
                f"its address ({details})",
                address=self._address,
            )
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError("the deadline passed before the server had finished")
        if code == grpc.StatusCode.CANCELLED:
            return CancelledError("the call was cancelled")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:  # by gRPC itself, which knows no reasons
            return InvalidArgumentError(f"the server refused the request for its size: {details}")
        return InternalError(f"the call failed with {code.name}: {details}", code=code.name)


def _message(kind: type[MessageT], **fields: Any) -> MessageT:
    """A message of the fields that are not None. Raises InvalidArgumentError that names a field which does not fit."""
    message = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            given = generation_pb2.TokenIds(ids=value) if name == "token_ids" else value
            message.MergeFrom(kind(**{name: given}))
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"{name} is {_shown(value)}, which no request can carry: {error}", field=name
            ) from error
    return message


def _check_size(request: Message) -> None:
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"the request has {request.ByteSize()} bytes, expected at most {MAX_REQUEST_BYTES}; shorten the prompt",
            field="prompt",
        )


def _shown(value: object) -> str:
    text = ascii(value)  # what cannot be sent can often not be printed either
    return text if len(text) <= 60 else f"{text[:57]}..."


def _classes_by_reason() -> dict[str, type[SparseKVError]]:
    classes: dict[str, type[SparseKVError]] = {}
    pending = [SparseKVError]
    while pending:
        for subclass in pending.pop().__subclasses__():
            classes.setdefault(subclass.reason, subclass)
            pending.append(subclass)
    return classes
