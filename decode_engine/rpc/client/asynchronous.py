"""The client for coroutines: the verbs of `Client`, to be awaited."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.rpc.client import create_verbs, verbs
from decode_engine.rpc.client.answers import AsyncGeneration, ignore_waiting
from decode_engine.rpc.client.batch_results import AsyncBatch
from decode_engine.rpc.client.connection import (
    CHANNEL_OPTIONS,
    HEALTH_TIMEOUT_S,
    Metadata,
    ServerHealth,
    caller_metadata,
    channel_credentials,
    translate,
)
from decode_engine.rpc.client.create_verbs import CreateOptions, OperationInfo, UploadInfo
from decode_engine.rpc.client.replies import (
    ContextInfo,
    ContextPage,
    MethodList,
    ServerStatus,
    TokenizedText,
    Waiting,
    WarmResult,
)
from decode_engine.rpc.client.verbs import Call, ContextChanges, GenerateOptions
from decode_engine.rpc.door.options import DEFAULT_LISTEN, Credentials
from index_store.errors import SparseKVError
from index_store.models.conversation.messages import Conversation
from index_store.models.conversation.messages import Message as ChatMessage
from sparsekv.v1 import context_pb2_grpc, generation_pb2_grpc

ReplyT = TypeVar("ReplyT")


class AsyncClient:
    """A connection to a server, for one event loop; to be made where that runs."""

    def __init__(
        self,
        address: str = DEFAULT_LISTEN,
        *,
        timeout_s: float | None = None,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
    ) -> None:
        """As `Client`."""
        self._address = address
        self._timeout_s = timeout_s
        self._metadata = caller_metadata(credentials)
        encryption = channel_credentials(credentials)
        self._channel = (
            aio.insecure_channel(address, CHANNEL_OPTIONS)
            if encryption is None
            else aio.secure_channel(address, encryption, CHANNEL_OPTIONS)
        )
        self._contexts = context_pb2_grpc.ContextServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._generations = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls that go on are cancelled."""
        await self._channel.close(grace=None)

    def showing(self, metadata: Metadata) -> AsyncClient:
        """The same connection for another caller, whose calls show this and no more. Closing either closes both."""
        other = copy(self)
        other._metadata = metadata
        return other

    async def is_serving(self) -> bool:
        """Whether the server has loaded its model and takes calls; False also when no server answers."""
        return (await self.health()).serving

    async def health(self) -> ServerHealth:
        """Whether the server takes calls, and what it does while it starts."""
        check = self._health.Check(
            health_pb2.HealthCheckRequest(), timeout=self._timeout_s or HEALTH_TIMEOUT_S
        )
        try:
            reply = await check
            return ServerHealth.of(reply.status, await check.trailing_metadata())
        except grpc.RpcError:
            return ServerHealth(serving=False)

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
        """As `Client.get_context`."""
        return await self._run(verbs.get_context(name))

    async def find_context(self, reference: str) -> ContextInfo:
        """As `Client.find_context`."""
        return await self._run(verbs.find_context(reference))

    async def update_context(self, name: str, **changes: Unpack[ContextChanges]) -> ContextInfo:
        """As `Client.update_context`."""
        return await self._run(verbs.update_context(name, changes))

    async def delete_context(self, name: str, *, allow_missing: bool = False, force: bool = False) -> None:
        """As `Client.delete_context`."""
        await self._run(verbs.delete_context(name, allow_missing, force))

    async def warm_context(self, name: str) -> WarmResult:
        """As `Client.warm_context`."""
        return await self._run(verbs.warm_context(name))

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
        """As `Client.create_context`."""
        if (document := create_verbs.large_document(text)) is not None:
            upload, text = (await self.upload_document(document)).name, None
        order = create_verbs.create_context(
            options, text=text, token_ids=token_ids, messages=messages, upload=upload
        )
        operation = await self._run(order)
        if wait:
            operation = await self.wait_operation(operation.name, on_progress=on_progress)
            operation.result()
        return operation

    async def upload_document(self, document: bytes) -> UploadInfo:
        """As `Client.upload_document`."""
        try:
            sent = await self._contexts.UploadDocument(
                create_verbs.upload_parts(document), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._translate(error) from None
        return create_verbs.read_upload(sent)

    async def wait_operation(
        self,
        name: str,
        wait_s: float | None = None,
        on_progress: Callable[[OperationInfo], None] | None = None,
    ) -> OperationInfo:
        """As `Client.wait_operation`."""
        end = None if wait_s is None else time.monotonic() + wait_s
        while True:
            most_s = create_verbs.LOOK_S if on_progress is None else create_verbs.PROGRESS_S
            left_s = most_s if end is None else min(most_s, max(0.0, end - time.monotonic()))
            operation = await self._run(create_verbs.wait_operation(name, left_s))
            if on_progress is not None:
                on_progress(operation)
            if operation.done or (end is not None and time.monotonic() >= end):
                return operation

    async def get_operation(self, name: str) -> OperationInfo:
        """As `Client.get_operation`."""
        return await self._run(create_verbs.get_operation(name))

    async def list_operations(self, page_size: int = 0) -> AsyncIterator[OperationInfo]:
        """All operations, newest first, fetched page by page (0: the server's page size)."""
        token: str | None = ""
        while token is not None:
            page = await self._run(create_verbs.list_operations(page_size, token))
            for operation in page.operations:
                yield operation
            token = page.next_page_token or None

    async def cancel_operation(self, name: str) -> None:
        """As `Client.cancel_operation`."""
        await self._run(create_verbs.cancel_operation(name))

    async def delete_operation(self, name: str) -> None:
        """As `Client.delete_operation`."""
        await self._run(create_verbs.delete_operation(name))

    async def list_methods(self) -> MethodList:
        """As `Client.list_methods`."""
        return await self._run(verbs.list_methods())

    async def server_status(self) -> ServerStatus:
        """As `Client.server_status`."""
        return await self._run(verbs.server_status())

    def generate(
        self,
        context: str = "",
        *,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = ignore_waiting,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """As `Client.generate`; not awaited itself."""
        request = verbs.generate_request(context, options)
        return AsyncGeneration(
            partial(self._generations.Generate, request, metadata=self._metadata),
            self._translate,
            timeout_s=timeout_s or self._timeout_s,
            patience_s=patience_s,
            on_wait=on_wait,
        )

    def batch_generate(
        self, context: str, requests: Sequence[GenerateOptions], *, timeout_s: float | None = None
    ) -> AsyncBatch:
        """As `Client.batch_generate`; not awaited itself."""
        request = verbs.batch_request(context, requests)
        options = {"timeout": timeout_s or self._timeout_s, "metadata": self._metadata}
        return AsyncBatch(
            partial(self._generations.BatchGenerate, request, **options), request, self._translate
        )

    async def tokenize(self, content: str | Sequence[ChatMessage] | Conversation) -> TokenizedText:
        """As `Client.tokenize`."""
        return await self._run(verbs.tokenize(content))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """As `Client.detokenize`."""
        return await self._run(verbs.detokenize(ids))

    async def count_tokens(self, content: str | Sequence[ChatMessage] | Conversation) -> int:
        """As `Client.count_tokens`."""
        return await self._run(verbs.count_tokens(content))

    async def _run(self, call: Call[ReplyT]) -> ReplyT:
        send: Any = self._channel.unary_unary(
            call.path, type(call.request).SerializeToString, call.response.FromString
        )
        try:
            response = await send(call.request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None
        return call.read(response)

    def _translate(self, error: grpc.RpcError) -> SparseKVError:
        return translate(error, self._address)
