"""Requests on contexts that are being loaded: they run behind the loading, but nobody else waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import Tensor

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.store.stored_context import Context
from tests.decode_engine.conftest import Library
from tests.support.serving.service import wait_until

SOON = 120.0  # longer than `wait_until` waits


@pytest.fixture
def door(server: DecodeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keys and values of layers from 1 on are read once this is set."""
    wait_until(lambda: server.backend.engine.places == 0)  # no request of another test is at work any more
    opened = threading.Event()
    read = Context.read_head

    def wait(self: Context, path: str, layer: int, head: int, out: Tensor) -> None:
        if path == "kv" and layer > 0:
            assert opened.wait(SOON)
        read(self, path, layer, head, out)

    monkeypatch.setattr(Context, "read_head", wait)
    yield opened
    opened.set()


def test_the_first_request_runs_behind_the_loading(
    library: Library, server: DecodeServer, client: Client, door: threading.Event
) -> None:
    name = "contexts/" + library.prefill("behind")
    engine, arena = server.backend.engine, server.backend.arena
    wait_until(lambda: engine.places == 0)
    with ThreadPoolExecutor(1) as pool:
        generation = client.generate(name, text="Who?", max_tokens=3)
        answer = pool.submit(generation.read)
        wait_until(lambda: engine.stats().prompting == 1)
        assert name.removeprefix("contexts/") not in arena.ids()
        assert not client.get_context(name).resident
        door.set()
        text = answer.result(SOON)
    assert generation.summary.timings.load_ns < generation.summary.timings.first_token_ns
    assert client.generate(name, text="Who?", max_tokens=3).read() == text


def test_nobody_waits_for_the_layers_of_others(
    library: Library, server: DecodeServer, client: Client, lamp: str, door: threading.Event
) -> None:
    cold = "contexts/" + library.prefill("cold")
    engine = server.backend.engine
    door.set()
    client.warm_context(lamp)
    door.clear()
    with ThreadPoolExecutor(2) as pool:
        stream = client.generate(lamp, text="Who?", max_tokens=3000)
        pieces = iter(stream)
        next(pieces)
        waiting = client.generate(cold, text="Who?", max_tokens=3)
        answer = pool.submit(waiting.read)
        wait_until(lambda: server.backend.arena.stats().leases == 2)
        for _ in range(10):
            next(pieces)
        assert engine.stats().decoding == 1
        assert engine.stats().prompting == 0
        door.set()
        answer.result(SOON)
        assert waiting.summary.completion_tokens == 3
        assert waiting.summary.timings.load_ns > 0
        stream.cancel()
        with pytest.raises(CancelledError):
            list(pieces)


def test_who_runs_behind_a_loading_gives_way(
    library: Library, server: DecodeServer, client: Client, lamp: str, door: threading.Event
) -> None:
    """A cold request that came first, and alone, delays nobody; it goes on when they are done."""
    cold = "contexts/" + library.prefill("gives-way")
    engine = server.backend.engine
    door.set()
    client.warm_context(lamp)
    alone = [client.generate(lamp, text=f"Who {number}?", max_tokens=20).read() for number in range(3)]
    wait_until(lambda: engine.places == 0)
    door.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = client.generate(cold, text="Who?", max_tokens=3)
        answer = pool.submit(waiting.read)
        for number in range(3):
            wait_until(
                lambda: engine.stats().prompting == 1
            )  # behind the loading, since nobody else is there
            assert client.generate(lamp, text=f"Who {number}?", max_tokens=20).read() == alone[number]
            assert not answer.done()
        door.set()
        text = answer.result(SOON)
    assert waiting.summary.completion_tokens == 3
    assert client.generate(cold, text="Who?", max_tokens=3).read() == text


def test_who_goes_away_ends_the_loading(
    library: Library, server: DecodeServer, client: Client, lamp: str, door: threading.Event
) -> None:
    cold = library.prefill("given-up")
    arena = server.backend.arena
    door.set()
    client.warm_context(lamp)
    door.clear()
    with ThreadPoolExecutor(1) as pool:
        stream = client.generate(lamp, text="Who?", max_tokens=3000)
        pieces = iter(stream)
        next(pieces)
        waiting = client.generate("contexts/" + cold, text="Who?", max_tokens=3)
        answer = pool.submit(waiting.read)
        wait_until(lambda: arena.stats().leases == 2)
        waiting.cancel()
        with pytest.raises(CancelledError):
            answer.result(SOON)
        wait_until(lambda: arena.stats().leases == 1)
        door.set()
        stream.cancel()
        with pytest.raises(CancelledError):
            list(pieces)
    wait_until(lambda: arena.stats().leases == 0)
    assert cold not in arena.ids()
