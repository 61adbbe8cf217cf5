"""An engine or a door without a model, as a process that tests may kill: `engine SOCKET` or `door SOCKET STREAMS`.

It says by a line on standard output that it is there, a door for the second time once all of its streams speak; it ends
with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from decode_engine.orders.events import Event, Says
from decode_engine.orders.order import Order
from decode_engine.processes.link.host import EngineHost
from decode_engine.processes.link.remote import RemoteCore
from tests.support.serving.fake_core import FakeCore


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def run_engine(path: Path) -> None:
    host = EngineHost(path)
    core = FakeCore(host.loop)
    host.open(core)
    core.run(0.001)
    say("there")
    sys.stdin.read()


async def run_door(path: Path, streams: int) -> None:
    ready = asyncio.Event()
    core = RemoteCore(path, lambda _: ready.set())
    await ready.wait()
    say("there")
    speaking: set[int] = set()
    all_speak = asyncio.Event()

    def note(number: int, events: Sequence[Event]) -> None:
        if any(isinstance(event, Says) for event in events):
            speaking.add(number)
        if len(speaking) == streams:
            all_speak.set()

    for number in range(streams):
        core.submit(Order(context="of a process"), lambda events, number=number: note(number, events))  # type: ignore[misc]
    await all_speak.wait()
    say("speaks")
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        run_engine(Path(sys.argv[2]))
    else:
        asyncio.run(run_door(Path(sys.argv[2]), int(sys.argv[3])))
