"""Several streams of answers as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")

_AGAIN_S = 0.5
"""After which sources that still run are cancelled again."""


async def merged(
    sources: Sequence[Callable[[], AsyncGenerator[ItemT, None]]], at_once: int
) -> AsyncGenerator[tuple[int, ItemT | Exception], None]:
    """What the sources yield, as it comes, with their numbers; at most `at_once` of them run, in order.

    An error is the last item of the source that raised it; the others go on. Who reads slowly holds all back. Closing
    this closes them all.
    """
    items: asyncio.Queue[tuple[int, ItemT | Exception] | None] = asyncio.Queue(at_once)
    waiting = iter(enumerate(sources))

    async def work() -> None:
        for number, source in waiting:
            try:
                async with aclosing(source()) as stream:
                    async for item in stream:
                        await items.put((number, item))
            except Exception as error:
                await items.put((number, error))
        await items.put(None)

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(sources)))]
    try:
        left = len(workers)
        while left:
            found = await items.get()
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        # Again where a source has lost it: a library's wait may, and what it goes on with nobody reads.
        while left_over := [worker for worker in workers if not worker.done()]:
            for worker in left_over:
                worker.cancel()
            while not items.empty():
                items.get_nowait()
            await asyncio.wait(left_over, timeout=_AGAIN_S)
