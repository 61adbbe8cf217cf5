"""A front door over engines that are given: by their addresses, as far as they answer."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from decode_engine.gateway.serving import Gateway
from decode_engine.processes.cluster.command import _free_port
from decode_engine.processes.cluster.fixed import Engines, parse_engines
from decode_engine.rpc.client import Client
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.door.options import Credentials
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError
from tests.decode_engine.conftest import Library
from tests.support.serving.service import loaded
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def engine(server: DecodeServer) -> Iterator[str]:
    """The server as an option."""
    with Gateway("127.0.0.1:0", server.grpc) as gateway:
        yield f"here={server.address}/{gateway.url.rpartition(':')[2]}"


def test_engines_have_names_by_their_places() -> None:
    first, second, third = parse_engines(["a:1/2", "big=b:3/4", "[::1]:5/6"], 8, False)
    assert (first.name, first.grpc, first.http, first.store) == ("engine-0", "a:1", "http://a:2", "a:1")
    assert (second.name, second.sessions, third.name) == ("big", 8, "engine-2")
    assert third.http == "http://[::1]:6"
    assert len({each.store for each in parse_engines(["a:1/2", "b:3/4"], 8, True)}) == 1


@pytest.mark.parametrize(
    "texts",
    [
        ["a:1"],
        ["a/2"],
        ["a:1/2", "a:1/3"],
        ["x=a:1/2", "x=b:1/2"],
        ["http://a:1/2"],
        ["a:65536/1"],
        ["a:1/0"],
    ],
)
def test_what_names_no_engine_is_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="--engine"):
        parse_engines(texts, 8, False)


def test_who_does_not_answer_is_left_out(engine: str) -> None:
    asking = Engines(parse_engines(["127.0.0.1:1/1", engine], 8, True), Credentials())
    (found,) = asking.ask()
    assert found.name == "here"
    assert found.memory_bytes > 0
    asking.leave()


def test_why_engines_are_left_out_is_said_once(
    engine: str, library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TokenFile(tmp_path / "tokens").create("admin")
    with loaded(library.config(tokens=tmp_path / "tokens")) as closed, caplog.at_level("INFO"):
        asking = Engines(
            parse_engines(["127.0.0.1:1/1", engine, f"{closed.address}/1"], 8, True), Credentials()
        )
        assert len(asking.ask()) == len(asking.ask()) == 1
    gone, here, shut = (each.getMessage() for each in caplog.records if each.name.endswith("cluster.fixed"))
    assert gone == "engine-0 at 127.0.0.1:1 does not answer, and is left out"
    assert here.endswith("serves model")
    assert "give --token" in shut


def test_engines_of_different_models_are_told(
    engine: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = Engines(parse_engines([engine, "127.0.0.1:1/1"], 8, True), Credentials())
    (here,) = asking.ask()
    other = replace(here, name="engine-1")
    said = {"here": (here, "serves model"), "engine-1": (other, "serves another")}
    monkeypatch.setattr(asking, "_ask_one", lambda each: said[each.name])
    assert len(asking.ask()) == len(asking.ask()) == 2
    warned = [each.getMessage() for each in caplog.records if "different models" in each.getMessage()]
    assert warned == [
        "engines serve different models, and any of them may get any request: serves another; serves model"
    ]


def test_the_command_serves_both_apis_until_it_is_told_to_end(engine: str, lamp: str) -> None:
    listen, http = (_free_port("127.0.0.1") for _ in range(2))
    command = [sys.executable, "-m", "decode_engine.processes.cluster.command", "front", "--engine", engine]
    command += ["--listen", f"127.0.0.1:{listen}", "--http-port", str(http), "--grace", "1"]
    with subprocess.Popen(command) as front:
        try:
            url = f"http://127.0.0.1:{http}"

            def serves() -> bool:
                try:
                    return httpx.get(f"{url}/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(serves)
            with (
                Client(f"127.0.0.1:{listen}") as client,
                client.generate(lamp, text="Who?", max_tokens=2) as generation,
            ):
                generation.read()
                assert generation.summary.context == lamp
            body = {"model": "model", "prompt": "Who?", "max_tokens": 2, "context": "lamp"}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        finally:
            front.send_signal(signal.SIGTERM)
        assert front.wait(30) == 0
