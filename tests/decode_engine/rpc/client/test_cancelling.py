"""Answers and batches that are cancelled while the client begins their call again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from decode_engine.errors import CancelledError, ServerUnreachableError
from decode_engine.rpc.client.answers import AsyncGeneration, Generation
from decode_engine.rpc.client.batch_results import AsyncBatch, Batch
from index_store.errors import SparseKVError
from sparsekv.v1 import generation_pb2


class Refused:
    """A call that no server takes."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __iter__(self) -> Iterator[Any]:
        raise grpc.RpcError

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise grpc.RpcError
        yield


class Calls:
    """Makes calls, and cancels what reads them: while the second one is made, or once the first one was refused."""

    def __init__(self, *, while_made: bool) -> None:
        self.while_made = while_made
        self.made: list[Refused] = []
        self.reading: Any = None

    def start(self, timeout: float | None = None) -> Refused:
        if self.made and self.while_made:
            self.reading.cancel()
        self.made.append(Refused())
        return self.made[-1]

    def translate(self, error: grpc.RpcError) -> SparseKVError:
        if not self.while_made:
            self.reading.cancel()
        if len(self.made) > 1 and self.made[-1].cancelled:
            return CancelledError("the client ended the call")
        return ServerUnreachableError("no server")


REQUEST = generation_pb2.BatchGenerateRequest(requests=[generation_pb2.GenerateRequest(text="a")])


@pytest.mark.parametrize(
    "make",
    [
        lambda calls: Generation(calls.start, calls.translate),
        lambda calls: Batch(calls.start, REQUEST, calls.translate),
    ],
)
def test_a_call_that_is_made_while_it_is_cancelled_is_ended(make: Callable[[Calls], Any]) -> None:
    calls = Calls(while_made=True)
    calls.reading = make(calls)
    with pytest.raises(CancelledError):
        list(calls.reading)
    assert [call.cancelled for call in calls.made] == [True, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda calls: AsyncGeneration(calls.start, calls.translate),
        lambda calls: AsyncBatch(calls.start, REQUEST, calls.translate),
    ],
)
def test_coroutines_that_cancel_between_two_calls_make_no_more(make: Callable[[Calls], Any]) -> None:
    calls = Calls(while_made=False)

    async def read() -> None:
        calls.reading = make(calls)
        async for _ in calls.reading:
            pass

    with pytest.raises(ServerUnreachableError):
        asyncio.run(read())
    assert len(calls.made) == 1
