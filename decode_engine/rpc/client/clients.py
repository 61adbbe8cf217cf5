"""The clients: for coroutines, and for threads."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.rpc.client.answers import AsyncGeneration, Batch, Generation, finish, ignore_waiting
from decode_engine.rpc.client.connection import (
    HEALTH_TIMEOUT_S,
    REPEATED,
    AsyncWire,
    BlockingWire,
    Repeats,
    ServerHealth,
    Stream,
    channel_credentials,
)
from decode_engine.rpc.client.verbs import (
    METHODS,
    Call,
    GenerateOptions,
    Verbs,
    batch_request,
    generate_request,
)
from decode_engine.rpc.door.options import DEFAULT_LISTEN, Credentials
from decode_engine.rpc.transport.starting import PHASE_KEY
from sparsekv.v1.values import Waiting

ReplyT = TypeVar("ReplyT")


class AsyncClient(Verbs):
    """A connection to a server, for one event loop; to be made where that runs."""

    def __init__(
        self,
        address: str = DEFAULT_LISTEN,
        *,
        timeout_s: float | None = None,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
        wire: Callable[[str, grpc.ChannelCredentials | None], BlockingWire] = AsyncWire,
    ) -> None:
        """timeout_s: deadline of every call that is not given one of its own; None waits as long as it takes.

        credentials: the token and certificates to show, and whom to trust. Raises InvalidArgumentError for a file that
        cannot be read.
        """
        self._address = address
        self._timeout_s = timeout_s
        shown = () if credentials.token is None else (("authorization", f"Bearer {credentials.token}"),)
        self._metadata: tuple[tuple[str, str], ...] = shown
        self._wire = wire(address, channel_credentials(credentials))
        self._channel = self._wire.channel
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
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
        phase = str(dict(trailing or ()).get(PHASE_KEY, ""))
        return ServerHealth(reply.status == health_pb2.HealthCheckResponse.SERVING, phase)

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
        request = generate_request(context, options)
        return AsyncGeneration(self._stream("Generate", request, timeout_s, patience_s), on_wait)

    def batch_generate(
        self, context: str, requests: Sequence[GenerateOptions], *, timeout_s: float | None = None
    ) -> Batch:
        """Continues one context, or none, by many prompts, 1 to 1,000: as many at once as the server has sessions."""
        request = batch_request(context, requests)
        return Batch(self._stream("BatchGenerate", request, timeout_s), request)

    def _method(self, name: str) -> Any:
        method = METHODS[name]
        ways = {False: "unary", True: "stream"}
        way = f"{ways[method.client_streaming]}_{ways[method.server_streaming]}"
        sent, read = (GetMessageClass(each) for each in (method.input_type, method.output_type))
        path = f"/{method.containing_service.full_name}/{name}"
        return getattr(self._channel, way)(path, sent.SerializeToString, read.FromString)

    def _stream(
        self, method: str, request: object, timeout_s: float | None, patience_s: float = 0.0
    ) -> Stream[Any]:
        repeats, send = Repeats(self._address, timeout_s or self._timeout_s, patience_s), self._method(method)
        wire, metadata = self._wire, self._metadata
        return Stream(
            wire, lambda left_s: wire.watched(send(request, timeout=left_s, metadata=metadata)), repeats
        )

    async def run(self, call: Call[ReplyT]) -> ReplyT:
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


P = ParamSpec("P")


def _now(
    verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, ReplyT]],
) -> Callable[Concatenate[Client, P], ReplyT]:

    @wraps(verb)
    def blocking(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> ReplyT:
        return finish(verb(self._core, *args, **kwargs))

    return blocking


def _each(
    verb: Callable[Concatenate[AsyncClient, P], AsyncIterator[ReplyT]],
) -> Callable[Concatenate[Client, P], Iterator[ReplyT]]:

    @wraps(verb)
    def blocking(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[ReplyT]:
        items = verb(self._core, *args, **kwargs)
        while True:
            try:
                item = finish(_next(items))
            except StopAsyncIteration:
                return
            yield item

    return blocking


async def _next(items: AsyncIterator[ReplyT]) -> ReplyT:
    return await anext(items)


class Client:
    """A connection to a server, usable from several threads: each verb of `AsyncClient` runs in the one that calls it.

    There is no loop and no thread behind it. So it works where a loop runs, in processes that are forked, and when the
    interpreter ends; callbacks come in the caller's thread, and an interrupt reaches the call.
    """

    def __init__(
        self,
        address: str = DEFAULT_LISTEN,
        *,
        timeout_s: float | None = None,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
    ) -> None:
        """As `AsyncClient`."""
        self._address = address
        self._core = AsyncClient(address, timeout_s=timeout_s, credentials=credentials, wire=BlockingWire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    close = _now(AsyncClient.close)
    is_serving = _now(AsyncClient.is_serving)
    health = _now(AsyncClient.health)
    list_contexts = _each(AsyncClient.list_contexts)
    list_page = _now(AsyncClient.list_page)
    get_context = _now(AsyncClient.get_context)
    find_context = _now(AsyncClient.find_context)
    update_context = _now(AsyncClient.update_context)
    delete_context = _now(AsyncClient.delete_context)
    warm_context = _now(AsyncClient.warm_context)
    create_context = _now(AsyncClient.create_context)
    upload_document = _now(AsyncClient.upload_document)
    wait_operation = _now(AsyncClient.wait_operation)
    get_operation = _now(AsyncClient.get_operation)
    list_operations = _each(AsyncClient.list_operations)
    cancel_operation = _now(AsyncClient.cancel_operation)
    delete_operation = _now(AsyncClient.delete_operation)
    list_methods = _now(AsyncClient.list_methods)
    server_status = _now(AsyncClient.server_status)
    drain = _now(AsyncClient.drain)
    tenants = _now(AsyncClient.tenants)
    tokenize = _now(AsyncClient.tokenize)
    detokenize = _now(AsyncClient.detokenize)
    count_tokens = _now(AsyncClient.count_tokens)

    def generate(
        self,
        context: str = "",
        *,
        timeout_s: float | None = None,
        patience_s: float = 0.0,
        on_wait: Callable[[Waiting], None] = ignore_waiting,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """As `AsyncClient.generate`."""
        request = generate_request(context, options)
        return Generation(self._core._stream("Generate", request, timeout_s, patience_s), on_wait)

    def batch_generate(
        self, context: str, requests: Sequence[GenerateOptions], *, timeout_s: float | None = None
    ) -> Batch:
        """As `AsyncClient.batch_generate`."""
        request = batch_request(context, requests)
        return Batch(self._core._stream("BatchGenerate", request, timeout_s), request)
