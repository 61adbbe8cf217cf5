"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.rpc.client import create_verbs, verbs
from decode_engine.rpc.client.answers import Generation, ignore_waiting
from decode_engine.rpc.client.batch_results import Batch
from decode_engine.rpc.client.connection import (
    CHANNEL_OPTIONS,
    HEALTH_TIMEOUT_S,
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
from sparsekv.v1 import context_pb2_grpc, generation_pb2, generation_pb2_grpc

ReplyT = TypeVar("ReplyT")


class Client:
    """A connection to a server, usable from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_LISTEN,
        *,
        timeout_s: float | None = None,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
    ) -> None:
        """timeout_s: deadline of every call that is not given one of its own; None waits as long as it takes.

        credentials: the token and certificates to show, and whom to trust. Raises InvalidArgumentError for a file that
        cannot be read.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._metadata = caller_metadata(credentials)
        encryption = channel_credentials(credentials)
        self._channel = (
            grpc.insecure_channel(address, CHANNEL_OPTIONS)
            if encryption is None
            else grpc.secure_channel(address, encryption, CHANNEL_OPTIONS)
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
        return self.health().serving

    def health(self) -> ServerHealth:
        """Whether the server takes calls, and what it does while it starts."""
        try:
            reply, check = self._health.Check.with_call(
                health_pb2.HealthCheckRequest(), timeout=self._timeout_s or HEALTH_TIMEOUT_S
            )
        except grpc.RpcError:
            return ServerHealth(serving=False)
        return ServerHealth.of(reply.status, check.trailing_metadata())

    def list_contexts(
        self, page_size: int = 0, *, filter: str = "", order_by: str = ""
    ) -> Iterator[ContextInfo]:
        """The contexts that fit the filter, newest first unless `order_by` says otherwise.

        They are fetched page by page (0: the server's page size). sparsekv/v1/context.proto has the language of both.
        """
        token: str | None = ""
        while token is not None:
            page = self.list_page(page_size, token, filter=filter, order_by=order_by)
            yield from page.contexts
            token = page.next_page_token or None

    def list_page(
        self, page_size: int = 0, page_token: str = "", *, filter: str = "", order_by: str = ""
    ) -> ContextPage:
        """One page of contexts as of `list_contexts`. page_token: of the page before, "" for the first one."""
        return self._run(verbs.list_contexts(page_size, page_token, filter, order_by))

    def get_context(self, name: str) -> ContextInfo:
        """One context by its resource name, `contexts/<id>`. Raises ContextNotFoundError."""
        return self._run(verbs.get_context(name))

    def find_context(self, reference: str) -> ContextInfo:
        """The context that a reference means: an id, its first 6 or more digits, a resource or display name.

        Raises ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
        """
        return self._run(verbs.find_context(reference))

    def update_context(self, name: str, **changes: Unpack[ContextChanges]) -> ContextInfo:
        """Changes what a context is called, when it expires, single labels, and whether it is pinned.

        Returns the context as it is then. Raises ContextNotFoundError, or ContextBusyError where a job writes it for
        longer than two seconds; nothing is repeated then, `retry_after_s` says when to.
        """
        return self._run(verbs.update_context(name, changes))

    def delete_context(self, name: str, *, allow_missing: bool = False, force: bool = False) -> None:
        """Deletes a context. Raises ContextNotFoundError unless `allow_missing`.

        force: and those that continue it; without it raises ContextHasChildrenError where there are some.
        """
        self._run(verbs.delete_context(name, allow_missing, force))

    def warm_context(self, name: str) -> WarmResult:
        """Loads a context into the server's memory and verifies it."""
        return self._run(verbs.warm_context(name))

    def create_context(
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
        if (document := create_verbs.large_document(text)) is not None:
            upload, text = self.upload_document(document).name, None
        order = create_verbs.create_context(
            options, text=text, token_ids=token_ids, messages=messages, upload=upload
        )
        operation = self._run(order)
        if wait:
            operation = self.wait_operation(operation.name, on_progress=on_progress)
            operation.result()
        return operation

    def upload_document(self, document: bytes) -> UploadInfo:
        """Sends a UTF-8 text ahead of the request that uses it."""
        try:
            sent = self._contexts.UploadDocument(
                create_verbs.upload_parts(document), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._translate(error) from None
        return create_verbs.read_upload(sent)

    def wait_operation(
        self,
        name: str,
        wait_s: float | None = None,
        on_progress: Callable[[OperationInfo], None] | None = None,
    ) -> OperationInfo:
        """Waits until an operation is done, or for so many seconds, and returns what it is then."""
        end = None if wait_s is None else time.monotonic() + wait_s
        while True:
            most_s = create_verbs.LOOK_S if on_progress is None else create_verbs.PROGRESS_S
            left_s = most_s if end is None else min(most_s, max(0.0, end - time.monotonic()))
            operation = self._run(create_verbs.wait_operation(name, left_s))
            if on_progress is not None:
                on_progress(operation)
            if operation.done or (end is not None and time.monotonic() >= end):
                return operation

    def get_operation(self, name: str) -> OperationInfo:
        """An operation, `operations/<id>`, as it is now. Raises JobNotFoundError."""
        return self._run(create_verbs.get_operation(name))

    def list_operations(self, page_size: int = 0) -> Iterator[OperationInfo]:
        """All operations, newest first, fetched page by page (0: the server's page size)."""
        token: str | None = ""
        while token is not None:
            page = self._run(create_verbs.list_operations(page_size, token))
            yield from page.operations
            token = page.next_page_token or None

    def cancel_operation(self, name: str) -> None:
        """Has an operation end as cancelled, unless it has ended already."""
        self._run(create_verbs.cancel_operation(name))

    def delete_operation(self, name: str) -> None:
        """Forgets an operation that has ended. Raises JobUnfinishedError."""
        self._run(create_verbs.delete_operation(name))

    def list_methods(self) -> MethodList:
        """The server's methods, with their sizes for its model."""
        return self._run(verbs.list_methods())

    def server_status(self) -> ServerStatus:
        """What the server does now, and did since it started."""
        return self._run(verbs.server_status())

    def generate(
        self,
        context: str = "",
        *,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = ignore_waiting,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continues the context `contexts/<id>` by a question, a text, tokens or messages (exactly one of them).

        context: "" where these are everything from the beginning. patience_s: how long a request
        that a busy server refuses is repeated, each time when the server says. on_wait: told now and then what an
        accepted request waits for. Errors are raised while the generation is read. Raises InvalidArgumentError here for
        values that no message can carry.
        """
        request: generation_pb2.GenerateRequest = verbs.generate_request(context, options)
        return Generation(
            partial(self._generations.Generate, request, metadata=self._metadata),
            self._translate,
            timeout_s=timeout_s or self._timeout_s,
            patience_s=patience_s,
            on_wait=on_wait,
        )

    def batch_generate(
        self, context: str, requests: Sequence[GenerateOptions], *, timeout_s: float | None = None
    ) -> Batch:
        """Continues one context, or none, by many prompts, 1 to 1,000: as many at once as the server has sessions."""
        request = verbs.batch_request(context, requests)
        options = {"timeout": timeout_s or self._timeout_s, "metadata": self._metadata}
        return Batch(partial(self._generations.BatchGenerate, request, **options), request, self._translate)

    def tokenize(self, content: str | Sequence[ChatMessage] | Conversation) -> TokenizedText:
        """A text, or a conversation from its beginning, as the model's tokens."""
        return self._run(verbs.tokenize(content))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._run(verbs.detokenize(ids))

    def count_tokens(self, content: str | Sequence[ChatMessage] | Conversation) -> int:
        """How many tokens these would be."""
        return self._run(verbs.count_tokens(content))

    def _run(self, call: Call[ReplyT]) -> ReplyT:
        send: Any = self._channel.unary_unary(
            call.path, type(call.request).SerializeToString, call.response.FromString
        )
        try:
            response = send(call.request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None
        return call.read(response)

    def _translate(self, error: grpc.RpcError) -> SparseKVError:
        return translate(error, self._address)
