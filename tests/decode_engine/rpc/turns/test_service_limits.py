"""Ends of requests that nobody waits for, and limits of the real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    PromptTooLongError,
    TooManyRequestsError,
)
from decode_engine.rpc.client import Client, Waiting
from decode_engine.rpc.server import DecodeServer
from index_store.errors import (
    MemoryBudgetError,
)
from tests.decode_engine.conftest import MAX_POSITIONS, Library, Stubs
from tests.support.serving.service import LONG, leases, wait_until


@pytest.fixture
def ends_early(server: DecodeServer) -> Callable[[], bool]:
    """Waits for the end of the only request: whether tokens of it were left, however fast this machine makes them."""
    wait_until(lambda: server.backend.engine.places == leases(server) == 0)  # none of another test is at work
    before = server.backend.engine.stats().decode_tokens

    def wait() -> bool:
        wait_until(lambda: leases(server) == 0)
        return server.backend.engine.stats().decode_tokens - before < LONG - 100

    return wait


def test_cancelling_ends_the_work(
    server: DecodeServer, client: Client, lamp: str, ends_early: Callable[[], bool]
) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1)
    pieces = iter(generation)
    for _ in range(3):
        next(pieces)
    assert leases(server) == 1
    generation.cancel()
    with pytest.raises(CancelledError):
        list(pieces)
    assert ends_early()


def test_a_client_that_goes_away_ends_the_work(
    server: DecodeServer, lamp: str, ends_early: Callable[[], bool]
) -> None:
    with Client(server.address) as leaving:
        next(iter(leaving.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1)))
    assert ends_early()


def test_a_deadline_ends_the_work(
    server: DecodeServer, client: Client, lamp: str, ends_early: Callable[[], bool]
) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1, timeout_s=0.3)
    with pytest.raises(DeadlineExceededError):
        generation.read()
    assert ends_early()


def test_too_many_requests_are_refused(library: Library, lamp: str) -> None:
    with (
        DecodeServer(library.config(max_sessions=1, max_waiting=1)) as small,
        Client(small.address) as client,
    ):
        small.load()
        with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as running:
            next(iter(running))
            waiting = client.generate(lamp, text="Who?", max_tokens=2)
            wait_until(lambda: leases(small) == 2)
            with pytest.raises(TooManyRequestsError):
                client.generate(lamp, text="Who?", max_tokens=2).read()
        assert waiting.read() is not None
        assert waiting.summary.timings.queue_ns > 0


@pytest.fixture
def crowded(library: Library, server: DecodeServer, lamp: str) -> Iterator[tuple[DecodeServer, Client, str]]:
    """A server with memory for one of two contexts, and the other one's name."""
    other = "contexts/" + library.prefill("crowd", method=("csattention", "csattention-paper"))
    backend = server.backend
    with backend.arena.acquire(backend.store, lamp.removeprefix("contexts/")) as resident:
        memory = resident.nbytes + resident.nbytes // 2
    settings = library.config(memory=memory, max_sessions=1, max_waiting=1)
    with DecodeServer(settings) as small, Client(small.address) as client:
        small.load()
        yield small, client, other


def test_a_request_waits_while_others_use_the_memory(
    crowded: tuple[DecodeServer, Client, str], lamp: str
) -> None:
    server, client, other = crowded
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as running:
        next(iter(running))
        with ThreadPoolExecutor(1) as pool:
            told: list[Waiting] = []
            waiting = client.generate(other, text="Who?", max_tokens=2, on_wait=told.append)
            answer = pool.submit(waiting.read)
            wait_until(lambda: told)  # since when it waits, as its times will say
            assert server.backend.engine.places == 2
            with pytest.raises(TooManyRequestsError):
                client.generate(lamp, text="Who?", max_tokens=2).read()
            with pytest.raises(MemoryBudgetError):  # loading ahead of need does not wait
                client.warm_context(other)
            time.sleep(0.1)
            assert not answer.done()
            running.cancel()
            assert answer.result(60) is not None
    assert waiting.summary.timings.load_ns > 5e7
    assert server.backend.arena.ids() == [other.removeprefix("contexts/")]


def test_waiting_for_memory_ends_with_the_deadline_or_the_client(
    crowded: tuple[DecodeServer, Client, str], lamp: str
) -> None:
    server, client, other = crowded
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1) as running:
        pieces = iter(running)
        next(pieces)
        for _ in range(3):  # each finds the one place in the queue free again
            with pytest.raises(DeadlineExceededError):
                client.generate(other, text="Who?", max_tokens=2, timeout_s=0.2).read()
            wait_until(lambda: server.backend.engine.places == 1)
        with client.generate(other, text="Who?", max_tokens=2):
            wait_until(lambda: server.backend.engine.places == 2)
        wait_until(lambda: server.backend.engine.places == 1)
        next(pieces)
    assert lamp.removeprefix("contexts/") in server.backend.arena.ids()


def test_oversized_prompt(client: Client, stubs: Stubs, lamp: str) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        client.generate(lamp, text="x" * MAX_POSITIONS).read()
    tokens = client.get_context(lamp).token_count
    assert caught.value.metadata == {
        "context_tokens": str(tokens),
        "prompt_tokens": str(MAX_POSITIONS),
        "max_tokens": "1",
        "max_positions": str(MAX_POSITIONS),
    }


def test_context_that_does_not_fit_into_memory(library: Library, lamp: str) -> None:
    with DecodeServer(library.config(memory=1000)) as small, Client(small.address) as client:
        small.load()
        with pytest.raises(MemoryBudgetError):
            client.generate(lamp, text="x").read()
