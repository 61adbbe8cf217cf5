"""How many calls may do one thing at once, and until when each of them counts."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.context_service import ContextService
from decode_engine.rpc.door.access import Sharing
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.work import Bound
from sparsekv.v1 import context_pb2


def test_work_has_its_place_until_it_ends_whoever_leaves_before() -> None:
    async def run() -> None:
        bound, go_on = Bound(2, "documents are being read", Sharing(2)), asyncio.Event()

        async def work() -> str:
            await go_on.wait()
            return "read"

        leaving = asyncio.ensure_future(bound.run(work))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(TooManyRequestsError, match="1 documents are being read, which is the limit"):
            await bound.run(work)
        go_on.set()
        await asyncio.sleep(0)  # it ends
        await asyncio.sleep(0)  # and its end is told
        assert await bound.run(work) == "read"

    asyncio.run(run())


def test_a_place_comes_back_from_work_that_fails_or_cannot_begin() -> None:
    async def fail() -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        bound = Bound(2, "documents are being read", Sharing(2))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="new thread"):
                await bound.run(fail)
        with pytest.raises(KeyError):
            async with bound.place():
                raise KeyError
        async with bound.place():
            with pytest.raises(TooManyRequestsError):
                await bound.run(fail)

    asyncio.run(run())


def test_as_many_wait_for_their_turn_as_there_are_places_for_requests() -> None:
    async def run() -> None:
        bound, go_on, done = Bound(1, "documents are being read", Sharing(places=2)), asyncio.Event(), []

        async def work(number: int) -> None:
            await go_on.wait()
            done.append(number)

        calls = [asyncio.ensure_future(bound.run(partial(work, number))) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequestsError, match="1 documents are being read and 2 wait to, which is"):
            await bound.run(partial(work, 3))
        calls[1].cancel()  # whose turn has not come
        await asyncio.wait({calls[1]})
        calls.append(asyncio.ensure_future(bound.run(partial(work, 4))))
        go_on.set()
        await asyncio.gather(*calls, return_exceptions=True)
        assert done == [0, 2, 4]

    asyncio.run(run())


def test_who_leaves_while_a_context_is_ordered_still_counts() -> None:
    class Waits:
        """A call whose work does not end."""

        async def run_alone(self, function: object) -> None:
            await asyncio.Event().wait()

    async def run() -> None:
        slot: Any = SimpleNamespace(get=lambda: None)
        service, request, call = (
            ContextService(slot, "", Sharing()),
            context_pb2.CreateContextRequest(),
            cast(Call, Waits()),
        )
        for _ in range(8):
            leaving = asyncio.ensure_future(service.CreateContext(request, call))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait({leaving})
        with pytest.raises(TooManyRequestsError, match="8 contexts are being ordered"):
            async with asyncio.timeout(10):
                await service.CreateContext(request, call)

    asyncio.run(run())
