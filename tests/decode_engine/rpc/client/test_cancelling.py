"""Streams that are cancelled while the client begins their call again."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from decode_engine.errors import CancelledError, ServerUnreachableError
from decode_engine.rpc.client.answers import finish
from decode_engine.rpc.client.connection import AsyncWire, BlockingWire, Repeats, Stream
from index_store.errors import ContextBusyError, SparseKVError


class Refused:
    """A call that no server takes."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __next__(self) -> Any:
        raise grpc.RpcError

    async def read(self) -> Any:
        raise grpc.RpcError


class Calls(Repeats):
    """Makes calls, and cancels what reads them: while the second one is made, or once the first one was refused."""

    def __init__(self, *, while_made: bool) -> None:
        super().__init__("nowhere", None)
        self.while_made = while_made
        self.made: list[Refused] = []
        self.stream: Any = None

    def start(self, left_s: float | None) -> Refused:
        if self.made and self.while_made:
            self.stream.cancel()
        self.made.append(Refused())
        return self.made[-1]

    def translate(self, error: grpc.RpcError) -> SparseKVError:
        if not self.while_made:
            self.stream.cancel()
        if len(self.made) > 1 and self.made[-1].cancelled:
            return CancelledError("the client ended the call")
        return ServerUnreachableError("no server")


@pytest.mark.parametrize("while_made", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_stream_that_is_cancelled_while_it_begins_again_ends(blocking: bool, while_made: bool) -> None:
    calls = Calls(while_made=while_made)

    async def read() -> None:
        wire = (BlockingWire if blocking else AsyncWire)("127.0.0.1:1", None)
        calls.stream = Stream(wire, calls.start, calls)
        await calls.stream.read()

    with pytest.raises(CancelledError if while_made else ServerUnreachableError):
        finish(read()) if blocking else asyncio.run(read())
    assert [call.cancelled for call in calls.made] == [True] * (2 if while_made else 1)


def test_where_nobody_listens_one_attempt_tells() -> None:
    repeats = Repeats("127.0.0.1:1", None)
    for nobody in (
        ServerUnreachableError("no server answers (failed to connect to all addresses)"),
        ContextBusyError("a job writes it"),
    ):
        with pytest.raises(type(nobody)):
            repeats.wait_s(nobody)
    stopped = ServerUnreachableError("no server answers (Socket closed)")
    assert [0 <= repeats.wait_s(stopped) <= longest_s for longest_s in (0.1, 0.2, 0.4)] == [True] * 3
    with pytest.raises(ServerUnreachableError):
        repeats.wait_s(stopped)
