"""Ends of requests that nobody waits for, limits of the real server, and requests on contexts that are being loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from decode_engine.core.service import EngineService
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    TooManyRequestsError,
)
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc import generation_service
from decode_engine.rpc.answers.answering import Said
from decode_engine.rpc.client import Client, GenerateOptions, Waiting
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.work import Appointments, BlockingWork
from index_store.errors import MemoryBudgetError
from index_store.store.stored_context import Context
from tests.decode_engine.conftest import Library
from tests.support.serving.service import LONG, leases, loaded, wait_until
from tests.support.store import raising


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


@pytest.fixture
def crowded(library: Library, server: DecodeServer, lamp: str) -> Iterator[tuple[DecodeServer, Client, str]]:
    """A server with memory for one of two contexts, and the other one's name."""
    other = "contexts/" + library.prefill("crowd", method=("csattention", "csattention-paper"))
    backend = server.backend
    with backend.arena.acquire(backend.store, lamp.removeprefix("contexts/")) as resident:
        memory = resident.nbytes + resident.nbytes // 2
    settings = library.config(memory=memory, max_sessions=1, max_waiting=1)
    with loaded(settings) as small, Client(small.address) as client:
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
            assert not answer.done()
            running.cancel()
            assert answer.result(60) is not None
    assert waiting.summary.timings.load_ns > 0
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


@pytest.fixture(scope="module")
def single(library: Library, lamp: str) -> Iterator[DecodeServer]:
    """A server for one request at a time."""
    with loaded(library.config(max_sessions=1)) as server:
        yield server


@pytest.fixture
def asking(single: DecodeServer) -> Iterator[Client]:
    with Client(single.address) as client:
        yield client
    wait_until(lambda: single.backend.engine.places == leases(single) == 0, seconds=10)


def test_a_request_whose_thread_cannot_begin_leaves_its_place(
    asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineService, "_is_ready", lambda service, meaning: False)
    monkeypatch.setattr(BlockingWork, "submit_alone", raising(RuntimeError("can't start new thread")))
    with pytest.raises(InternalError):
        asking.generate(lamp, text="Who?", max_tokens=2).read()


def test_a_request_that_cannot_be_made_leaves_its_place_and_its_context(
    asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "prompt_cost", raising(OSError(5, "Input/output error")))
    with pytest.raises(InternalError):
        asking.generate(lamp, text="Who?", max_tokens=2).read()


def test_a_request_that_fails_in_a_batch_does_not_run_on(
    single: DecodeServer, asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = generation_service.said_message

    def fail(said: Said, bytes_of: Sequence[bytes]) -> Any:
        if said.prompt_logprobs:
            raise OSError(5, "Input/output error")
        return made(said, bytes_of)

    monkeypatch.setattr(generation_service, "said_message", fail)
    before = single.backend.engine.stats().decode_tokens
    failing, short = asking.batch_generate(
        lamp,
        [
            {"text": "Who?", "max_tokens": LONG, "prompt_logprobs": True},
            {"text": "Who?", "max_tokens": 2},  # which gets the session when the other one has left it
        ],
    )
    assert isinstance(failing.error, InternalError)
    assert short.error is None
    assert single.backend.engine.stats().decode_tokens - before < LONG - 100


def test_a_request_that_has_begun_is_not_refused(
    asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checked = BlockingWork.run, []

    async def once(work: BlockingWork, function: Callable[[], Any]) -> Any:
        if checked:
            raise TooManyRequestsError("64 other calls wait for the store", limit=64)
        checked.append(function)
        return await run(work, function)

    monkeypatch.setattr(BlockingWork, "run", once)
    generation = asking.generate(lamp, text="Who?", max_tokens=2, prompt_logprobs=True)
    generation.read()
    assert len(generation.prompt_logprobs) == 3


def test_every_request_of_a_batch_tells_of_the_place_that_it_frees(
    asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[Appointments] = []

    def note(appointments: Appointments) -> None:
        freed.append(appointments)

    monkeypatch.setattr(Appointments, "place_freed", note)
    short, long = GenerateOptions(text="Who?", max_tokens=2), GenerateOptions(text="Who?", max_tokens=LONG)
    asking.generate(lamp, **short).read()
    assert len(freed) == 1
    assert len(list(asking.batch_generate(lamp, [short] * 3))) == 3
    assert len(freed) == 4
    with asking.batch_generate(lamp, [short, short, long]) as batch:
        items = iter(batch)
        next(items)
        next(items)  # the call goes on with the last one
        assert len(freed) >= 5


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
