"""Faults strike where they are told to, cables are pulled, and nothing of what servers promise breaks with them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.ops.scripts import load_script
from tests.support.forking import ran
from tests.support.waiting import wait_until

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "abuse"
PROGRAM = """
import os, sys, threading
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""
WRITES = (
    "handle = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); os.write(handle, b'12345678'); os.fsync(handle)"
)
READS = "assert os.read(os.open(sys.argv[1], os.O_RDONLY), 8) == b'12345678', 'other bytes'"


class Told:
    """A process that does what it reads, and can be told of faults."""

    def __init__(self, processes: ModuleType, folder: Path) -> None:
        (folder / "faults").mkdir()
        self.file = folder / "below" / "file"
        self.file.parent.mkdir()
        self.struck = processes.Struck(folder / "faults", [self.file.parent])
        environment = {
            **os.environ,
            "PYTHONPATH": str(FOLDER / "faults"),
            "SPARSEKV_FAULTS": str(folder / "faults"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.numbers = 0

    def do(self, line: str) -> str:
        """What came of it; "" where the process died of it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def tell(self, kind: str) -> int:
        """The number of the fault, once the process has heard of it."""
        assert self.do("pass") == "done"
        self.numbers += 1
        assert self.struck.tell(self.process.pid, self.numbers, kind, 1, 3)
        told = f"import sitecustomize; assert sitecustomize.adapter._told.get('number') == {self.numbers}"
        wait_until(lambda: self.do(told) == "done")
        return self.numbers


@pytest.fixture
def processes() -> ModuleType:
    return load_script(FOLDER / "processes.py")


@pytest.fixture
def told(processes: ModuleType, tmp_path: Path) -> Iterator[Told]:
    made = Told(processes, tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.mark.parametrize(
    ("kind", "line", "said"),
    [
        ("full", WRITES, "OSError: [Errno 28] No space left on device, injected fault"),
        ("failing", READS, "OSError: [Errno 5] Input/output error, injected fault"),
        ("flipped", READS, "AssertionError: other bytes"),
        ("slow", READS, "done"),
        ("torn", WRITES, ""),
    ],
)
def test_a_fault_strikes_once_and_says_so(told: Told, kind: str, line: str, said: str) -> None:
    told.file.write_bytes(b"12345678")
    number = told.tell(kind)
    assert told.do(line).startswith(said)
    assert told.struck.numbers()[number].startswith(f"{kind} {told.process.pid} {told.file}")
    if kind == "torn":
        assert told.process.wait() == -9
        assert told.file.read_bytes() == b"1234"
    else:
        assert told.do(line) == "done"


def test_a_log_is_told_apart_by_its_causes(processes: ModuleType, tmp_path: Path) -> None:
    log = processes.Log(tmp_path / "log")
    log.add("door", json.dumps({"exception": "Traceback\nOSError: injected fault"}))
    log.add("door", "Traceback (most recent call last):\nOSError: [Errno 24] Too many open files\n")
    log.add("door", json.dumps({"message": "Traceback"}))
    assert log.causeless == []
    log.add("door", "Traceback (most recent call last):\nKeyError: 'a'\n")
    assert len(log.causeless) == 1


def test_a_cable_passes_on_and_is_pulled() -> None:
    cable = load_script(FOLDER / "cable.py").Cable()
    with socket.create_server(("127.0.0.1", 0)) as server:
        cable.target = f"127.0.0.1:{server.getsockname()[1]}"
        host, _, port = cable.address.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            there, _ = server.accept()
            with there:
                client.sendall(b"question")
                assert there.recv(99) == b"question"
                holding = threading.Thread(target=cable.hold, args=(0.2,))
                holding.start()
                there.sendall(b"answer")
                assert client.recv(99) == b"answer"
                holding.join()
                assert cable.pull() == 2
                with pytest.raises(ConnectionResetError):
                    client.recv(99)
    cable.close()


@pytest.mark.nightly
def test_some_faults_break_nothing() -> None:
    chaos = [sys.executable, str(FOLDER / "chaos_run.py"), "--faults", "40", "--minutes", "6", "--seed", "4"]
    done = ran(chaos)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["faults"] >= 10
