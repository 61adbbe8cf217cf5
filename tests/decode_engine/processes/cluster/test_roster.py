"""Who is there: replicas that say so or not, how many are wanted, engines with fixed names, and the cores of a node."""

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
from decode_engine.processes.cluster.near import cores_near
from decode_engine.processes.cluster.roster import GONE_S, UP_S, Load, Roster, Scale, replicas_wanted
from decode_engine.rpc.client import Client
from decode_engine.rpc.door.access import TokenFile
from decode_engine.rpc.door.options import Credentials
from decode_engine.rpc.routing.router import Replica
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError
from tests.decode_engine.conftest import Library
from tests.support.serving.service import loaded
from tests.support.waiting import wait_until

IDLE = Load(0, 0, 4, 0)
DOWN_S = 60.0


def test_who_says_nothing_for_a_while_is_there_no_more() -> None:
    now = [0.0]
    roster = Roster(clock=lambda: now[0])
    for name in ("engine-1", "engine-0"):
        roster.note(Replica(name, "a:1", store="s"), IDLE)
    roster.note_worker("worker-0", "s")
    assert [each.name for each in roster.replicas()] == ["engine-0", "engine-1"]
    now[0] += GONE_S - 1
    roster.note(Replica("engine-1", "a:2", store="s"), IDLE)
    now[0] += 2
    assert [(each.name, each.grpc) for each in roster.replicas()] == [("engine-1", "a:2")]
    assert roster.workers() == []
    assert len(roster.loads()) == 1
    roster.leave("engine-1")
    assert roster.replicas() == []


def test_stores_that_a_worker_attends_are_told() -> None:
    roster = Roster()
    roster.note(Replica("engine-0", "a:1", store="s"), IDLE)
    roster.note(Replica("engine-1", "a:2", store="t"), IDLE)
    roster.note_worker("w", "t")
    assert [each.attended for each in roster.replicas()] == [False, True]
    roster.leave("w")
    assert not any(each.attended for each in roster.replicas())


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 1),
        ([Load(0, 0, 4, 0)], 1),
        ([Load(9, 4, 4, 0)], 4),
        ([Load(0, 1, 4, 0.95)], 2),
        ([Load(0, 0, 4, 0.95)], 1),
        ([Load(0, 1, 4, 0.2)] * 3, 2),
        ([Load(0, 1, 4, 0.6)] * 2, 2),
        ([Load(0, 0, 4, 0.6)] * 2, 1),
    ],
)
def test_replicas_are_wanted_for_requests_and_for_memory(loads: list[Load], wanted: int) -> None:
    assert replicas_wanted(loads) == wanted


def test_the_number_follows_what_is_wanted_for_a_while() -> None:
    now = [0.0]
    scale = Scale(1, 3, DOWN_S, clock=lambda: now[0])
    busy = Load(9, 4, 4, 0)

    def after(seconds: float, *loads: Load) -> int:
        now[0] += seconds
        scale.note(loads)
        return scale.number

    assert after(0, busy) == after(UP_S - 1, busy) == 1
    assert after(0, IDLE) == after(2, busy) == after(UP_S - 1, busy) == 1  # it was not wanted all the while
    assert after(2, busy) == 3
    assert after(2 * UP_S, busy) == 3  # who has just been started has not told yet
    assert after(0, busy, busy, busy) == after(2 * UP_S, busy, busy, busy) == 3  # the most
    assert after(0, IDLE, IDLE, IDLE) == after(DOWN_S - 1, IDLE, IDLE, IDLE) == 3
    assert after(2, IDLE, IDLE, IDLE) == 2
    assert after(DOWN_S - 1, IDLE, IDLE) == 2
    assert after(2, IDLE, IDLE) == 1
    assert after(2 * DOWN_S, IDLE) == 1  # the least


TOLD = "0, GPU-a, 00000000:18:00.0\n1, GPU-b, 00000000:3B:00.0\n2, GPU-c, 00000000:9A:00.0\n"


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    for bus, cores in (
        ("0000:18:00.0", "0-3,8-9"),
        ("0000:3b:00.0", "0-3,8-9"),
        ("0000:9a:00.0", "4-7,10-20"),
    ):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(cores + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("seen", "cores"),
    [
        ("0", {0, 1, 2}),
        ("1", {3, 8, 9}),
        ("GPU-c", {4, 5, 6, 7, 10, 11}),
        ("7", None),
        ("0,1", None),
        ("", None),
    ],
)
def test_cores_of_a_node_are_divided(devices: Path, seen: str, cores: set[int] | None) -> None:
    assert cores_near({"CUDA_VISIBLE_DEVICES": seen}, lambda: TOLD, devices) == cores


def test_where_nobody_tells_there_are_no_nearest_cores(tmp_path: Path) -> None:
    assert cores_near({"CUDA_VISIBLE_DEVICES": "0"}, lambda: TOLD, tmp_path) is None
    assert cores_near({"CUDA_VISIBLE_DEVICES": "0"}, lambda: "no devices were found", tmp_path) is None


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_command_serves_both_apis_until_it_is_told_to_end(
    engine: str, lamp: str, number: signal.Signals
) -> None:
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
            if number is signal.SIGTERM:
                second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
                assert second.returncode == 1
                assert "port is taken" in second.stderr
                assert "Unclosed" not in second.stderr
        finally:
            front.send_signal(number)
        assert front.wait(30) == 0
