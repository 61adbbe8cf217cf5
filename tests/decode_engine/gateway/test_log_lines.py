"""What the log of one server that serves both doors says: one line a request, and none of health checks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.conftest import Library
from tests.decode_engine.gateway.conftest import MODEL
from tests.support.serving.service import wait_until

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def both(library: Library, lamp: str) -> Iterator[tuple[DecodeServer, Gateway]]:
    """A server with a gateway of its own, as `serve --http-port` has it."""
    with ExitStack() as stack:
        server = stack.enter_context(DecodeServer(library.config()))
        server.load()
        yield server, stack.enter_context(Gateway("127.0.0.1:0", server.grpc))


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


def test_a_request_over_grpc_has_one_line(
    both: tuple[DecodeServer, Gateway], lamp: str, lines: Lines
) -> None:
    with Client(both[0].address) as client:
        client.generate(lamp, text="a", max_tokens=2).read()
        wait_until(lambda: bool(lines.of(logging.INFO)))
        (line,) = lines.of(logging.INFO)
        assert line.startswith("Generate OK in ")


def test_health_has_none(both: tuple[DecodeServer, Gateway], lines: Lines) -> None:
    server, gateway = both
    with Client(server.address) as client:
        assert client.is_serving()
    assert httpx.get(f"{gateway.url}/health", timeout=60).status_code == 200
    wait_until(lambda: any(line.startswith("GET /health 200") for line in lines.of(logging.DEBUG)))
    assert lines.of(logging.INFO) == []


def test_a_stream_that_the_server_ends_says_so(library: Library, lamp: str, lines: Lines) -> None:
    asked = {**ASKED, "context": lamp, "stream": True, "max_tokens": 2000, "min_tokens": 2000}
    with ExitStack() as stack:
        server = stack.enter_context(DecodeServer(library.config()))
        server.load()
        gateway = stack.enter_context(Gateway("127.0.0.1:0", server.grpc))
        web = stack.enter_context(httpx.Client(timeout=60))
        answer = stack.enter_context(web.stream("POST", f"{gateway.url}/v1/chat/completions", json=asked))
        events = answer.iter_lines()
        next(line for line in events if line.startswith("data:"))
        server.stop(0.0)
        assert any("SHUTTING_DOWN" in line or "shutting_down" in line.lower() for line in events)

        def told() -> list[str]:
            return [line for line in lines.of(logging.INFO) if line.startswith("POST ")]

        wait_until(lambda: bool(told()))
        assert "ended=SHUTTING_DOWN" in told()[0]


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
