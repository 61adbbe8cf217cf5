"""What is given back where requests fail or end while their call goes on, by the real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from decode_engine.core.service import EngineService
from decode_engine.errors import InternalError, TooManyRequestsError
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc import generation_service
from decode_engine.rpc.answers.answering import Said
from decode_engine.rpc.client import Client, GenerateOptions
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.work import Appointments, BlockingWork
from tests.decode_engine.conftest import Library
from tests.support.serving.service import LONG, leases, wait_until


@pytest.fixture(scope="module")
def single(library: Library, lamp: str) -> Iterator[DecodeServer]:
    """A server for one request at a time."""
    with DecodeServer(library.config(max_sessions=1)) as server:
        server.load()
        yield server


@pytest.fixture
def asking(single: DecodeServer) -> Iterator[Client]:
    with Client(single.address) as client:
        yield client
    wait_until(lambda: single.backend.engine.places == leases(single) == 0, seconds=10)


def test_a_request_whose_thread_cannot_begin_leaves_its_place(
    asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(work: BlockingWork, function: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(EngineService, "_is_ready", lambda service, meaning: False)
    monkeypatch.setattr(BlockingWork, "submit_alone", refuse)
    with pytest.raises(InternalError):
        asking.generate(lamp, text="Who?", max_tokens=2).read()


def test_a_request_that_cannot_be_made_leaves_its_place_and_its_context(
    asking: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: ModelRunner, *_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ModelRunner, "prompt_cost", fail)
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
