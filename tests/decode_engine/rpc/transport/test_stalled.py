"""Clients that keep the server waiting: who is given up, when, and which connection is ended."""

from __future__ import annotations

import asyncio
import socket

import pytest

from decode_engine.rpc.transport.asker import host_of
from decode_engine.rpc.transport.calls import Abandoned, Stalls, hang_up


def test_a_wait_ends_with_its_time_or_its_task() -> None:
    async def run() -> tuple[bool, bool, int]:
        stalls = Stalls(limit=5, seconds=0.05)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        late = await stalls.wait(never)
        done = await stalls.wait(asyncio.ensure_future(asyncio.sleep(0)))
        return late, done, len(stalls)

    assert asyncio.run(run()) == (False, True, 0)


def test_one_too_many_ends_the_longest_wait() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        stalls = Stalls(limit=2, seconds=60)
        tasks = [loop.create_future() for _ in range(4)]
        waits = []
        for task in tasks:
            waits.append(asyncio.ensure_future(stalls.wait(task)))
            await asyncio.sleep(0)
        assert not await waits[0]
        assert not await waits[1]
        assert len(stalls) == 2
        for task in tasks[2:]:
            task.set_result(None)
        assert await waits[2]
        assert await waits[3]

    asyncio.run(run())


def test_the_worst_connection_is_ended_when_too_many_calls_are_abandoned() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        ended: list[str] = []
        abandoned = Abandoned(3, ended.append)
        read = loop.create_future()
        for peer, ending in (("a", read), ("b", loop.create_future()), ("b", loop.create_future())):
            abandoned.add(peer, ending)
        assert (ended, len(abandoned)) == ([], 3)
        read.set_result(None)  # its client has read after all
        await asyncio.sleep(0)
        assert len(abandoned) == 2
        abandoned.add("c", loop.create_future())
        assert ended == []
        abandoned.add("a", loop.create_future())
        assert (ended, len(abandoned)) == (["b"], 2)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:5", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5", "::1"),
        ("ipv6:[fe80::1%25eth0]:5", "fe80::1"),
        ("ipv6:[::ffff:10.0.0.1]:5", "10.0.0.1"),
        ("unix:/run/socket", "unix:/run/socket"),
    ],
)
def test_a_client_is_its_address_without_the_port(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_hanging_up_ends_that_connection_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        clients = [socket.create_connection(server.getsockname()) for _ in range(2)]
        accepted = [server.accept()[0] for _ in clients]
        host, port = clients[1].getsockname()
        assert hang_up(f"ipv4:{host}:{port}")
        clients[1].settimeout(60)
        assert clients[1].recv(1) == b""
        accepted[0].sendall(b"x")
        assert clients[0].recv(1) == b"x"
        assert not hang_up("ipv4:127.0.0.1:1")
        assert not hang_up("unix:/run/socket")
        for connection in (*clients, *accepted):
            connection.close()
