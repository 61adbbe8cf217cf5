"""What the link between engine and doors costs: turns of many streams, from a process to another one.

usage: python ops/bench/served/link.py [--streams 64,256] [--turns 3000]

Regime: an engine without a model, in a process of its own, says a token of every stream each turn; the next turn comes
when the door has had the last one, so both sides' work is in the time of a turn. `door_us_per_token` and
`engine_us_per_token` are processor time of the two processes; every turn also has a question and its answer in it.

One JSON line for each number of streams; a turn that does not bring a token of every stream never ends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import typer
from harness.parsing import parse_counts
from harness.report import reporting

from decode_engine.orders.events import Event, Facts, Residency, Says, Status, Warmed
from decode_engine.orders.order import Order
from decode_engine.processes.link.host import EngineHost
from decode_engine.processes.link.remote import RemoteCore
from index_store.store.description.context_id import ModelIdentity

OnEvents = Callable[[Sequence[Event]], None]


class Talker:
    """A `Core` that says a token of every stream when it is asked for its status."""

    def __init__(self) -> None:
        self._listeners: list[OnEvents] = []

    async def facts(self) -> Facts:
        identity = ModelIdentity("none", "none", "0", "0", 1, 1, 1, 8, 8, 8)
        return Facts(identity=identity, kv_dtype="float16", max_sessions=1, max_waiting=0, device="none")

    def submit(self, order: Order, on_events: OnEvents) -> Talker:
        self._listeners.append(on_events)
        return self

    def cancel(self) -> None:
        """Ends with the process."""

    def stop(self, answer: int, tokens: int) -> None:
        """No answer ends."""

    def turn(self) -> None:
        for number, on_events in enumerate(self._listeners):
            on_events([Says(0, [100_000 + number])])

    async def status(self) -> Status:
        """Its processor time so far, in nanoseconds."""
        return Status({"nanoseconds": time.process_time_ns()}, {}, {}, [])

    async def residency(self, bases: Sequence[str] = ()) -> Residency:
        return Residency([], {})

    async def warm(self, context: str, deadline_ns: int | None) -> Warmed:
        return Warmed(True, 0, 0, 0)

    async def changed(self, context: str) -> None:
        self.turn()


async def over_link(path: Path, streams: int, turns: int) -> dict[str, float]:
    ready, had = asyncio.Event(), asyncio.Event()
    core = RemoteCore(path, lambda _: ready.set())
    await ready.wait()
    left = streams

    def hear(events: Sequence[Event]) -> None:
        nonlocal left
        left -= len(events)
        if not left:
            left = streams
            had.set()

    for _ in range(streams):
        core.submit(Order(), hear)
    before = (await core.status()).engine["nanoseconds"] or 0
    begin, own = time.perf_counter(), time.process_time()
    for _ in range(turns):
        turn = asyncio.ensure_future(core.changed(""))
        await had.wait()
        had.clear()
        await turn
    seconds, own = time.perf_counter() - begin, time.process_time() - own
    engine = ((await core.status()).engine["nanoseconds"] or 0) - before
    core.close()
    tokens = streams * turns
    return {
        "turns_per_s": turns / seconds,
        "events_per_s": tokens / seconds,
        "us_per_turn": seconds / turns * 1e6,
        "door_us_per_token": own / tokens * 1e6,
        "engine_us_per_token": engine / 1e3 / tokens,
    }


def run_engine(path: Path) -> None:
    host = EngineHost(path)
    host.open(Talker())
    sys.stdin.read()


def main(
    streams: Annotated[str, typer.Option(help="Comma-separated.")] = "64,256",
    turns: Annotated[int, typer.Option(help="That are timed.")] = 3000,
    engine: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """What the link between engine and doors costs; one JSON line for each number of streams."""
    if engine is not None:
        run_engine(engine)
        return
    with reporting("link", gpu=False) as report:
        for count in parse_counts(streams):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "engine")
                command = [sys.executable, __file__, "--engine", str(path)]
                with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                    found = asyncio.run(over_link(path, count, turns))
                    process.kill()
            report.add({"streams": count, **found})


if __name__ == "__main__":
    typer.run(main)
