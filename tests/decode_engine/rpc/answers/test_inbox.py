"""What wakes who reads an answer: that events come, in time or not, and that a cancellation is never lost."""

from __future__ import annotations

import asyncio

import pytest

from decode_engine.orders.events import Waits
from decode_engine.rpc.answers.answering import Inbox


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


def test_it_wakes_for_events_and_tells_whether_they_came_in_time() -> None:
    async def run() -> None:
        inbox = Inbox()
        assert not await inbox.wait(0.01)
        asyncio.get_running_loop().call_later(0.02, inbox.put, [Waits("context"), Waits("")])
        assert await inbox.wait(60.0)
        assert await inbox.wait(None)  # until they are taken
        assert inbox.take() == [Waits("context"), Waits("")]
        assert inbox.take() == []
        assert not await inbox.wait(0.01)

    asyncio.run(run())
