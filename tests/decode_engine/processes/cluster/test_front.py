"""The front door before two servers, without Ray: the same answers, and what becomes of calls whose replica is gone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from decode_engine.errors import NotReadyError
from decode_engine.gateway.serving import Gateway
from decode_engine.processes.cluster import tries
from decode_engine.processes.cluster.front import FrontDoor
from decode_engine.processes.cluster.tries import asked_by_http, asked_by_rpc
from decode_engine.rpc.client import Client
from decode_engine.rpc.routing.router import Replica
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.calls import Limits
from index_store.errors import ContextNotFoundError, InvalidArgumentError
from sparsekv.v1 import context_pb2, generation_pb2
from tests.support.serving.front import GONE
from tests.support.serving.raw_http2 import GENERATE, RawConnection
from tests.support.waiting import wait_until

ABSENT = "contexts/" + "0" * 64


@pytest.fixture(scope="module")
def served(server: DecodeServer) -> Iterator[Replica]:
    with Gateway("127.0.0.1:0", server.grpc) as gateway:
        yield Replica("served", server.address, gateway.url, store="here")


@pytest.fixture
def front(served: Replica) -> Iterator[FrontDoor]:
    with FrontDoor("127.0.0.1:0", "127.0.0.1:0", replicas=[GONE, served]) as door:
        yield door


def answer(address: str, context: str) -> str:
    with (
        Client(address) as client,
        client.generate(context, text="Who?", max_tokens=6, seed=3, temperature=1.0) as generation,
    ):
        return generation.read()


def test_answers_are_those_of_the_server_though_one_replica_is_gone(
    front: FrontDoor, server: DecodeServer, lamp: str
) -> None:
    expected = answer(server.address, lamp)
    assert [answer(front.address, lamp) for _ in range(4)] == [expected] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_http_answers_are_those_of_the_server(front: FrontDoor, served: Replica, stream: bool) -> None:
    body = {
        "model": "model",
        "prompt": "Who?",
        "max_tokens": 6,
        "seed": 3,
        "context": "lamp",
        "stream": stream,
    }

    def texts(url: str) -> list[str]:
        with httpx.Client(base_url=url, timeout=60) as web:
            reply = web.post("/v1/completions", json=body)
        assert reply.status_code == 200
        if not stream:
            return [each["text"] for each in reply.json()["choices"]]
        assert reply.text.endswith("data: [DONE]\n\n")
        return [line.partition('"text":')[2].partition(',"logprobs"')[0] for line in reply.text.splitlines()]

    assert texts(front.url) == texts(served.http)


def test_uploads_and_reflection_go_to_the_replica_that_is_there(front: FrontDoor) -> None:
    """Their callers send several messages: none is lost where nobody took the first."""
    with Client(front.address) as client:
        for _ in range(4):
            assert client.upload_document(b"the keeper " * 200_000).size_bytes == 2_200_000
    with grpc.insecure_channel(front.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        for _ in range(4):
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (told,) = stub.ServerReflectionInfo(iter([asked]), timeout=60)
            assert "sparsekv.v1.GenerationService" in str(told)


def test_a_body_that_says_it_is_too_large_is_not_waited_for(front: FrontDoor) -> None:
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=60) as raw:
        raw.sendall(b"POST /v1/contexts HTTP/1.1\r\nhost: x\r\ncontent-length: 1099511627776\r\n\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 413")


def test_what_no_store_has_is_told_as_the_server_tells_it(front: FrontDoor, served: Replica) -> None:
    with Client(front.address) as client, pytest.raises(ContextNotFoundError, match="no context"):
        client.get_context(ABSENT)
    told = [httpx.get(f"{url}/v1/contexts/nothing") for url in (front.url, served.http)]
    assert told[0].status_code == told[1].status_code == 404
    assert told[0].json() == told[1].json()


def test_a_refusal_that_comes_at_once_is_told(front: FrontDoor) -> None:
    """Though the caller's message may still be on its way, by calls that are never made twice."""
    with grpc.insecure_channel(front.address) as channel:
        call = channel.unary_unary("/sparsekv.v1.ContextService/Nothing")
        for _ in range(100):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_call_waits_for_a_replica_and_is_then_told_that_none_is_there(
    monkeypatch: pytest.MonkeyPatch, lamp: str
) -> None:
    monkeypatch.setattr(tries, "PATIENCE_S", 0.2)
    with FrontDoor("127.0.0.1:0", "127.0.0.1:0") as door, Client(door.address, timeout_s=30) as client:
        health = httpx.get(f"{door.url}/health")
        assert health.status_code == 503
        assert health.headers["x-request-id"]
        assert httpx.get(f"{door.url}/live").status_code == 200
        with (
            pytest.raises(NotReadyError, match="no replica serves"),
            client.generate(lamp, text="Who?") as found,
        ):
            found.read()


def test_a_caller_hears_that_no_replica_is_there_before_its_deadline(lamp: str) -> None:
    """And no other reason, though the client asks again by itself, which waits a second time."""
    with (
        FrontDoor("127.0.0.1:0", "127.0.0.1:0", replicas=[GONE]) as door,
        Client(door.address, timeout_s=3) as client,
        pytest.raises(NotReadyError, match=r"try again later|do not answer"),
        client.generate(lamp, text="Who?") as found,
    ):
        found.read()


def test_callers_that_send_or_read_nothing_are_given_up(
    served: Replica, lamp: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(message_s=0.3, unread_s=0.3)
    sent = generation_pb2.GenerateRequest(context=lamp, text="Who?", max_tokens=50).SerializeToString()
    with (
        caplog.at_level(logging.DEBUG),
        FrontDoor("127.0.0.1:0", "127.0.0.1:0", replicas=[served], limits=limits) as door,
        RawConnection(door.address, window=0) as raw,
    ):
        raw.call(GENERATE)
        raw.call(GENERATE, sent)
        wait_until(lambda: {"CALL_UNFINISHED", "ANSWER_UNREAD"} <= reasons(caplog))


def reasons(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {str(getattr(record, "reason", "")) for record in caplog.records}


def test_a_call_goes_to_a_replica_that_comes_while_it_waits(served: Replica, lamp: str) -> None:
    with FrontDoor("127.0.0.1:0", "127.0.0.1:0") as door:
        door.update([GONE])
        with (
            Client(door.address) as client,
            client.generate(lamp, text="Who?", max_tokens=2, seed=1) as generation,
        ):
            door.update([GONE, served])
            generation.read()
        assert generation.summary.context == lamp


def test_draining_through_the_front_door_is_refused(front: FrontDoor) -> None:
    with Client(front.address) as client, pytest.raises(InvalidArgumentError, match="ops/cluster down"):
        client.drain()


def test_what_a_call_is_about_is_read_from_its_first_message() -> None:
    generate = generation_pb2.GenerateRequest(context=ABSENT, text="x").SerializeToString()
    change = context_pb2.UpdateContextRequest(context=context_pb2.Context(name=ABSENT)).SerializeToString()
    generation, contexts = "/sparsekv.v1.GenerationService/", "/sparsekv.v1.ContextService/"
    assert asked_by_rpc(f"{generation}Generate", generate, {"x-session-id": "s"}).session == "s"
    assert asked_by_rpc(f"{generation}Generate", generate, {}).context == ABSENT
    assert asked_by_rpc(f"{contexts}UpdateContext", change, {}).context == ABSENT
    assert not asked_by_rpc(f"{contexts}DeleteContext", b"", {}).repeatable
    assert asked_by_rpc(f"{contexts}CreateContext", b"", {}).attended
    assert asked_by_rpc("/google.longrunning.Operations/GetOperation", b"", {}).attended
    assert asked_by_rpc(f"{generation}Generate", b"\xff\xff", {}).context == ""


def test_what_a_request_is_about_is_read_from_its_path_and_body() -> None:
    body = b'{"context": "lamp", "prompt_cache_key": "mine"}'
    asked = asked_by_http("POST", "/v1/chat/completions", {}, body)
    assert (asked.context, asked.session) == ("lamp", "mine")
    assert asked_by_http("POST", "/v1/completions", {}, b"[" * 100_000).context == ""
    assert asked_by_http("GET", "/v1/contexts/a%20b/tokens", {}, b"").context == "a b"
    assert not asked_by_http("DELETE", "/v1/contexts/lamp", {}, b"").repeatable
    assert not asked_by_http("POST", "/v1/contexts", {}, b"").repeatable
    assert asked_by_http("GET", "/v1/operations/x", {}, b"").attended
