"""The processes of a run: each is started again when it ends, and told of faults; what they log is read, not kept."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_AGAIN_S = 0.3
_EXPLAINED = ("injected fault", "Too many open files", "File too large")
"""What is in every error that a fault makes: of ours, and of the system's limits."""
_UNEXPLAINED = re.compile(r"Traceback|Exception in|Fatal Python|Segmentation|core dumped|panicked")


@dataclass
class Figures:
    """Of a process: bytes of memory, open files, threads."""

    memory: int
    handles: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        """Raises OSError where it has ended."""
        status = Path(f"/proc/{pid}/status").read_text()
        memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
        return cls(memory, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


@dataclass
class Log:
    """What all processes have said. causeless: lines of failures that no fault explains."""

    file: Path
    causeless: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, said: str) -> None:
        """Notes a record of a process's log, or what it wrote between two of them."""
        with self.lock, open(self.file, "a") as file:
            file.write(f"{name}: {said}")
            told = said
            if said.startswith("{"):
                with suppress(ValueError):
                    told = str(json.loads(said).get("exception", ""))
            if _UNEXPLAINED.search(told) and not any(mark in told for mark in _EXPLAINED):
                self.causeless.append(f"{name}: {told.strip()[-2000:]}")


class Kept:
    """A command that runs, and is started again whenever it ends, until `stop`.

    ready: it has said that it serves, or, of one that says nothing, that it runs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Log,
        on_serving: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.starts = name, 0
        self._command, self._environment = list(command), {**os.environ, **environment}
        self._log, self._on_serving = log, on_serving
        self._stopping = threading.Event()
        self.ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of what runs now."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def stop(self, patience_s: float) -> bool:
        """Tells it to end; whether it did so in that time. It has ended then."""
        self._stopping.set()
        process = self._process
        ended = True
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                ended = False
                process.kill()
        self._thread.join()
        return ended

    def _keep(self) -> None:
        while not self._stopping.is_set():
            self.starts += 1
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
            self._process = process
            if self._stopping.is_set():
                process.terminate()
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            reader.start()
            if self._on_serving is None:
                self.ready.set()
            with process:
                for line in process.stdout or ():
                    if self._on_serving is not None and line.startswith("{"):
                        self._on_serving(json.loads(line))
                        self.ready.set()
                process.wait()
                self.ready.clear()
                reader.join()
            self._stopping.wait(_AGAIN_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        between = ""
        for line in process.stderr or ():
            if not line.startswith("{"):
                between += line
                continue
            if between:
                self._log.add(self.name, between)
                between = ""
            self._log.add(self.name, line)
        if between:
            self._log.add(self.name, between)


def children(pid: int | None, what: bytes) -> list[int]:
    """Processes that a process has started and whose command has those bytes."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    if what in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(int(child))
    return found


@dataclass
class Struck:
    """Tells processes of faults, and counts which struck."""

    folder: Path
    below: Sequence[Path]

    def tell(self, pid: int, number: int, kind: str, times: int, seed: int) -> bool:
        """Whether the process heard of it."""
        told = {
            "number": number,
            "kind": kind,
            "times": times,
            "seed": seed,
            "below": [f"{each}/" for each in self.below],
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending, suppress(OSError):
            sending.sendto(json.dumps(told).encode(), str(self.folder / str(pid)))
            return True
        return False

    def numbers(self) -> dict[int, str]:
        """Of faults that struck, with the kind and where they did first."""
        found: dict[int, str] = {}
        with suppress(FileNotFoundError):
            for line in (self.folder / "struck").read_text().splitlines():
                number, _, where = line.partition(" ")
                found.setdefault(int(number), where)
        return found


def limited(pid: int, what: int, most: int, seconds: float) -> bool:
    """Has a process live with a limit of the system for a while."""
    try:
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (min(most, before[1]) if before[1] >= 0 else most, before[1]))
        time.sleep(seconds)
        resource.prlimit(pid, what, before)
    except (OSError, ValueError):
        return False
    return True


def frozen(pid: int, seconds: float) -> bool:
    """Stops a process for a while."""
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    except OSError:
        return False
    return True


def killed(pid: int) -> bool:
    """Ends a process where it is."""
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
