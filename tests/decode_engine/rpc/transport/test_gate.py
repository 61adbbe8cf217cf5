"""What clients leave undone, at the listener: it ends, it holds up nobody else, and it stands in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_engine.errors import DeadlineExceededError
from decode_engine.rpc.client import Client
from decode_engine.rpc.client.connection import translate
from decode_engine.rpc.transport import asker
from decode_engine.rpc.transport import listener as listener_module
from decode_engine.rpc.transport.calls import Call, Limits, Traffic
from decode_engine.rpc.transport.listener import Listener
from decode_engine.rpc.transport.status import error_info
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.support.serving.raw_http2 import ACK, CHECK, GENERATE, GOAWAY, PING, REFLECT, RawConnection
from tests.support.serving.service import wait_until

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
TEXT = generation_pb2.GenerateRequest(text="x").SerializeToString()


class Scripted(context_pb2_grpc.ContextServiceServicer, generation_pb2_grpc.GenerationServiceServicer):
    """Answers ten pieces, and counts the answers that it is at. work: what a deletion does with the store."""

    def __init__(self) -> None:
        self.answering = 0
        self.work: Callable[[], object] = partial(time.sleep, 0.2)
        self.traffic: Traffic | None = None

    async def GetContext(self, request: Any, call: Call) -> Any:
        self.traffic = call.traffic()
        return context_pb2.Context(name=request.name)

    async def DeleteContext(self, request: Any, call: Call) -> Any:
        await call.run(self.work)
        return Empty()

    async def Generate(self, request: Any, call: Call) -> AsyncIterator[Any]:
        self.answering += 1
        try:
            for _ in range(10):
                yield generation_pb2.GenerateResponse(text="piece " * 20)
                await asyncio.sleep(0)
        finally:
            self.answering -= 1


@contextmanager
def listening(**limits: Any) -> Iterator[tuple[Listener, Scripted]]:
    scripted = Scripted()

    def register(server: Any) -> None:
        context_pb2_grpc.add_ContextServiceServicer_to_server(scripted, server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, server)

    listener = Listener("127.0.0.1:0", ["sparsekv.v1.ContextService"], register, Limits(**limits))
    listener.set_serving(True)
    try:
        yield listener, scripted
    finally:
        listener.begin_stop(0).result(60)
        listener.close()


def serving(address: str) -> bool:
    """Whether health says so, to a client that has just come."""
    with Client(address, timeout_s=60) as client:
        return client.is_serving()


def messages(caplog: pytest.LogCaptureFixture, reason: str) -> list[str]:
    """The log lines of calls that ended so."""
    return [record.getMessage() for record in caplog.records if getattr(record, "reason", "") == reason]


def test_a_call_whose_message_does_not_come_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), listening(message_s=0.2) as (listener, _):
        with RawConnection(listener.address) as raw:
            for method in (GENERATE, CHECK, REFLECT, "/sparsekv.v1.ContextService/ListContexts"):
                assert raw.status(raw.call(method)) == DEADLINE_EXCEEDED
            assert raw.is_open()
        wait_until(lambda: len(messages(caplog, "CALL_UNFINISHED")) == 4)
        assert "peer=ipv4:127.0.0.1:" in messages(caplog, "CALL_UNFINISHED")[0]


def test_many_half_open_calls_hold_up_nobody_and_take_no_threads() -> None:
    with listening(message_s=60, unfinished=20) as (listener, scripted):
        assert serving(listener.address)
        before = threading.active_count()
        with RawConnection(listener.address) as raw:
            streams = [raw.call(GENERATE) for _ in range(100)]
            streams += [raw.call(REFLECT) for _ in range(100)]
            assert raw.status(streams[0]) == DEADLINE_EXCEEDED  # the oldest make room
            assert serving(listener.address)
            with Client(listener.address) as client:
                assert client.generate("contexts/x", text="a").read()
                client.get_context("contexts/x")
            assert scripted.traffic.unfinished <= 20
            assert scripted.traffic.open <= 40
            # Threads of others may come and go: these calls would have one each for as long as they are open.
            wait_until(lambda: threading.active_count() <= before + 2)


def test_an_answer_that_is_not_read_ends_the_work_and_then_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO),
        listening(unread_s=0.5, abandoned=3) as (listener, scripted),
        RawConnection(listener.address, window=0) as reads_nothing,
        RawConnection(listener.address, window=0) as reads_one_late,
    ):
        reads_one_late.call(GENERATE, TEXT)
        for _ in range(3):
            reads_nothing.call(GENERATE, TEXT)
        wait_until(lambda: len(messages(caplog, "ANSWER_UNREAD")) == 4)
        wait_until(lambda: scripted.answering == 0)
        wait_until(lambda: not reads_nothing.is_open(0.05))
        assert reads_one_late.is_open()
        assert serving(listener.address)
        assert "ending the connection of ipv4:127.0.0.1:" in caplog.text


def test_a_watcher_that_reads_nothing_does_not_hold_up_health() -> None:
    with listening(unread_s=60) as (listener, _), RawConnection(listener.address, window=0) as raw:
        request = health_pb2.HealthCheckRequest().SerializeToString()
        raw.call("/grpc.health.v1.Health/Watch", request)
        with grpc.insecure_channel(listener.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            listener.set_serving(False)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        assert not serving(listener.address)


def test_bytes_that_are_no_message_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        listening() as (listener, _),
        grpc.insecure_channel(listener.address) as channel,
    ):
        for call in (
            channel.unary_unary("/sparsekv.v1.ContextService/GetContext"),
            channel.unary_stream(GENERATE),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(b"\xff\xff\xff", timeout=60))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            info = error_info(caught.value)
            assert info.reason == "INVALID_ARGUMENT"
        wait_until(lambda: len(messages(caplog, "INVALID_ARGUMENT")) == 2)
        assert "3 bytes that are no request of GetContext" in caplog.text


def test_a_request_that_is_too_large_is_refused_before_and_after_it_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), listening() as (listener, _), Client(listener.address) as client:
        with pytest.raises(InvalidArgumentError, match=f"expected at most {MAX_REQUEST_BYTES}"):
            client.generate("contexts/x", text="x" * MAX_REQUEST_BYTES)
        request = context_pb2.GetContextRequest(name="x" * MAX_REQUEST_BYTES)
        with grpc.insecure_channel(listener.address) as channel, pytest.raises(grpc.RpcError) as caught:
            context_pb2_grpc.ContextServiceStub(channel).GetContext(request)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # by gRPC itself
        assert isinstance(translate(caught.value, listener.address), InvalidArgumentError)
        wait_until(lambda: any(getattr(record, "rpc", "") == "GetContext" for record in caplog.records))


def test_pings_of_those_who_wait_are_no_offence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_PING_MS", 40)
    with listening(message_s=60) as (listener, _), RawConnection(listener.address) as raw:
        raw.call(GENERATE)
        for _ in range(5):
            time.sleep(0.15)
            raw.ping()
            # Only then is the time to the next one what the server sees, however busy the machine is.
            assert any(frame.kind == PING and frame.flags == ACK for frame in raw.frames(60.0))
        assert raw.is_open()
        raw.ping(8)  # a flood of them is
        assert any(frame.kind == GOAWAY for frame in raw.frames(60.0))


def test_connections_are_bounded_and_idle_ones_ended() -> None:
    with listening(connections=3, idle_s=600) as (listener, _):
        raws = [RawConnection(listener.address) for _ in range(5)]
        wait_until(lambda: sum(raw.is_open(0.05) for raw in raws) == 3)
        assert all(raw.is_open(0.05) for raw in raws[:3])
        for raw in raws:
            raw.socket.close()
    with listening(connections=3, idle_s=1) as (listener, _):
        raws = [RawConnection(listener.address) for _ in range(3)]
        wait_until(lambda: not any(raw.is_open(0.05) for raw in raws))
        assert serving(listener.address)
        for raw in raws:
            raw.socket.close()


def test_streams_of_one_connection_are_bounded() -> None:
    with listening(streams=2, message_s=60) as (listener, scripted), RawConnection(listener.address) as raw:
        assert raw.is_open()  # and the server's settings are known
        for _ in range(5):
            raw.call(GENERATE)
        with Client(listener.address) as client:
            client.get_context("contexts/x")
        assert scripted.traffic.open <= 3


def test_store_work_takes_a_few_threads_however_many_ask() -> None:
    with listening() as (listener, _), Client(listener.address) as client:
        client.get_context("contexts/x")
        before = threading.active_count()
        with grpc.insecure_channel(listener.address) as channel:
            stub = context_pb2_grpc.ContextServiceStub(channel)
            calls = [stub.DeleteContext.future(context_pb2.DeleteContextRequest()) for _ in range(100)]
            wait_until(lambda: any(call.done() for call in calls))
            assert threading.active_count() <= before + 4  # the clients' own
            codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.OK) >= 64
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_store_work_that_hangs_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "_ANSWER_S", 0.05)
    with listening() as (listener, scripted), Client(listener.address) as client:
        responding = threading.Event()
        scripted.work = partial(responding.wait, 60)
        with pytest.raises(DeadlineExceededError, match="disk may not respond"):
            client.delete_context("contexts/x")
        assert serving(listener.address)
        responding.set()
