"""What wakes a coroutine from another thread: that it rings, in time or not, and that a cancellation is never lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decode_engine.rpc.transport.appointments import Bell


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_cancellation_that_comes_with_the_ringing_is_not_lost(timeout_s: float | None) -> None:
    """Or a request of a batch would go on, and wait for its items to be read by nobody."""

    async def run() -> None:
        bell = Bell()
        task = asyncio.ensure_future(bell.wait(timeout_s))
        await asyncio.sleep(0.01)
        bell.ring()
        for _ in range(4):
            await asyncio.sleep(0)
            if bell._event.is_set():
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_it_rings_from_any_thread_and_tells_whether_it_did_in_time() -> None:
    async def run() -> None:
        bell = Bell()
        assert not await bell.wait(0.01)
        threading.Timer(0.02, bell.ring).start()
        assert await bell.wait(60.0)
        assert await bell.wait(None)  # until it is cleared
        bell.clear()
        assert not await bell.wait(0.01)

    asyncio.run(run())
