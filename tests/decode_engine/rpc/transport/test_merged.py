"""Several streams as one: numbers, errors, how many at once, and the end of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from decode_engine.rpc.transport.work import merged


class Sources:
    """Streams that count how many of them are open."""

    def __init__(self) -> None:
        self.open = 0
        self.most = 0

    async def stream(self, name: str, items: int, fails: bool = False) -> AsyncGenerator[str, None]:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            for number in range(items):
                await asyncio.sleep(0)
                yield f"{name}{number}"
            if fails:
                raise ValueError(name)
        finally:
            self.open -= 1


def test_items_come_in_order_by_source_and_an_error_ends_its_own_source() -> None:
    async def run() -> None:
        sources = Sources()
        streams = [partial(sources.stream, name, 3, name == "b") for name in "abcde"]
        found: dict[int, list[str | Exception]] = {number: [] for number in range(5)}
        async with aclosing(merged(streams, 2)) as items:
            async for number, item in items:
                found[number].append(item)
        for number, name in enumerate("abcde"):
            assert found[number][:3] == [f"{name}{place}" for place in range(3)]
        assert [len(own) for own in found.values()] == [3, 4, 3, 3, 3]
        assert isinstance(found[1][3], ValueError)
        assert (sources.open, sources.most) == (0, 2)

    asyncio.run(run())


def test_who_leaves_early_ends_all_and_who_reads_slowly_holds_all_back() -> None:
    async def run() -> None:
        sources = Sources()
        made: list[str] = []

        async def endless(name: str) -> AsyncGenerator[str, None]:
            async with aclosing(sources.stream(name, 10**9)) as items:
                async for item in items:
                    made.append(item)
                    yield item

        async with aclosing(merged([partial(endless, name) for name in "abc"], 3)) as items:
            async for _ in items:
                for _ in range(100):
                    await asyncio.sleep(0)
                assert len(made) <= 8
                break
        assert sources.open == 0

    asyncio.run(run())


def test_a_source_that_loses_a_cancellation_is_closed_all_the_same() -> None:
    async def run() -> None:
        sources, lost = Sources(), []

        async def deaf(name: str) -> AsyncGenerator[str, None]:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                lost.append(name)
            async with aclosing(sources.stream(name, 10**9)) as items:
                async for item in items:
                    yield item

        streams = [partial(deaf, "a"), partial(sources.stream, "b", 10**9), partial(sources.stream, "c", 3)]
        async with asyncio.timeout(30.0), aclosing(merged(streams, 2)) as items:
            async for number, _ in items:
                assert number == 1
                break
        assert lost == ["a"]
        assert sources.open == 0

    asyncio.run(run())
