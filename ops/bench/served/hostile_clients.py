"""What clients that leave things undone cost those that do not: 500 half-open calls, 200 unread answers, 1,000 idle
connections, beside 16 running streams.

usage: python ops/bench/served/hostile_clients.py [--store STORE --context NAME] [--rounds 3] [--seconds 10] [--bars]

Starts `decode-engine serve` with the reader (on a context of 8,192 tokens that it makes, unless it is told of another),
keeps 16 streams busy, and compares rounds without and with the hostile clients, by turns: the gap between two
messages of a stream (its median over all streams), and how long health takes to answer a client that has just
connected. In a hostile round the half-open calls are made anew every five seconds, because all but 64 are ended at
once. At the end all go away, and the server's memory and threads are compared with those of the first quiet round.
Bars: health within 100 ms, gaps within a tenth, memory within a tenth.

The hostile clients speak HTTP/2 by themselves (tests/support/serving/raw_http2.py): no library leaves a call half
open. Run it from the root of the repository, on a machine that has nothing else to do.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from grpc_health.v1 import health_pb2
from harness.checks import CheckFailedError
from harness.report import Report, reporting
from harness.served import Shelf, serving

from decode_engine.rpc.client import Client
from index_store.errors import SparseKVError
from sparsekv.v1 import generation_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.support.serving.raw_http2 import CHECK, GENERATE, REFLECT, RawConnection

STREAMS = 16
HALF_OPEN = 500
UNREAD = 200
IDLE = 1000
HEALTH_MS = 100.0
GROWTH = 1.1
ANEW_S = 5.0
PROMPT = "The keeper went down to the harbour, and there"


def main(
    store: Annotated[Path | None, typer.Option(help="A store; one is made without it.")] = None,
    context: Annotated[str, typer.Option(help="The name of a context in it.")] = "notes",
    rounds: int = 3,
    seconds: Annotated[float, typer.Option(help="Of each round.")] = 10.0,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
) -> None:
    with ExitStack() as stack, reporting("hostile_clients", bars, gpu=False) as report:
        if store is None:
            store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
            Shelf(store).add_slice(context, 8192, 0, 1)
        served = stack.enter_context(serving(store, "--method", "context"))  # the same one in every run
        address = served.address
        with Client(address) as client:
            name = client.find_context(context).name
            streams = Streams(address, name)
            stack.callback(streams.stop)
            measure(report, served.pid, address, name, streams, rounds, seconds)


def measure(
    report: Report, pid: int, address: str, name: str, streams: Streams, rounds: int, seconds: float
) -> None:
    """All rounds, and what is left after them."""
    gaps: dict[str, list[float]] = {"quiet": [], "hostile": []}
    first_memory, first_threads = 0, 0
    for number in range(rounds):
        for kind, medians in gaps.items():
            with Hostile(address, name) if kind == "hostile" else ExitStack():
                streams.take_gaps()
                health_ms = watch_health(address, seconds)
                round_gaps = streams.take_gaps()
                memory, threads = resources(pid)
            if not round_gaps:
                raise CheckFailedError("the streams stood still")
            medians.append(statistics.median(round_gaps) * 1000)
            first_memory, first_threads = first_memory or memory, first_threads or threads
            row = {
                "round": number,
                "clients": kind,
                "messages": len(round_gaps),
                "gap_ms": medians[-1],
                "longest_gap_ms": max(round_gaps) * 1000,
                "health_ms": statistics.median(health_ms),
                "longest_health_ms": max(health_ms),
                "memory_mb": memory / 1e6,
                "threads": threads,
            }
            slow = f"health took {max(health_ms):.0f} ms" if max(health_ms) > HEALTH_MS else ""
            report.add(row, *filter(None, [slow]))
    time.sleep(3)
    memory, threads = resources(pid)
    growth = statistics.median(gaps["hostile"]) / statistics.median(gaps["quiet"])
    missed = [
        text
        for text, bad in (
            (f"gaps grew to {growth:.2f} times", growth > GROWTH),
            (f"memory grew from {first_memory} to {memory} bytes", memory > GROWTH * first_memory),
        )
        if bad
    ]
    report.add(
        {"clients": "gone", "gap_growth": growth, "memory_mb": memory / 1e6, "threads": threads}, *missed
    )


class Streams:
    """Clients that ask again as soon as they have their answer, and note the gaps between messages."""

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._gaps: list[float] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def take_gaps(self) -> list[float]:
        """Seconds between messages since the last call."""
        taken, self._gaps = self._gaps, []
        return taken

    def stop(self) -> None:
        """Ends all of them."""
        self._ended.set()
        for thread in self._threads:
            thread.join(10)

    def _ask(self, seed: int) -> None:
        with Client(self._address) as client:
            while not self._ended.is_set():
                try:
                    self._read(client, seed)
                except SparseKVError as error:
                    if not self._ended.is_set():
                        typer.echo(f"a stream failed: {error}", err=True)

    def _read(self, client: Client, seed: int) -> None:
        last: float | None = None
        answer = client.generate(
            self._name, text=PROMPT, max_tokens=300, temperature=1.0, seed=seed, patience_s=60
        )
        with answer:
            for _ in answer:
                now = time.monotonic()
                if last is not None:
                    self._gaps.append(now - last)
                last = now
                if self._ended.is_set():
                    return


class Hostile:
    """The hostile clients, while the block runs."""

    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._request = generation_pb2.GenerateRequest(
            context=name, text=PROMPT, max_tokens=4
        ).SerializeToString()
        self._ended = threading.Event()
        self._connections: list[RawConnection] = []
        self._thread = threading.Thread(target=self._open_calls, daemon=True)

    def __enter__(self) -> None:
        self._connections = [RawConnection(self._address) for _ in range(IDLE)]
        for _ in range(UNREAD // 20):  # in parts: the queue has room for no more at once
            connection = RawConnection(self._address, window=0)
            for _ in range(20):
                connection.call(GENERATE, self._request)
            self._connections.append(connection)
            time.sleep(0.5)
        self._thread.start()
        time.sleep(1)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(10)
        for connection in self._connections:
            connection.socket.close()

    def _open_calls(self) -> None:
        while not self._ended.is_set():
            with ExitStack() as stack:
                for number in range(HALF_OPEN):
                    if number % 100 == 0:
                        raw = stack.enter_context(RawConnection(self._address))
                    raw.call(GENERATE if number % 2 else REFLECT)
                self._ended.wait(ANEW_S)


def watch_health(address: str, seconds: float) -> list[float]:
    """Milliseconds until health answered, of clients that connected for it one after the other."""
    request = health_pb2.HealthCheckRequest().SerializeToString()
    taken = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = time.monotonic()
        with RawConnection(address) as raw:
            if raw.status(raw.call(CHECK, request)) != 0:
                raise CheckFailedError("health did not answer")
        taken.append((time.monotonic() - before) * 1000)
        time.sleep(0.1)
    return taken


def resources(pid: int) -> tuple[int, int]:
    """Resident bytes and threads of a process."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])


if __name__ == "__main__":
    typer.run(main)
