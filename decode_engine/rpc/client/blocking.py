"""The client for threads: the verbs of `AsyncClient`, each run in the thread that calls it.

There is no loop and no thread behind it. So it works where a loop runs, in processes that are forked, and when the
interpreter ends; callbacks come in the caller's thread, and an interrupt reaches the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from decode_engine.rpc.client.answers import Generation, ignore_waiting
from decode_engine.rpc.client.asynchronous import AsyncClient
from decode_engine.rpc.client.batch_results import Batch
from decode_engine.rpc.client.reading import finish
from decode_engine.rpc.client.repeats import BlockingWire
from decode_engine.rpc.client.verbs import GenerateOptions
from decode_engine.rpc.door.options import DEFAULT_LISTEN, Credentials
from sparsekv.v1.values import Waiting

P = ParamSpec("P")
ReplyT = TypeVar("ReplyT")


def _now(
    verb: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, ReplyT]],
) -> Callable[Concatenate[Client, P], ReplyT]:
    """The verb with one reply."""

    @wraps(verb)
    def blocking(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> ReplyT:
        return finish(verb(self._core, *args, **kwargs))

    return blocking


def _each(
    verb: Callable[Concatenate[AsyncClient, P], AsyncIterator[ReplyT]],
) -> Callable[Concatenate[Client, P], Iterator[ReplyT]]:
    """The verb that lists."""

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
    """A connection to a server, usable from several threads."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        return Generation(self._core._generation(context, timeout_s, patience_s, options), on_wait)

    def batch_generate(
        self, context: str, requests: Sequence[GenerateOptions], *, timeout_s: float | None = None
    ) -> Batch:
        """As `AsyncClient.batch_generate`."""
        return Batch(*self._core._batch(context, requests, timeout_s))
