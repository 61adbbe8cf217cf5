"""`serve --doors`: one command, whose processes may die one by one, and all end with it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from decode_engine.errors import AddressError, EngineCrashedError, InternalError, ShuttingDownError
from decode_engine.processes.attached import Setup, read_setup, setup_line
from decode_engine.processes.supervisor import Supervisor, kept_port
from decode_engine.rpc.client import Client
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel
from index_store.errors import SparseKVError
from tests.decode_engine.conftest import Library
from tests.decode_engine.rpc.turns.test_stopping import Server, Streams, serving

ENGINE, DOOR = b"engine_process", b"door_process"


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
        await supervisor_of().run(threading.Event(), 0.0)

    with pytest.raises(kind, match=message):
        asyncio.run(run())


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


@pytest.mark.nightly
def test_all_end_with_a_server_that_is_killed(library: Library, lamp: str) -> None:
    with serving(library, "--no-warm-up", "--doors", "2") as server:
        server.wait_until_served()
        pid = server.process.pid
        ends = [ended(child) for child in (*children(pid, DOOR), *children(pid, ENGINE))]
        assert len(ends) == 3
        server.process.kill()
        assert all(end.wait(60) for end in ends)
