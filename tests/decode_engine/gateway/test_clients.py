"""Clients without a token, or that send too much, read nothing, or go; bodies that cost more than they say."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode_engine.errors import EngineCrashedError
from decode_engine.gateway import exchange, generating, resources
from decode_engine.gateway.exchange import Bounds
from decode_engine.gateway.serving import HEAD_BYTES, Gateway
from decode_engine.gateway.wire import messages_shape
from decode_engine.gateway.wire.bodies import chat_order, completion_order, response_order
from decode_engine.orders.fields import shown
from decode_engine.rpc.client import Client
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.door.options import Certificates
from decode_engine.rpc.server import DecodeServer
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import InvalidArgumentError
from tests.decode_engine.conftest import Library
from tests.decode_engine.engine.fake_runner import Stream, make_client
from tests.decode_engine.gateway.conftest import MODEL
from tests.support.serving.service import loaded, wait_until
from tests.support.store import raising

CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"
LONG: Any = {"model": "model", "prompt": " The", "context": "lamp", "max_tokens": 3000, "stream": True}


@contextmanager
def raw(gateway: Gateway) -> Iterator[socket.socket]:
    host, port = gateway.address.rsplit(":", 1)
    with socket.socket() as connection:
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.connect((host, int(port)))
        yield connection


def post(path: str, body: Any) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def idle(client: Client) -> bool:
    status = client.server_status()
    return status.requests == 0


def test_a_client_that_goes_ends_its_generation(gateway: Gateway, client: Client, lamp: str) -> None:
    for stream in (True, False):
        with raw(gateway) as connection:
            connection.sendall(post("/v1/completions", {**LONG, "stream": stream}))
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            wait_until(lambda: not idle(client), 60)
        wait_until(lambda: idle(client), 60)


def test_a_client_that_reads_nothing_is_ended(server: DecodeServer, client: Client, lamp: str) -> None:
    bounds = Bounds(unread_s=0.2)
    with Gateway("127.0.0.1:0", server.grpc, bounds=bounds) as gateway, raw(gateway) as connection:
        ask = {**LONG, "n": 8, "temperature": 1, "logprobs": 20, "max_tokens": 2000}
        connection.sendall(post("/v1/completions", ask))
        wait_until(lambda: not idle(client), 60)
        wait_until(lambda: idle(client), 60)


def test_a_head_that_does_not_come_ends_the_connection(server: DecodeServer) -> None:
    with Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(head_s=1.0)) as gateway:
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost"):
            with raw(gateway) as connection:
                connection.sendall(sent)
                assert _read(connection) == b""
        with raw(gateway) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /hea")  # the next one, on the same connection
            assert b"200" not in _read(connection)


def _read(connection: socket.socket) -> bytes:
    """All that comes until the other side ends."""
    data = b""
    try:
        while piece := connection.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + b"c" * 9 * HEAD_BYTES + b"\r\n\r\n",
            431,
            "head_too_large",
        ),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_head"),
        (b"GET /health HTTP/1.1\r\nHost x\r\n\r\n", 400, "invalid_head"),
        (b"nonsense\r\n\r\n", 400, "invalid_head"),
    ],
)
def test_a_bad_head_is_told_as_all_errors_are(gateway: Gateway, head: bytes, status: int, code: str) -> None:
    with raw(gateway) as connection:
        connection.sendall(head)
        answer, _, body = _read(connection).partition(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"content-type: application/json" in answer.lower()
    assert json.loads(body)["error"]["code"] == code


def test_bodies_may_be_packed(web: httpx.Client, lamp: str) -> None:
    body = json.dumps({**LONG, "max_tokens": 2, "stream": False}).encode()
    for name, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body)), ("identity", body)):
        reply = web.post("/v1/completions", content=packed, headers={"content-encoding": name})
        assert reply.status_code == 200, reply.text
    refused = web.post("/v1/completions", content=body, headers={"content-encoding": "br"})
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    bomb = gzip.compress(b" " * (MAX_REQUEST_BYTES + 1))
    assert len(bomb) < MAX_REQUEST_BYTES // 500
    assert web.post("/v1/completions", content=bomb, headers={"content-encoding": "gzip"}).status_code == 413
    broken = web.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    assert (broken.status_code, "content-encoding" in broken.json()["error"]["message"]) == (400, True)


def test_connections_and_requests_are_bounded(server: DecodeServer, lamp: str, client: Client) -> None:
    with (
        Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(connections=2)) as gateway,
        raw(gateway),
        raw(gateway),
        raw(gateway) as third,
    ):
        assert _read(third) == b""
    with Gateway("127.0.0.1:0", server.grpc, bounds=Bounds(requests=1)) as gateway, raw(gateway) as busy:
        busy.sendall(post("/v1/completions", LONG))
        assert busy.recv(100).startswith(b"HTTP/1.1 200")
        refused = httpx.get(f"{gateway.url}/v1/models")
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "true"
        assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: idle(client), 60)


def test_bodies_are_bounded(web: httpx.Client, gateway: Gateway) -> None:
    large = web.post("/v1/completions", content=b" " * (MAX_REQUEST_BYTES + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")

    def pieces() -> Iterator[bytes]:
        for _ in range(MAX_REQUEST_BYTES // 2**16 + 2):
            yield b" " * 2**16

    assert web.post("/v1/completions", content=pieces()).status_code == 413


def test_an_order_that_nobody_takes_says_so(web: httpx.Client) -> None:
    operation = web.post("/v1/contexts", json={"text": "Nobody reads this one. " * 9}).json()
    assert "prefill-worker serve" in operation["waiting_reason"]
    path = f"/v1/operations/{operation['id']}"
    assert web.get(path).json()["waiting_reason"] == operation["waiting_reason"]
    assert web.post(f"{path}/cancel").json()["waiting_reason"] == ""


def test_contexts_come_in_pages(web: httpx.Client, lamp: str, shelf: str) -> None:
    first = web.get("/v1/contexts", params={"page_size": 1}).json()
    assert (len(first["data"]), first["has_more"]) == (1, True)
    second = web.get("/v1/contexts", params={"page_size": 1, "page_token": first["next_page_token"]}).json()
    assert second["data"][0]["id"] != first["data"][0]["id"]
    assert web.get("/v1/contexts", params={"page_token": "made up"}).status_code == 400
    refused = web.get("/v1/contexts", params={"label": ["team=law", "team"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "label")


def test_pages_of_other_origins_may_ask_only_where_that_is_said(
    server: DecodeServer, web: httpx.Client
) -> None:
    asking = {"origin": "https://example.org", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in web.options("/v1/models", headers=asking).headers
    with Gateway("127.0.0.1:0", server.grpc, cors_origins=["https://example.org"]) as gateway:
        allowed = httpx.options(f"{gateway.url}/v1/models", headers=asking)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        foreign = httpx.get(f"{gateway.url}/health", headers={"origin": "https://other.org"})
        assert "access-control-allow-origin" not in foreign.headers


def test_tokens_of_the_server_are_asked_for_here(tmp_path: Path, library: Any, lamp: str) -> None:
    secret = TokenFile(tmp_path / "tokens").create("alice")
    config = library.config(tokens=tmp_path / "tokens")
    with loaded(config) as guarded, Gateway("127.0.0.1:0", guarded.grpc) as gateway:
        assert httpx.get(f"{gateway.url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": f"Basic {secret}"}):
            refused = httpx.get(f"{gateway.url}/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        shown = {"authorization": f"Bearer {secret}"}
        assert httpx.get(f"{gateway.url}/v1/contexts", headers=shown).status_code == 200
        _check_owner(httpx.Client(base_url=f"{gateway.url}/v1", headers=shown, timeout=60))


def _check_owner(web: httpx.Client) -> None:
    """What is made is noted under the name of the token that was shown."""
    body = {"model": "model", "prompt": " alice", "context": "lamp", "max_tokens": 1, "keep": {}}
    answer = web.post("/completions", json=body).json()
    kept = answer["sparsekv"]["context"]
    (found,) = (each for each in web.get("/contexts").json()["data"] if each["id"] == kept)
    assert (found["id"], found["owner"]) == (kept, "alice")
    written = answer["usage"]["prompt_tokens_details"]["cache_write_tokens"]
    assert written == found["token_count"] - found["parent_token_count"]
    assert web.delete(f"/contexts/{kept}").status_code == 200
    ordered = web.post("/contexts", json={"text": "A text that nobody is there to read."}).json()
    assert ordered["owner"] == "alice"
    assert web.post(f"/operations/{ordered['id']}/cancel").status_code == 200


def test_an_encrypted_gateway_asks_for_certificates(server: DecodeServer) -> None:
    certificates = Certificates(
        CERTIFICATES / "server.pem", CERTIFICATES / "server.key", CERTIFICATES / "authority.pem"
    )
    trusting = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
    with Gateway("127.0.0.1:0", server.grpc, certificates=certificates) as gateway:
        assert gateway.url.startswith("https://")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{gateway.url}/health", verify=trusting)
        trusting.load_cert_chain(CERTIFICATES / "client.pem", CERTIFICATES / "client.key")
        assert httpx.get(f"{gateway.url}/health", verify=trusting).status_code == 200


def test_a_server_that_starts_says_so(library: Any, lamp: str) -> None:
    with DecodeServer(library.config()) as server, Gateway("127.0.0.1:0", server.grpc) as gateway:
        server.phase.say("hash weights", "3 of 16 GB")
        health = httpx.get(f"{gateway.url}/health")
        told = {"status": "starting", "phase": "hash weights: 3 of 16 GB"}
        assert (health.status_code, health.json()) == (503, told)
        for asked in (httpx.get(f"{gateway.url}/v1/models"), _chat(gateway)):
            assert (asked.status_code, asked.json()["error"]["code"]) == (503, "not_ready")
            assert "hash weights" in asked.json()["error"]["message"]
            assert asked.headers["x-should-retry"] == "true"


def test_both_doors_say_the_same_of_an_engine_that_has_died(library: Any, lamp: str) -> None:
    with loaded(library.config()) as server, Gateway("127.0.0.1:0", server.grpc) as gateway:
        engine = server.backend.engine
        work = make_client("fatal", start=_die).work
        engine.submit(engine.reserve(), work, Stream(engine.wake))  # type: ignore[arg-type]
        wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 503)
        with Client(server.address) as client, pytest.raises(EngineCrashedError) as told:
            client.generate(lamp, text="x").read()
        for stream in (False, True):
            asked = _chat(gateway, context=lamp, stream=stream)
            assert (asked.status_code, asked.json()["error"]["code"]) == (500, "engine_crashed")
            assert asked.json()["error"]["message"] == told.value.message


def _die() -> Any:
    raise SystemExit("the scheduler's thread must not survive this")


def test_a_fault_is_told_by_the_number_under_which_the_log_has_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("nobody is told of this")
    monkeypatch.setattr("decode_engine.rpc.answers.answering.plan_calls", raising(error))
    for stream in (False, True):
        asked = _chat(gateway, stream=stream)
        assert asked.status_code == 500
        assert asked.headers["x-request-id"] in asked.json()["error"]["message"]
        assert "nobody is told" not in asked.text
    assert caplog.text.count("RuntimeError: nobody is told of this") == 2


def _chat(gateway: Gateway, **more: object) -> httpx.Response:
    asked = {"model": "model", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2, **more}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, timeout=60)


ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def both(library: Library, lamp: str) -> Iterator[tuple[DecodeServer, Gateway]]:
    """A server with a gateway of its own, as `serve --http-port` has it."""
    with loaded(library.config()) as server, Gateway("127.0.0.1:0", server.grpc) as gateway:
        yield server, gateway


class Lines:
    """Lines of requests, of a level and above."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, level: int) -> list[str]:
        """In the order of their writing, which is behind the last byte of an answer."""
        return [
            record.getMessage()
            for record in self._caplog.records
            if record.levelno >= level and hasattr(record, "milliseconds")
        ]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, "decode_engine")
    return Lines(caplog)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_over_http_has_one_line(
    both: tuple[DecodeServer, Gateway], lamp: str, lines: Lines, stream: bool
) -> None:
    asked = {**ASKED, "context": lamp, "stream": stream}
    assert httpx.post(f"{both[1].url}/v1/chat/completions", json=asked, timeout=60).status_code == 200
    wait_until(lambda: bool(lines.of(logging.INFO)))
    (line,) = lines.of(logging.INFO)
    assert line.startswith("POST /v1/chat/completions 200 in ")
    for fact in (
        f"context={lamp.removeprefix('contexts/')}",
        "method=",
        "prompt_tokens=",
        "generated_tokens=",
        "first_token_ms=",
    ):
        assert fact in line
    assert "ended=" not in line


def test_health_has_none(both: tuple[DecodeServer, Gateway], lines: Lines) -> None:
    server, gateway = both
    with Client(server.address) as client:
        assert client.is_serving()
    assert httpx.get(f"{gateway.url}/health", timeout=60).status_code == 200
    wait_until(lambda: any(line.startswith("GET /health 200") for line in lines.of(logging.DEBUG)))
    assert lines.of(logging.INFO) == []


def test_a_stream_that_the_server_ends_says_so(library: Library, lamp: str, lines: Lines) -> None:
    asked = {**ASKED, "context": lamp, "stream": True, "max_tokens": 2000, "min_tokens": 2000}
    with (
        loaded(library.config()) as server,
        Gateway("127.0.0.1:0", server.grpc) as gateway,
        httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=asked, timeout=60) as answer,
    ):
        events = answer.iter_lines()
        next(line for line in events if line.startswith("data:"))
        server.stop(0.0)
        assert any("SHUTTING_DOWN" in line or "shutting_down" in line.lower() for line in events)

        def told() -> list[str]:
            return [line for line in lines.of(logging.INFO) if line.startswith("POST ")]

        wait_until(lambda: bool(told()))
        assert "ended=SHUTTING_DOWN" in told()[0]


def test_a_stream_says_nothing_but_comments_before_its_first_token(
    library: Library, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that measure take the first event for the first token."""
    monkeypatch.setattr(generating, "_FIRST_S", 0.0)
    monkeypatch.setattr(exchange, "_SILENCE_S", 0.01)
    asked = {**ASKED, "context": lamp, "stream": True}
    with (
        loaded(library.config(max_sessions=1)) as server,
        Gateway("127.0.0.1:0", server.grpc) as gateway,
        httpx.Client(timeout=60) as web,
        web.stream("POST", f"{gateway.url}/v1/completions", json=LONG) as before,
    ):
        held = before.iter_lines()  # the request ends with it
        assert any(line.startswith("data:") for line in held)
        with web.stream("POST", f"{gateway.url}/v1/chat/completions", json=asked) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            before.close()
            events = [line for line in lines if line not in (": waiting", "")]
        assert '"role":"assistant"' in events[0]
        assert events[-1] == "data: [DONE]"


def test_a_stream_that_its_client_leaves_says_so(
    both: tuple[DecodeServer, Gateway], lamp: str, lines: Lines
) -> None:
    asked = {**ASKED, "context": lamp, "stream": True, "max_tokens": 2000}
    with (
        httpx.Client(timeout=60) as web,
        web.stream("POST", f"{both[1].url}/v1/chat/completions", json=asked) as answer,
    ):
        next(answer.iter_lines())
    wait_until(lambda: bool(lines.of(logging.INFO)))
    assert "ended=CANCELLED" in lines.of(logging.INFO)[0]


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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
def test_who_goes_before_the_request_is_whole_is_no_failure_of_the_server(
    server: DecodeServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
    with Gateway("127.0.0.1:0", server.grpc) as gateway, caplog.at_level(logging.INFO):
        with raw(gateway) as leaving:
            leaving.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode())
        wait_until(lambda: f"POST {path} " in caplog.text, 60)
    assert f"POST {path} 499" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


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
