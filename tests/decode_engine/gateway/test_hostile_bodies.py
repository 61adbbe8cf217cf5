"""Bodies that are made to cost more than they say: refused by what they are, and before they are gone through."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from decode_engine.gateway import exchange, resources
from decode_engine.gateway.exchange import Bounds
from decode_engine.gateway.serving import Gateway
from decode_engine.gateway.wire import messages_shape
from decode_engine.gateway.wire.bodies import chat_order, completion_order, response_order
from decode_engine.orders.fields import shown
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError
from tests.decode_engine.gateway.test_clients import _read, raw
from tests.support.serving.service import wait_until

MANY = 100_000
SAID: Any = {"role": "user", "content": "x"}
ASK: Any = {"model": "model", "messages": [SAID], "context": "lamp"}


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        (chat_order, "messages", [{}] * MANY),
        (chat_order, "messages", [SAID] * MANY),
        (chat_order, "tools", [{"type": "function", "function": {"name": "x"}}] * MANY),
        (chat_order, "stop", ["x"] * MANY),
        (chat_order, "choices", ["x"] * MANY),
        (chat_order, "logit_bias", {str(number): 1 for number in range(MANY)}),
        (chat_order, "tool_choice", [[]] * MANY),
        (chat_order, "response_format", {str(number): 1 for number in range(MANY)}),
        (response_order, "input", [{"type": "function_call"}] * MANY),
        (completion_order, "prompt", {"x": ["y"] * MANY}),
    ],
)
def test_what_is_too_many_is_not_looked_at_one_by_one(
    read: Callable[[Any], Any], name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "messages": [SAID]} if read is chat_order else {"model": "m"}
    looked, plain = [], messages_shape._plain

    def count(number: int, message: Any) -> Any:
        looked.append(message)
        return plain(number, message)

    monkeypatch.setattr(messages_shape, "_plain", count)
    with pytest.raises(InvalidArgumentError) as caught:
        read({**body, name: value})
    assert caught.value.metadata["field"].partition(".")[0] == name
    assert len(looked) <= 1
    assert len(caught.value.message) < 300


def test_nothing_is_collected_while_many_lists_are_read() -> None:
    passes: list[str] = []

    def count(phase: str, _: Any) -> None:
        passes.append(phase)

    body = b"[" + b"[]," * MANY + b"[]]"
    gc.callbacks.append(count)
    try:
        found = exchange.parse_json(body)
        behind = len(passes)
        again = json.loads(body)
    finally:
        gc.callbacks.remove(count)
    assert len(found) == len(again) == MANY + 1
    assert behind < 10 < len(passes)  # some may be due once they are allowed again
    with pytest.raises(InvalidArgumentError):
        exchange.parse_json(b"[")
    assert gc.isenabled()


def test_large_values_are_quoted_in_short() -> None:
    assert shown([1] * MANY) == "a list of 100000"
    assert shown({str(number): 1 for number in range(MANY)}) == "an object of 100000"
    deep: Any = 1
    for _ in range(MANY):
        deep = [deep]
    assert shown(deep) == '[[[["..."]]]]'
    assert shown("x" * MANY) == '"' + "x" * 76 + "..."


def deep(depth: int, within: str) -> bytes:
    body = json.dumps({**ASK, **json.loads(within)})
    return body.replace('"HERE"', '{"a":' * depth + "1" + "}" * depth).encode()


@pytest.mark.parametrize("depth", [500, 940, 960, 980, 990, 100_000])
@pytest.mark.parametrize(
    "within",
    [
        '{"messages": [{"role": "user", "content": "HERE"}]}',
        '{"messages": "HERE"}',
        '{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "HERE"}}}',
        '{"tools": [{"type": "function", "function": {"name": "x", "parameters": "HERE"}}]}',
        '{"HERE": 1, "tool_choice": "HERE"}',
    ],
)
def test_nesting_is_refused_and_no_fault(web: httpx.Client, lamp: str, depth: int, within: str) -> None:
    reply = web.post("/v1/chat/completions", content=deep(depth, within))
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/contexts"])
@pytest.mark.parametrize("half", [b"\\ud800", b"\xed\xa0\x80", b"\\udc00\\ud800"])
def test_half_characters_are_refused_wherever_they_are(web: httpx.Client, path: str, half: bytes) -> None:
    for body in (b'{"model": "%s"}', b'{"model": "m", "text": {"a": ["%s"]}}', b'{"%s": 1}'):
        reply = web.post(path, content=body % half)
        assert reply.status_code == 400
        assert "the body is no JSON" in reply.json()["error"]["message"]


def test_both_halves_are_a_character(web: httpx.Client, lamp: str) -> None:
    body = json.dumps({**ASK, "messages": [{"role": "user", "content": "\U0001f600"}], "max_tokens": 1})
    assert "\\ud83d\\ude00" in body
    assert web.post("/v1/chat/completions", content=body.encode()).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {**ASK, "temperature": "HUGE"},
        {**ASK, "logit_bias": {"5": "HUGE"}},
        {**ASK, "keep": {"ttl_seconds": "HUGE"}},
        {**ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": {"minimum": "HUGE"}}}},
        {**ASK, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"a": "HUGE"}}}]},
        {**ASK, "messages": [{"role": "user", "content": [{"type": [1]}]}]},
        {**ASK, "messages": [{"role": [], "content": "x"}]},
        {**ASK, "stream_options": {"include_usage": [1]}, "stream": True},
        {**ASK, "seed": 10**4000},
    ],
)
def test_values_of_odd_kinds_are_refused(web: httpx.Client, lamp: str, body: Any) -> None:
    data = json.dumps(body).replace('"HUGE"', "1e999").encode()
    assert web.post("/v1/chat/completions", content=data).status_code == 400


def test_odd_addresses_are_refused(web: httpx.Client) -> None:
    assert web.get("/v1/contexts", params={"page_size": "9" * 5000}).status_code == 400
    assert web.get("/v1/operations", params={"colour": 1}).status_code == 400
    assert web.patch("/v1/contexts/x?colour=1", json={}).status_code == 400


def test_a_line_of_the_log_is_one(web: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "decode_engine.rpc.transport.asker"):
        web.get("/v1/contexts/a%0AINFO%20forged%1b[31m")
        web.get("/v1/nothing%0AINFO%20forged")

        def lines() -> list[str]:
            return [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]

        # A line is written behind the last byte of its answer.
        wait_until(lambda: len(lines()) >= 2, 60)
    assert len(lines()) == 2
    assert all(line.isprintable() for line in lines())


def test_bodies_of_all_requests_are_bounded_together(server: DecodeServer, lamp: str) -> None:
    """One that comes slowly holds what has come of it; what it leaves is free again when it goes."""
    large, most = 2**19, 2**20
    with Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(body_bytes=most)) as gateway:

        def status() -> int:
            return httpx.post(f"{gateway.url}/v1/completions", content=b" " * (most - large // 2)).status_code

        assert status() == 400
        with raw(gateway) as slow:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_REQUEST_BYTES}\r\n\r\n"
            slow.sendall(head.encode() + b" " * large)
            wait_until(lambda: status() == 429, 60)
            assert httpx.get(f"{gateway.url}/health").status_code == 200
        wait_until(lambda: status() == 400, 60)


def test_health_is_told_however_many_ask(server: DecodeServer) -> None:
    with Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(requests=0)) as gateway:
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 429
        assert httpx.get(f"{gateway.url}/health").status_code == 200


def test_a_file_that_comes_drop_by_drop_has_an_end(
    server: DecodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_FILE_S", 0.3)
    kind = "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 10000\r\n\r\n--b\r\n"
    with Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(head_s=1.0)) as gateway:
        answer = dripped(gateway, f"POST /v1/files HTTP/1.1\r\nHost: x\r\n{kind}")
    assert answer.startswith(b"HTTP/1.1 408"), answer


def test_who_goes_on_sending_what_was_answered_is_ended(server: DecodeServer) -> None:
    """Of a body that nobody reads any more, neither drops nor silence hold the connection."""
    head = "POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(head_s=1.0, idle_s=1000)) as gateway:
        assert dripped(gateway, head).startswith(b"HTTP/1.1 404")
        with raw(gateway) as connection:
            connection.sendall(head.encode())
            assert _read(connection).startswith(b"HTTP/1.1 404")
        with raw(gateway) as connection:  # who sends all of it may go on
            connection.sendall(head.replace("1000000", "1000").encode() + b"x" * 1000)
            time.sleep(1.5)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 200" in _read(connection)


def dripped(gateway: Gateway, begun: str) -> bytes:
    """All that comes while a client sends one byte after the other, until the connection is ended."""
    answer, until = b"", time.monotonic() + 120
    with raw(gateway) as connection:
        connection.sendall(begun.encode())
        connection.settimeout(0.05)
        while time.monotonic() < until:
            try:
                connection.sendall(b"x")
                piece = connection.recv(4096)
                if not piece:
                    return answer
                answer += piece
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                return answer
    pytest.fail("the connection is still open")
