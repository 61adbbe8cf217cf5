"""Contexts made over the network while workers and their server are killed at random moments: what is lost.

usage: python ops/bench/prefill/queue_kills.py [--kills 100] [--seed 0] [--chunk 256]

Starts `decode-engine serve` and two `prefill-worker serve` with the reader over a new store, keeps four operations open
on documents of 3,000 to 8,000 tokens, and kills (SIGKILL) one of the three processes at a random moment, again and
again; a killed one is started anew. A fifth of the operations is cancelled. After every kill all contexts of the store
are verified byte by byte, and every operation that was acknowledged has to be there. In the end all are done, with
a whole context of their document, or cancelled if that was asked for. Run it from the root of the repository.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.checks import CheckFailedError
from harness.report import reporting

from decode_engine.errors import CancelledError, NotReadyError, ServerUnreachableError
from decode_engine.rpc.client import Client, OperationInfo
from index_store.store.catalog import Store

Result = TypeVar("Result")

OPEN_OPERATIONS = 4
LONGEST_PAUSE_S = 4.0
PATIENCE_S = 900.0
SENTENCE = "In the year {} the keeper of lamp {} counted {} ships and wrote their names into the book. "


@dataclass
class Process:
    """A process of the service that is started again whenever it was killed."""

    command: list[str]
    log: Path
    kills: int = 0
    running: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Ends it where it is, and starts another one."""
        self.running.kill()
        self.running.wait()
        self.kills += 1
        self.start()


def main(kills: int = 100, seed: int = 0, chunk: int = 256) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        reporting("queue_kills", gpu=False) as report,
        service(Path(folder), chunk) as (store, processes, address),
    ):
        began = time.monotonic()
        orders = Orders(address, random.Random(seed))
        moments = random.Random(seed + 1)
        for _ in range(kills):
            orders.fill()
            time.sleep(moments.uniform(0, LONGEST_PAUSE_S))
            moments.choice(processes).kill()
            verify(store)
            orders.look()
        orders.finish()
        verify(store)
        report.add(
            {
                "kills": kills,
                "of_the_server": processes[0].kills,
                "operations": len(orders.acknowledged),
                "done": orders.done,
                "cancelled": orders.cancelled,
                "gone_on_with": orders.resumed,
                "contexts": len(store.list()),
                "seconds": time.monotonic() - began,
            }
        )


class Orders:
    """Operations that a server has acknowledged, and what is to become of them."""

    def __init__(self, address: str, choices: random.Random) -> None:
        self._client = Client(address, timeout_s=60)
        self._choices = choices
        self.acknowledged: dict[str, str] = {}
        self._unwanted: set[str] = set()
        self._open: set[str] = set()
        self.done = self.cancelled = self.resumed = 0

    def fill(self) -> None:
        """Orders contexts until enough are open; cancels some."""
        while len(self._open) < OPEN_OPERATIONS:
            number = len(self.acknowledged)
            years = range(1700, 1700 + self._choices.randint(130, 350))
            text = "".join(SENTENCE.format(year, number, year % 97) for year in years)
            made = patiently(
                lambda text=text, number=number: self._client.create_context(  # type: ignore[misc]
                    text, wait=False, request_id=f"order {number}"
                )
            )
            self.acknowledged[made.name] = made.context_name
            self._open.add(made.name)
            if self._choices.random() < 0.2:
                patiently(lambda made=made: self._client.cancel_operation(made.name))  # type: ignore[misc]
                self._unwanted.add(made.name)

    def look(self) -> None:
        """Every operation is there, and says the truth."""
        for name, context in self.acknowledged.items():
            operation = patiently(lambda name=name: self._client.get_operation(name))  # type: ignore[misc]
            if operation.context_name != context:
                raise CheckFailedError(f"{name} was to make {context}, and makes {operation.context_name}")
            if operation.done and name in self._open:
                self._end(operation)

    def finish(self) -> None:
        """Waits for all that is open."""
        end = time.monotonic() + PATIENCE_S
        while self._open:
            if time.monotonic() > end:
                raise CheckFailedError(f"{len(self._open)} operations did not end in {PATIENCE_S:g} s")
            time.sleep(0.5)
            self.look()

    def _end(self, operation: OperationInfo) -> None:
        self._open.remove(operation.name)
        self.resumed += any("went on with" in note for note in operation.notes)
        if isinstance(operation.error, CancelledError) and operation.name in self._unwanted:
            self.cancelled += 1
        elif operation.context is None or operation.context.state != "ready":
            raise CheckFailedError(f"{operation.name} ended with {operation.error or operation.context}")
        else:
            self.done += 1


def patiently(call: Callable[[], Result]) -> Result:
    """Repeats a call while no server takes it."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (ServerUnreachableError, NotReadyError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def verify(store: Store) -> None:
    """Nothing half visible: every context that can be seen is whole."""
    for entry in store.entries():
        problems = store.verify(entry.id)
        if problems:
            raise CheckFailedError(f"context {entry.id} is damaged: {problems[0]}")


@contextmanager
def service(folder: Path, chunk: int) -> Iterator[tuple[Store, list[Process], str]]:
    """A server and two workers over a new store."""
    store = Store(folder / "store", create=True)
    common = ["--store", str(folder / "store"), "--model", "reader", "--device", "cpu", "--format", "json"]
    address = free_address()
    serve = [sys.executable, "-m", "decode_engine", "serve", *common, "--listen", address, "--no-warm-up"]
    work = [sys.executable, "-m", "prefill_worker", "serve", *common, "--chunk", str(chunk)]
    processes = [
        Process(command, folder / f"{number}.log") for number, command in enumerate((serve, work, work))
    ]
    try:
        yield store, processes, address
    finally:
        for process in processes:
            process.running.kill()
            process.running.wait()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    typer.run(main)
