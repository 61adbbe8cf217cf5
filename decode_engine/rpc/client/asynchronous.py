"""The client: for coroutines, and what `Client` runs in the thread that calls it."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.rpc.client import verbs
from decode_engine.rpc.client.answers import AsyncGeneration, ignore_waiting
from decode_engine.rpc.client.batch_results import AsyncBatch
from decode_engine.rpc.client.connection import (
    HEALTH_TIMEOUT_S,
    REPEATED,
    ServerHealth,
    caller_metadata,
    channel_credentials,
    translate,
)
from decode_engine.rpc.client.repeats import AsyncWire, Repeats, Stream, Wire
from decode_engine.rpc.client.replies import OperationInfo, ServerStatus, read_nothing, read_reply, reads
from decode_engine.rpc.client.verbs import Call, Content, ContextChanges, CreateOptions, GenerateOptions
from decode_engine.rpc.door.options import DEFAULT_LISTEN, Credentials
from index_store.models.conversation.messages import Conversation
from index_store.models.conversation.messages import Message as ChatMessage
from sparsekv.v1.generation_pb2 import BatchGenerateRequest, BatchGenerateResponse, GenerateResponse
from sparsekv.v1.values import (
    ContextInfo,
    ContextPage,
    MethodList,
    TokenizedText,
    UploadInfo,
    Waiting,
    WarmResult,
)

ReplyT = TypeVar("ReplyT")

LOOK_S = 30.0
"""Seconds that one call waits for an operation, at most."""
PROGRESS_S = 0.5
"""The same where progress is told."""


class AsyncClient:
    """A connection to a server, for one event loop; to be made where that runs."""

    def __init__(
        self,
        address: str = DEFAULT_LISTEN,
        *,
        timeout_s: float | None = None,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
        wire: Callable[[str, grpc.ChannelCredentials | None], Wire] = AsyncWire,
    ) -> None:
        """timeout_s: deadline of every call that is not given one of its own; None waits as long as it takes.

        credentials: the token and certificates to show, and whom to trust. Raises InvalidArgumentError for a file that
        cannot be read.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._metadata = caller_metadata(credentials)
        self._wire = wire(address, channel_credentials(credentials))
        self._channel = self._wire.channel
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls that go on are cancelled."""
        await self._wire.close()

    async def is_serving(self) -> bool:
        """Whether the server has loaded its model and takes calls; False also when no server answers."""
        return (await self.health()).serving

    async def health(self) -> ServerHealth:
        """Whether the server takes calls, and what it does while it starts."""
        wait_s = self._timeout_s or HEALTH_TIMEOUT_S
        try:
            reply, trailing = await self._wire.reply(
                self._health.Check, health_pb2.HealthCheckRequest(), timeout=wait_s
            )
        except grpc.RpcError:
            return ServerHealth(serving=False)
        return ServerHealth.of(reply.status, trailing)

    async def list_contexts(
        self, page_size: int = 0, *, filter: str = "", order_by: str = ""
    ) -> AsyncIterator[ContextInfo]:
        """The contexts that fit the filter, newest first unless `order_by` says otherwise.

        They are fetched page by page (0: the server's page size). sparsekv/v1/context.proto has the language of both.
        """
        token: str | None = ""
        while token is not None:
            page = await self.list_page(page_size, token, filter=filter, order_by=order_by)
            for context in page.contexts:
                yield context
            token = page.next_page_token or None

    async def list_page(
        self, page_size: int = 0, page_token: str = "", *, filter: str = "", order_by: str = ""
    ) -> ContextPage:
        """One page of contexts as of `list_contexts`. page_token: of the page before, "" for the first one."""
        return await self._run(verbs.list_contexts(page_size, page_token, filter, order_by))

    async def get_context(self, name: str) -> ContextInfo:
        """One context by its resource name, `contexts/<id>`. Raises ContextNotFoundError."""
        return await self._run(verbs.call("GetContext", reads(ContextInfo), name=name))

    async def find_context(self, reference: str) -> ContextInfo:
        """The context that a reference means: an id, its first 6 or more digits, a resource or display name.

        Raises ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
        """
        return await self._run(verbs.find_context(reference))

    async def update_context(self, name: str, **changes: Unpack[ContextChanges]) -> ContextInfo:
        """Changes what a context is called, when it expires, single labels, and whether it is pinned.

        Returns the context as it is then. Raises ContextNotFoundError, or ContextBusyError where a job writes it for
        longer than two seconds; nothing is repeated then, `retry_after_s` says when to.
        """
        return await self._run(verbs.update_context(name, changes))

    async def delete_context(self, name: str, *, allow_missing: bool = False, force: bool = False) -> None:
        """Deletes a context. Raises ContextNotFoundError unless `allow_missing`.

        force: and those that continue it; without it raises ContextHasChildrenError where there are some.
        """
        await self._run(verbs.delete_context(name, allow_missing, force))

    async def warm_context(self, name: str) -> WarmResult:
        """Loads a context into the server's memory and verifies it."""
        return await self._run(verbs.call("WarmContext", reads(WarmResult), name=name))

    async def create_context(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | Conversation | None = None,
        upload: str | None = None,
        wait: bool = True,
        on_progress: Callable[[OperationInfo], None] | None = None,
        **options: Unpack[CreateOptions],
    ) -> OperationInfo:
        """Has a context made of exactly one of a text, tokens, messages and an uploaded text (`uploads/<id>`).

        A text that is larger than a message is uploaded. wait: until the operation is done; on_progress is told how it
        goes meanwhile, and errors of the operation are raised. Otherwise it goes on while nobody waits.
        """
        if (document := verbs.large_document(text)) is not None:
            upload, text = (await self.upload_document(document)).name, None
        order = verbs.create_context(
            options, text=text, token_ids=token_ids, messages=messages, upload=upload
        )
        operation = await self._run(order)
        if wait:
            operation = await self.wait_operation(operation.name, on_progress=on_progress)
            operation.result()
        return operation

    async def upload_document(self, document: bytes) -> UploadInfo:
        """Sends a UTF-8 text ahead of the request that uses it."""
        try:
            sent, _ = await self._wire.reply(
                self._method("UploadDocument"),
                verbs.upload_parts(document),
                timeout=self._timeout_s,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise translate(error, self._address) from None
        return read_reply(UploadInfo, sent)

    async def wait_operation(
        self,
        name: str,
        wait_s: float | None = None,
        on_progress: Callable[[OperationInfo], None] | None = None,
    ) -> OperationInfo:
        """Waits until an operation is done, or for so many seconds, and returns what it is then."""
        end = None if wait_s is None else time.monotonic() + wait_s
        while True:
            most_s = LOOK_S if on_progress is None else PROGRESS_S
            left_s = most_s if end is None else min(most_s, max(0.0, end - time.monotonic()))
            operation = await self._run(verbs.wait_operation(name, left_s))
            if on_progress is not None:
                on_progress(operation)
            if operation.done or (end is not None and time.monotonic() >= end):
                return operation

    async def get_operation(self, name: str) -> OperationInfo:
        """An operation, `operations/<id>`, as it is now. Raises JobNotFoundError."""
        return await self._run(verbs.get_operation(name))

    async def list_operations(self, page_size: int = 0) -> AsyncIterator[OperationInfo]:
        """All operations, newest first, fetched page by page (0: the server's page size)."""
        token: str | None = ""
        while token is not None:
            page = await self._run(verbs.list_operations(page_size, token))
            for operation in page.operations:
                yield operation
            token = page.next_page_token or None

    async def cancel_operation(self, name: str) -> None:
        """Has an operation end as cancelled, unless it has ended already."""
        await self._run(verbs.cancel_operation(name))

    async def delete_operation(self, name: str) -> None:
        """Forgets an operation that has ended. Raises JobUnfinishedError."""
        await self._run(verbs.call("DeleteOperation", read_nothing, name=name))

    async def list_methods(self) -> MethodList:
        """The server's methods, with their sizes for its model."""
        return await self._run(verbs.call("ListMethods", reads(MethodList)))

    async def server_status(self) -> ServerStatus:
        """What the server does now, and did since it started."""
        return await self._run(verbs.call("GetServerStatus", reads(ServerStatus)))

    def generate(
        self,
        context: str = "",
        *,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = ignore_waiting,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Continues the context `contexts/<id>` by a question, a text, tokens or messages (exactly one of them).

        context: "" where these are everything from the beginning. patience_s: how long a request
        that a busy server refuses is repeated, each time when the server says. on_wait: told now and then what an
        accepted request waits for. Errors are raised while the generation is read. Raises InvalidArgumentError here for
        values that no message can carry.
        """
        return AsyncGeneration(self._generation(context, timeout_s, patience_s, options), on_wait)

    def batch_generate(
        self, context: str, requests: Sequence[GenerateOptions], *, timeout_s: float | None = None
    ) -> AsyncBatch:
        """Continues one context, or none, by many prompts, 1 to 1,000: as many at once as the server has sessions."""
        return AsyncBatch(*self._batch(context, requests, timeout_s))

    async def tokenize(self, content: Content) -> TokenizedText:
        """A text, or a conversation from its beginning, as the model's tokens."""
        return await self._run(verbs.tokenize(content))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return await self._run(verbs.detokenize(ids))

    async def count_tokens(self, content: Content) -> int:
        """How many tokens these would be."""
        return await self._run(verbs.count_tokens(content))

    def _generation(
        self, context: str, timeout_s: float | None, patience_s: float, options: GenerateOptions
    ) -> Stream[GenerateResponse]:
        request = verbs.generate_request(context, options)
        return self._stream("Generate", request, timeout_s, patience_s)

    def _batch(
        self, context: str, requests: Sequence[GenerateOptions], timeout_s: float | None
    ) -> tuple[Stream[BatchGenerateResponse], BatchGenerateRequest]:
        request = verbs.batch_request(context, requests)
        return self._stream("BatchGenerate", request, timeout_s), request

    def _method(self, name: str) -> Any:
        """What sends to a method."""
        method = verbs.METHODS[name]
        ways = {False: "unary", True: "stream"}
        way = f"{ways[method.client_streaming]}_{ways[method.server_streaming]}"
        sent, read = (GetMessageClass(each) for each in (method.input_type, method.output_type))
        path = f"/{method.containing_service.full_name}/{name}"
        return getattr(self._channel, way)(path, sent.SerializeToString, read.FromString)

    def _stream(
        self, method: str, request: object, timeout_s: float | None, patience_s: float = 0.0
    ) -> Stream[Any]:
        repeats, send = Repeats(self._address, timeout_s or self._timeout_s, patience_s), self._method(method)
        return Stream(
            self._wire,
            lambda left_s: send(request, timeout=left_s, metadata=self._metadata),
            repeats,
        )

    async def _run(self, call: Call[ReplyT]) -> ReplyT:
        repeats, send = Repeats(self._address, self._timeout_s), self._method(call.method)
        while True:
            try:
                response, _ = await self._wire.reply(
                    send, call.request, timeout=repeats.left_s, metadata=self._metadata
                )
                return call.read(response)
            except grpc.RpcError as error:
                failed = repeats.translate(error)
            if call.method not in REPEATED:
                raise failed
            await self._wire.sleep(repeats.wait_s(failed), threading.Event())
