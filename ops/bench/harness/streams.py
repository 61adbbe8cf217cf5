"""Clients that ask a server at once, each for a stream, and what each of them hears when.

They may be in processes of their own, so that what is timed is the server and not one Python that reads for all. So
this module imports nothing that takes long, and all its values can be sent between processes. Times are seconds of
`time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

from decode_engine.rpc.client import AsyncClient
from decode_engine.rpc.client.verbs import GenerateOptions

START_S = 0.2
"""From the decision that all ask until they do: processes have to hear of it before."""


@dataclass(frozen=True)
class Question:
    """What one client asks. context: the resource name."""

    context: str
    options: GenerateOptions


@dataclass(frozen=True)
class Heard:
    """One stream. asked: when. arrivals: when each message with tokens came. counts: how many tokens it had."""

    asked: float
    arrivals: tuple[float, ...]
    counts: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def first_s(self) -> float:
        """From the question to the first token."""
        return self.arrivals[0] - self.asked

    @property
    def gaps_s(self) -> list[float]:
        """Between one message and the next."""
        return [after - before for before, after in pairwise(self.arrivals)]


class AskedAtOnce:
    """Questions that are all asked at one moment, `begin`."""

    def __init__(self, pool: Executor, parts: int, address: str, questions: Sequence[Question]) -> None:
        """parts: how many callers of the pool share the questions."""
        self.begin = time.monotonic() + START_S
        self._count = len(questions)
        shares = [questions[part::parts] for part in range(min(parts, len(questions)))]
        self._asked = [pool.submit(ask_from, self.begin, address, share) for share in shares]

    def heard(self) -> list[Heard]:
        """All streams in the order of the questions, once they have ended. Raises what a client raised."""
        shares = [asked.result() for asked in self._asked]
        return [shares[number % len(shares)][number // len(shares)] for number in range(self._count)]


def ask_from(begin: float, address: str, questions: Sequence[Question]) -> list[Heard]:
    """Asks all of them at that time, by one connection, and reads every answer to its end."""
    return asyncio.run(_ask_all(begin, address, questions))


async def _ask_all(begin: float, address: str, questions: Sequence[Question]) -> list[Heard]:
    async with AsyncClient(address) as client:
        await client.is_serving()  # connects
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        return list(await asyncio.gather(*(_ask(client, question) for question in questions)))


async def _ask(client: AsyncClient, question: Question) -> Heard:
    arrivals, counts, token_ids = list[float](), list[int](), list[int]()
    asked = time.monotonic()
    async with client.generate(question.context, **question.options) as generation:
        async for piece in generation:
            if piece.token_ids:
                arrivals.append(time.monotonic())
                counts.append(len(piece.token_ids))
                token_ids += piece.token_ids
    return Heard(asked, tuple(arrivals), tuple(counts), tuple(token_ids))
