"""`serve --doors`: one command, whose processes may die one by one, and all end with it."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from decode_engine.__main__ import main
from decode_engine.errors import AddressError, EngineCrashedError, InternalError, ShuttingDownError
from decode_engine.processes import attached, supervisor
from decode_engine.processes.attached import Setup, read_setup, setup_line
from decode_engine.processes.supervisor import Child, Supervisor, kept_port
from decode_engine.rpc.client import Client
from decode_engine.rpc.transport.starting import Stopping
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel
from index_store.errors import SparseKVError
from tests.decode_engine.conftest import Library
from tests.support.serving.serve_process import IN_TIME_S, Server, Streams, serving

ENGINE, DOOR = b"engine_process", b"door_process"

logger = logging.getLogger(__name__)


def children(pid: int, what: bytes) -> list[int]:
    """Processes of a server, which run that module."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if what in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def ended(pid: int) -> threading.Event:
    """Set when a process has ended that may be nobody's child here."""
    handle, event = os.pidfd_open(pid), threading.Event()

    def wait() -> None:
        select.select([handle], [], [])
        os.close(handle)
        event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event


@pytest.fixture(scope="module")
def started(library: Library, lamp: str) -> Iterator[tuple[Server, dict[str, str]]]:
    with serving(library, "--no-warm-up", "--doors", "2") as server:
        yield server, server.wait_until_served()


def answer(address: str, context: str) -> str:
    with Client(address) as client:
        return "".join(
            part.text for part in client.generate(context, text="Who?", max_tokens=4, method="full")
        )


def until_answered(ask: Callable[[], str]) -> str:
    """Each attempt ends by itself; a door or an engine takes seconds to start."""
    last: Exception | None = None
    for _ in range(2000):
        try:
            return ask()
        except SparseKVError as error:
            last = error
            threading.Event().wait(0.1)
    raise AssertionError from last


def test_a_kept_port_is_nobody_elses() -> None:
    with kept_port("127.0.0.1:0", "--listen") as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with pytest.raises(AddressError), kept_port(address, "--listen"):
            pass
        with socket.socket() as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            door.bind(place)
            door.listen()
            with socket.create_connection(place):
                pass


FAILS = """
import sys
sys.stdin.readline()
print('{"type": "failed", "reason": "ADDRESS_UNUSABLE", "message": "the port is taken"}', flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("raise SystemExit(3)", InternalError, "the engine ended with 3 while it started"),
        (FAILS, AddressError, "the port is taken"),
    ],
)
def test_a_process_that_cannot_start_ends_the_start(
    tmp_path: Path, program: str, kind: type[SparseKVError], message: str
) -> None:
    setup = Setup(ServeConfig(store=tmp_path, model="m", doors=2), b"key", tmp_path, LogLevel.INFO, True)
    waits = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline()")
    supervisor_of = partial(Supervisor, setup, print, print, (sys.executable, "-c", program), waits)

    async def run() -> None:
        await supervisor_of().run(Stopping())

    with pytest.raises(kind, match=message):
        asyncio.run(run())


def test_no_thread_must_live_for_an_end_to_be_noticed(tmp_path: Path) -> None:
    setup = Setup(ServeConfig(store=tmp_path, model="m", doors=2), b"key", tmp_path, LogLevel.INFO, True)
    waits = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline()")

    async def run() -> None:
        stopping = Stopping()
        kept = Supervisor(setup, print, print, waits, waits)
        running = asyncio.ensure_future(kept.run(stopping))
        while any(each.pid is None for each in (kept.engine, *kept.doors)):
            await asyncio.sleep(0.01)
        assert not any("waitpid" in each.name for each in threading.enumerate())
        kept.engine.kill()
        with pytest.raises(InternalError, match="the engine ended with -9 while it started"):
            await running

    asyncio.run(run())


def test_a_process_for_which_nothing_is_left_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(ServeConfig(store=tmp_path, model="m"), b"key", tmp_path, LogLevel.INFO, True)
    waits = (sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline()")
    start = asyncio.create_subprocess_exec
    ends: list[int] = []

    async def refuse(*_: object, **__: object) -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    monkeypatch.setattr(supervisor, "_LEAST_S", 0.01)

    async def run() -> None:
        child = Child("it", waits, setup, print, lambda _, code: ends.append(code))
        running = asyncio.ensure_future(child.keep())
        while child.pid is None:
            await asyncio.sleep(0.01)
        child.stop(0.0)
        await running

    asyncio.run(run())
    assert ends == [126]


@pytest.mark.parametrize("wakes", [False, True])
def test_a_signal_ends_a_server_whose_thread_for_signals_dies(
    monkeypatch: pytest.MonkeyPatch, wakes: bool
) -> None:
    """Before a signal, or of the signal that wakes it."""
    monkeypatch.setattr(attached, "_watch", lambda reading, *_: reading.recv(1) if wakes else None)
    with attached.stop_signals(1.0) as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(60)
        assert stopping.left_s <= 1.0


def test_a_process_without_torch_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doors have none, whatever the server computes with."""
    config = ServeConfig(
        store=tmp_path, model="m", doors=2, device="cuda", placement="hybrid", device_memory=5,
        prefill=True, weights="int8",
    )  # fmt: skip
    setup = Setup(config, b"key", tmp_path, LogLevel.INFO, True)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "index_store.memory.devices", raising=False)
    assert read_setup(setup_line(setup)) == setup


@pytest.mark.slow
def test_a_door_that_is_killed_comes_again_and_the_other_goes_on(
    started: tuple[Server, dict[str, str]], lamp: str
) -> None:
    server, ready = started
    first = answer(ready["address"], lamp)
    doors, engine = children(server.process.pid, DOOR), children(server.process.pid, ENGINE)
    assert (len(doors), len(engine)) == (2, 1)
    os.kill(doors[0], signal.SIGKILL)
    server.wait_for_log("door 1 serves again" if doors[0] < doors[1] else "door 2 serves again")
    assert answer(ready["address"], lamp) == first
    assert children(server.process.pid, ENGINE) == engine


@pytest.mark.slow
def test_streams_of_an_engine_that_is_killed_are_told_and_the_next_one_serves(
    started: tuple[Server, dict[str, str]], library: Library, lamp: str
) -> None:
    server, ready = started
    first = until_answered(lambda: answer(ready["address"], lamp))
    streams = Streams(ready, library.model, lamp)
    streams.wait_until_begun()
    os.kill(children(server.process.pid, ENGINE)[0], signal.SIGKILL)
    for thread in streams._threads:
        thread.join(30)
    assert isinstance(streams.ends["grpc"], EngineCrashedError), streams.ends
    assert "engine_crashed" in str(streams.ends["http"]), streams.ends
    assert until_answered(lambda: answer(ready["address"], lamp)) == first


@pytest.mark.slow
def test_streams_are_told_why_they_end(
    started: tuple[Server, dict[str, str]], library: Library, lamp: str
) -> None:
    """The last one here: the server ends with it."""
    server, ready = started
    until_answered(lambda: answer(ready["address"], lamp))
    streams = Streams(ready, library.model, lamp)
    streams.wait_until_begun()
    server.process.send_signal(signal.SIGTERM)
    server.check_end()
    for thread in streams._threads:
        thread.join(30)
    assert isinstance(streams.ends["grpc"], ShuttingDownError), streams.ends
    streams.check_told()


@pytest.mark.slow
def test_a_command_drains_all_doors(library: Library, lamp: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams end by themselves, the server then, and the command behind it; a signal meanwhile shortens that."""
    with serving(library, "--no-warm-up", "--doors", "2") as server:
        ready = server.wait_until_served()
        with Client(ready["address"]) as client:
            generation = client.generate(lamp, text="Who?", max_tokens=300, method="oracle")
            pieces = iter(generation)
            next(pieces)
            with pytest.raises(SystemExit) as ended:
                main(["drain", "--server", ready["address"], "--limit", "300", "--no-wait"])
            assert (ended.value.code, capsys.readouterr().out) == (0, f"{ready['address']} is draining\n")
            list(pieces)
            assert generation.summary.completion_tokens == 300
        assert server.process.wait(IN_TIME_S) == 0
    with serving(library, "--no-warm-up", "--doors", "2") as server:
        streams = Streams(server.wait_until_served(), library.model, lamp)
        streams.wait_until_begun()
        address = server.wait_for_log("starting at ").split()[2]
        with Client(address) as client:
            client.drain(600.0)
        server.process.send_signal(signal.SIGTERM)
        server.check_end()
        streams.check_told()


@pytest.mark.nightly
def test_all_end_with_a_server_that_is_killed(library: Library, lamp: str) -> None:
    with serving(library, "--no-warm-up", "--doors", "2") as server:
        server.wait_until_served()
        pid = server.process.pid
        ends = [ended(child) for child in (*children(pid, DOOR), *children(pid, ENGINE))]
        assert len(ends) == 3
        server.process.kill()
        assert all(end.wait(60) for end in ends)


KILLS, CROWD = 100, 64


class Crowd:
    """Clients of both kinds that ask again and again, half of them each, and note how every answer ends."""

    def __init__(self, ready: dict[str, str], model: Path, context: str) -> None:
        self._ready, self._model, self._context = ready, model, context
        self._stopped = threading.Event()
        self._begun: dict[int, float] = {}
        self.texts: set[str] = set()
        self.ends: Counter[str] = Counter()
        self.longest_s = 0.0
        self._noting = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._ask_on, args=(each, (self._by_grpc, self._by_http)[each % 2]), daemon=True
            )
            for each in range(CROWD)
        ]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, number: int, ask: Callable[[], tuple[str, str]]) -> None:
        while not self._stopped.is_set():
            begun = self._begun[number] = time.monotonic()
            try:
                end, text = ask()
            except SparseKVError as error:
                end, text = error.reason, ""
            except (OSError, http.client.HTTPException):
                end, text = "connection", ""
            with self._noting:
                self.ends[end] += 1
                self.texts |= {text} if text else set()
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
            if end != "answered":
                self._stopped.wait(0.2)

    def _by_grpc(self) -> tuple[str, str]:
        with Client(self._ready["address"]) as client:
            asked = client.generate(self._context, text="Who?", max_tokens=48, method="full", temperature=0)
            return "answered", "".join(part.text for part in asked)

    def _by_http(self) -> tuple[str, str]:
        connection = http.client.HTTPConnection(self._ready["url"].removeprefix("http://"), timeout=120)
        asked = {
            "model": self._model.name,
            "prompt": "Who?",
            "max_tokens": 48,
            "stream": True,
            "temperature": 0,
        }
        asked |= {"context": self._context.removeprefix("contexts/"), "method": "full"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked))
            response = connection.getresponse()
            body = response.read()  # which raises where the connection breaks; lines would just end
        finally:
            connection.close()
        if response.status != 200:
            return json.loads(body)["error"]["code"].upper(), ""
        events = [line[6:].strip() for line in body.splitlines() if line.startswith(b"data: ")]
        told = [json.loads(event) for event in events if event != b"[DONE]"]
        for error in (each["error"] for each in told if "error" in each):
            return error["code"].upper(), ""
        assert events[-1] == b"[DONE]", "a stream ended without saying so"
        return "answered", "".join(each["choices"][0]["text"] for each in told if each["choices"])

    def count(self) -> int:
        """Answers that came whole."""
        with self._noting:
            return self.ends["answered"]

    def stop(self) -> None:
        """Fails where a client still waits."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # an engine takes seconds to start, and a minute where others use the cores
def test_a_hundred_kills_under_sixty_four_streams(library: Library, lamp: str) -> None:
    """Of doors and the engine: what was acknowledged stays, every stream ends with a true reason, and others go on."""
    chosen, times = random.Random(7), {ENGINE: list[float](), DOOR: list[float]()}
    limits = ("--max-sessions", "64", "--max-waiting", "64", "--max-client-requests", "128")
    with serving(library, "--no-warm-up", "--doors", "2", *limits) as server:
        ready = server.wait_until_served()
        first = answer(ready["address"], lamp)
        crowd = Crowd(ready, library.model, lamp)
        for kill in range(KILLS):
            with Client(ready["address"]) as client:
                until_answered(lambda: client.update_context(lamp, labels={"kill": str(kill)}).name)  # noqa: B023
            what = chosen.choice((ENGINE, DOOR, DOOR))
            pids, whole = children(server.process.pid, what), crowd.count()
            if not pids:
                continue  # it is being started again
            os.kill(chosen.choice(pids), signal.SIGKILL)
            begun = time.monotonic()
            assert until_answered(lambda: answer(ready["address"], lamp)) == first
            times[what].append(time.monotonic() - begun)
            logger.info("kill %d, of the %s, served again after %.1f s", kill, what.decode(), times[what][-1])
            with Client(ready["address"]) as client:
                assert until_answered(lambda: client.get_context(lamp).labels["kill"]) == str(kill)
            while crowd.count() < whole + CROWD:
                assert server.process.poll() is None
                threading.Event().wait(0.05)
        crowd.stop()
        medians = {what.decode(): sorted(found)[len(found) // 2] for what, found in times.items()}
        longest = max(map(max, times.values()))
        logger.info("%s, served again after %s s, longest %.1f s", crowd.ends, medians, longest)
    assert len(crowd.texts) == 1
    true = {"answered", "ENGINE_CRASHED", "connection", "UNREACHABLE", "NOT_READY"}
    assert set(crowd.ends) <= true, crowd.ends
    assert crowd.longest_s < 60
