"""The processes of a service, each of which can be killed where it is and is started anew."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

VICTIMS = ("server", "worker", "own worker")
"""Who is killed. A killed server takes its own worker and its HTTP port along."""


@dataclass
class Process:
    """A process of the service. log: where it writes."""

    command: list[str]
    log: Path
    running: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Ends it where it is. `start` starts another one."""
        self.running.kill()
        self.running.wait()

    def child(self) -> int | None:
        """The process that it has started, if there is one."""
        with suppress(OSError):
            for task in Path(f"/proc/{self.running.pid}/task").iterdir():
                for pid in (task / "children").read_text().split():
                    return int(pid)
        return None


@dataclass
class Service:
    """A server with a worker of its own, and a second worker. address: of gRPC. url: of HTTP."""

    server: Process
    worker: Process
    address: str
    url: str
    killed: Counter[str] = field(default_factory=Counter)

    def kill_one(self, choices: Random) -> str:
        """Kills somebody by SIGKILL and starts them anew; returns who that was."""
        victim = choices.choice(VICTIMS)
        if victim == "own worker":
            pid = self.server.child()
            if pid is None:  # it is not up again yet
                victim = "worker"
            else:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        processes = {"server": self.server, "worker": self.worker}
        if victim in processes:
            processes[victim].kill()
            processes[victim].start()
        self.killed[victim] += 1
        return victim

    def end(self) -> None:
        """Kills all."""
        for process in (self.worker, self.server):
            process.kill()


@contextmanager
def service(folder: Path, store: Path, chunk: int) -> Iterator[Service]:
    """Starts all of it over a store that is there. folder: for logs. chunk: tokens of a pass of the second worker."""
    common = ["--store", str(store), "--model", "reader", "--device", "cpu", "--format", "json"]
    address, http = _free_port(), _free_port()
    python = [sys.executable, "-m"]
    ports = ["--listen", f"127.0.0.1:{address}", "--http-port", str(http)]
    serve = ["decode_engine", "serve", *common, "--prefill", "--no-warm-up", *ports]
    started = Service(
        Process([*python, *serve], folder / "server.log"),
        Process([*python, "prefill_worker", "serve", *common, "--chunk", str(chunk)], folder / "worker.log"),
        f"127.0.0.1:{address}",
        f"http://127.0.0.1:{http}",
    )
    try:
        yield started
    finally:
        started.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
