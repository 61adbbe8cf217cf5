"""What the link between engine and doors costs: turns of many streams, from a process to another one.

An engine without a model says a token of every stream each turn; the next turn comes when the door has had the last
one, so both sides' work is in the time of a turn. `asyncio` is the same with pyzmq's own asyncio sockets in one
process, which only send and read.

    python ops/bench/served/link.py --streams 64 256 --turns 3000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from decode_engine.orders.core import Facts, Residency, Status, Warmed
from decode_engine.orders.events import Event, Says
from decode_engine.orders.order import Order
from decode_engine.processes.link.frames import Turn, decode_from_engine, encode
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


async def over_asyncio(folder: Path, streams: int, turns: int) -> dict[str, float]:
    """Both sides in this process: a word there, a turn back."""
    context = zmq.asyncio.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"ipc://{folder / 'asyncio'}")
    dealer.connect(f"ipc://{folder / 'asyncio'}")
    turn: list[tuple[int, Event]] = [(number, Says(0, [100_000 + number])) for number in range(streams)]

    async def engine() -> None:
        for _ in range(turns):
            address, _ = await router.recv_multipart()
            await router.send_multipart([address, encode(Turn(turn))])

    talking = asyncio.ensure_future(engine())
    begin = time.perf_counter()
    for _ in range(turns):
        await dealer.send(b"")
        decode_from_engine((await dealer.recv_multipart())[0])
    await talking
    seconds = time.perf_counter() - begin
    context.destroy(linger=0)
    return {"turns_per_s": turns / seconds, "us_per_turn": seconds / turns * 1e6}


def run_engine(path: Path) -> None:
    host = EngineHost(path)
    host.open(Talker())
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--turns", type=int, default=3000)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options.engine)
        return
    for streams in options.streams:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engine")
            command = [sys.executable, __file__, "--engine", str(path)]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as engine:
                link = asyncio.run(over_link(path, streams, options.turns))
                engine.kill()
            plain = asyncio.run(over_asyncio(Path(folder), streams, options.turns))
        result = {"streams": streams, "cores": os.cpu_count(), "link": link, "asyncio": plain}
        print(json.dumps(result, default=float))  # noqa: T201


if __name__ == "__main__":
    main()
