"""Generations of the real server, over a toy model and really stored contexts."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from decode_engine.orders.events import Waits
from decode_engine.rpc.answers.answering import Inbox
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from tests.support.serving.service import leases, wait_until


def test_sixteen_streams_at_once_equal_one_at_a_time(server: DecodeServer, client: Client, lamp: str) -> None:
    def run(number: int) -> str:
        method = ("full", "csattention", "csattention-paper")[number % 3]
        prompt = f"{number} " * (number + 1)
        return client.generate(
            lamp, text=prompt, max_tokens=16, method=method, temperature=0.5, seed=number
        ).read()

    alone = [run(number) for number in range(16)]
    loads = server.backend.arena.stats().loads
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(run, range(16)))
    assert together == alone
    wait_until(lambda: leases(server) == 0)
    assert server.backend.arena.stats().loads == loads, "the context is shared, not loaded per session"


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_cancellation_that_comes_with_events_is_not_lost(timeout_s: float | None) -> None:
    """Or a request of a batch would go on, and wait for its items to be read by nobody."""

    async def run() -> None:
        inbox = Inbox()
        task = asyncio.ensure_future(inbox.wait(timeout_s))
        await asyncio.sleep(0.01)
        inbox.put([Waits("")])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
