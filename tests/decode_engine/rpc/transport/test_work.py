"""How many calls may do one thing at once, and until when each of them counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_engine.errors import TooManyRequestsError
from decode_engine.rpc.context_service import ContextService
from decode_engine.rpc.door.access import Sharing
from decode_engine.rpc.transport.asker import host_of
from decode_engine.rpc.transport.calls import Abandoned, Call, Stalls, hang_up
from decode_engine.rpc.transport.work import Bound, merged
from index_store.store.description.callers import OPERATOR
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


def test_no_tenant_takes_all_places_or_keeps_others_waiting_behind_it() -> None:
    async def run() -> None:
        bound, go_on = Bound(8, "documents are being read", Sharing(places=8)), asyncio.Event()
        done: list[str] = []

        async def work(tenant: str) -> None:
            done.append(tenant)
            await go_on.wait()

        def ask(tenant: str) -> asyncio.Future[None]:
            return asyncio.ensure_future(bound.run(partial(work, tenant), tenant))

        many = [ask("ant") for _ in range(20)]
        await asyncio.sleep(0.01)
        assert done == ["ant"] * 6
        refused = [each for each in many if each.done()]
        assert len(refused) == 8, "six have places, and six wait"
        assert all(isinstance(each.exception(), TooManyRequestsError) for each in refused)
        others = [ask("bee"), ask("cat")]
        await asyncio.sleep(0.01)
        assert done[6:] == ["bee", "cat"]
        late = ask("dog")
        await asyncio.sleep(0.01)
        assert not late.done(), "all places are taken, and there is one in line"
        many[6].cancel()  # which waits
        await asyncio.wait({many[6]})
        go_on.set()
        await asyncio.gather(*others, late, *(each for each in many if each not in (*refused, many[6])))
        assert sorted(done) == ["ant"] * 11 + ["bee", "cat", "dog"]

    asyncio.run(run())


def test_who_leaves_while_a_context_is_ordered_still_counts() -> None:
    class Waits:
        """A call whose work does not end."""

        caller = OPERATOR

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


def test_one_too_many_ends_the_longest_wait() -> None:
    async def use() -> None:
        stalls, waits = Stalls(limit=2, seconds=60), []
        tasks = [asyncio.get_running_loop().create_future() for _ in range(4)]
        for task in tasks:
            waits.append(asyncio.ensure_future(stalls.wait(task)))
            await asyncio.sleep(0)
        assert (await waits[0], await waits[1], len(stalls)) == (False, False, 2)
        for task in tasks[2:]:
            task.set_result(None)
        assert await asyncio.gather(*waits[2:]) == [True, True]

    asyncio.run(use())


def test_the_worst_connection_is_ended_when_too_many_calls_are_abandoned() -> None:
    async def use() -> None:
        new, ended = asyncio.get_running_loop().create_future, list[str]()
        abandoned, read = Abandoned(3, ended.append), new()
        for peer, ending in (("a", read), ("b", new()), ("b", new())):
            abandoned.add(peer, ending)
        assert (ended, len(abandoned)) == ([], 3)
        read.set_result(None)  # its client has read after all
        await asyncio.sleep(0)
        abandoned.add("c", new())
        assert (ended, len(abandoned)) == ([], 3)
        abandoned.add("a", new())
        assert (ended, len(abandoned)) == (["b"], 2)

    asyncio.run(use())
