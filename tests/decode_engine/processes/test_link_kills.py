"""Processes on the link that are killed or stopped, with many streams: nobody's stream hangs, and others go on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from decode_engine.orders.events import Ends, Fails, Says
from decode_engine.orders.order import Order
from decode_engine.processes.link.host import Patience
from tests.decode_engine.processes.test_link import Heard, door, engine, in_loop, path, there

__all__ = ["path"]

STREAMS = 64


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serving.link_process", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


async def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return (await asyncio.to_thread(child.stdout.readline)).strip()


@in_loop
async def test_streams_of_an_engine_that_is_killed_end_with_a_true_error(path: Path) -> None:
    async with door(path) as (one, one_ready), door(path) as (two, two_ready):
        for _ in range(3):
            with process("engine", path) as child:
                assert await line(child) == "there"
                await one_ready.become(True)
                await two_ready.become(True)
                heard = [Heard() for _ in range(STREAMS)]
                for number, each in enumerate(heard):
                    (one if number % 2 else two).submit(Order(), each)
                for each in heard:
                    await each.wait_for(lambda: any(isinstance(event, Says) for event in each.events))  # noqa: B023
                question = asyncio.ensure_future(one.warm("slow", None))
                await one.status()
                child.send_signal(signal.SIGKILL)
                for each in heard:
                    end = await each.end()
                    assert isinstance(end, Fails)
                    assert (end.reason, end.retry_after_s) == ("ENGINE_CRASHED", 5.0)
                    tokens = [
                        token for event in each.events if isinstance(event, Says) for token in event.token_ids
                    ]
                    assert tokens == list(range(len(tokens)))
                with pytest.raises(Exception, match="the engine ended"):
                    await question
                refused = Heard()
                one.submit(Order(), refused)
                end = await refused.end()
                assert isinstance(end, Fails)
                assert (end.reason, end.metadata) == ("NOT_READY", {"phase": "start the engine again"})


@in_loop
async def test_requests_of_a_door_that_is_killed_end_and_others_go_on(path: Path) -> None:
    async with engine(path) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        heard = Heard()
        remote.submit(Order(context="of another", max_tokens=2000), heard)
        await there(core, lambda: len(core.orders) == 1)
        core.run(0.001)
        with process("door", path, STREAMS) as child:
            assert (await line(child), await line(child)) == ("there", "speaks")
            child.send_signal(signal.SIGKILL)
            await there(core, lambda: len(core.cancelled) == STREAMS)
        assert {order.context for order in core.cancelled} == {"of a process"}
        assert isinstance(await heard.end(), Ends)
        said = [token for event in heard.events if isinstance(event, Says) for token in event.token_ids]
        assert said == list(range(2000))


@in_loop
async def test_requests_of_a_door_that_hangs_end_and_others_go_on(path: Path) -> None:
    async with engine(path, Patience(turns=50)) as (_, core), door(path) as (remote, ready):
        await ready.become(True)
        heard = Heard()
        with process("door", path, STREAMS) as child:
            assert await line(child) == "there"
            await there(core, lambda: len(core.orders) == STREAMS)
            turns = asyncio.ensure_future(line(child))
            while not turns.done():
                core.turn()
                await asyncio.sleep(0)
            assert await turns == "speaks"
            remote.submit(Order(context="of another", max_tokens=100_000), heard)
            await there(core, lambda: len(core.orders) == STREAMS + 1)
            child.send_signal(signal.SIGSTOP)
            count = 0
            while not core.cancelled:
                core.turn()
                count += 1
                said = lambda: sum(isinstance(event, Says) for event in heard.events)  # noqa: E731
                await heard.wait_for(lambda: said() == count)  # noqa: B023
            await there(core, lambda: len(core.cancelled) == STREAMS)
        assert {order.context for order in core.cancelled} == {"of a process"}
