"""Requests that arrive at one moment: as many as there are places for are answered, by whichever door they come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from decode_engine.gateway.serving import http_door
from decode_engine.rpc.client import AsyncClient
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.work import BlockingWork
from tests.decode_engine.conftest import Library
from tests.support.devices import nightly
from tests.support.serving.service import loaded, wait_until

SESSIONS, WAITING = 64, 256  # of which all but a quarter may be of one client, and on one context

Wide = tuple[DecodeServer, str]


@pytest.fixture(scope="module")
def wide(library: Library, lamp: str) -> Iterator[Wide]:
    config = library.config(max_sessions=SESSIONS, max_waiting=WAITING, http_port=0)
    with loaded(config) as server, http_door(config, server.grpc) as gateway:
        yield server, gateway.url


async def by_grpc(wide: Wide, count: int, more: dict[str, Any]) -> list[str]:
    async with AsyncClient(wide[0].address) as client:

        async def ask(number: int) -> str:
            async with client.generate("", text=f"Who is {number}?", max_tokens=2, **more) as generation:
                await generation.read()
            return str(generation.summary.finish_reason)

        return list(await asyncio.gather(*map(ask, range(count))))


async def by_http(wide: Wide, count: int, more: dict[str, Any]) -> list[str]:
    async with httpx.AsyncClient(
        base_url=wide[1], timeout=300, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def ask(number: int) -> str:
            said = {"role": "user", "content": f"Who is {number}?"}
            body = {"model": "model", "messages": [said], "max_tokens": 2, **more}
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            return str(reply.get("error") or reply["choices"][0]["finish_reason"])

        return list(await asyncio.gather(*map(ask, range(count))))


Burst = Callable[[Wide, int, dict[str, Any]], Any]
DOORS = {"grpc": by_grpc, "http": by_http}


@pytest.mark.parametrize("count", [64, *nightly(256)])
@pytest.mark.parametrize("burst", DOORS.values(), ids=DOORS)
def test_a_burst_is_answered(wide: Wide, burst: Burst, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets a thread before all have come: first of the door, then of the engine."""
    server, _ = wide
    submit, come = BlockingWork.submit, dict.fromkeys((server.grpc.listener.work, server.backend.threads), 0)

    def counted(work: BlockingWork, function: Callable[[], Any]) -> Future[Any]:
        come[work] += 1
        return submit(work, function)

    go_on = {work: threading.Event() for work in come}
    for work, event in go_on.items():
        for _ in range(8):  # its threads
            submit(work, event.wait)
    monkeypatch.setattr(BlockingWork, "submit", counted)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.extend(asyncio.run(burst(wide, count, {}))))
    asking.start()
    try:
        for work, event in go_on.items():
            wait_until(lambda work=work: come[work] >= count or not asking.is_alive())  # type: ignore[misc]
            event.set()
    finally:
        for event in go_on.values():
            event.set()
        asking.join()
    assert set(answers) == {"length"}
    assert len(answers) == count


@pytest.mark.parametrize("burst", DOORS.values(), ids=DOORS)
def test_constraints_of_a_burst_are_compiled_in_turn(wide: Wide, burst: Burst) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 9}
    told = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    more = {"json_schema": schema} if burst is by_grpc else {"response_format": told}
    assert asyncio.run(burst(wide, 64, more)) == ["length"] * 64
