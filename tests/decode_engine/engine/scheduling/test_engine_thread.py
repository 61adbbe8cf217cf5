"""The scheduler with its thread: streaming, waking, shutting down, crashing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from decode_engine.engine.engine import Engine
from decode_engine.errors import (
    CancelledError,
    EngineCrashedError,
    ShuttingDownError,
)
from decode_engine.orders.events import Ends, Says
from tests.decode_engine.engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    Stream,
    failure,
    make_client,
    results,
    submit,
)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def running(runner: FakeRunner) -> Iterator[FakeEngine]:
    """An engine with its thread; the runner waits for a permit of `runner.gate` before every forward."""
    runner.gate = threading.Semaphore(0)
    engine = Engine(runner, max_sessions=4, max_waiting=2, prompt_chunk=4)
    engine.start()
    yield engine
    runner.gate.release(10_000)
    engine.shutdown()


def test_the_thread_streams_while_it_works(running: FakeEngine, runner: FakeRunner) -> None:
    assert runner.gate is not None
    client = submit(running, make_client("a", max_tokens=3))
    assert client.stream is not None
    events = iter(client.stream)
    for token in (1, 2, 3):
        runner.gate.release()
        assert next(events) == Says(0, (token,))
    assert isinstance(next(events), Ends)
    assert client.closes == [1]


def test_an_idle_thread_wakes_for_a_cancellation(running: FakeEngine, runner: FakeRunner) -> None:
    assert runner.gate is not None
    client = submit(running, make_client("a", max_tokens=1000))
    assert client.stream is not None
    client.stream.cancel()
    runner.gate.release(2)  # the step that was under way
    assert isinstance(failure(client)[1], CancelledError)


def test_shutdown_lets_requests_finish_within_its_grace(runner: FakeRunner) -> None:
    engine = Engine(runner)
    engine.start()
    client = submit(engine, make_client("a", max_tokens=50))
    engine.shutdown(grace_s=30)
    assert len(results(client)[0]) == 50
    refused = make_client("late")
    with pytest.raises(ShuttingDownError):
        engine.reserve()
    assert refused.closes == []


def test_shutdown_without_grace_ends_requests(running: FakeEngine, runner: FakeRunner) -> None:
    assert runner.gate is not None
    place = running.reserve()
    client = submit(running, make_client("a", max_tokens=10**6))
    assert client.stream is not None
    runner.gate.release()
    next(iter(client.stream))  # it was admitted
    stopper = threading.Thread(target=running.shutdown)
    stopper.start()
    runner.gate.release(1000)
    stopper.join(60)
    assert not stopper.is_alive()
    assert isinstance(failure(client)[1], ShuttingDownError)
    assert client.closes == [1]
    late = make_client("late")
    with pytest.raises(ShuttingDownError):
        running.submit(place, late.work, Stream(running.wake))
    assert late.closes == [0]


@pytest.mark.parametrize("lost", [True, False])
def test_the_loss_of_the_device_ends_the_scheduler(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def synchronize() -> None:
        if lost:
            raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    runner.gate = threading.Semaphore(0)
    engine = Engine(runner)
    engine.start()
    error = torch.AcceleratorError("an illegal memory access was encountered")
    first = submit(engine, make_client("first", session=FakeSession("first", fails_at=0, fails_with=error)))
    second = submit(engine, make_client("second"))
    runner.gate.release(10)
    assert failure(first)[1] is error
    if lost:
        assert isinstance(failure(second)[1], EngineCrashedError)
    else:
        assert len(results(second)[0]) == 4
    assert engine.healthy is not lost
    engine.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_fails_everything_and_is_told(runner: FakeRunner) -> None:
    class Catastrophe(BaseException):
        pass

    crashes: list[BaseException] = []
    runner.gate = threading.Semaphore(0)
    engine = Engine(runner, on_crash=crashes.append)
    engine.start()
    fatal = FakeSession("fatal", fails_at=0, fails_with=Catastrophe())
    clients = [submit(engine, make_client("fatal", session=fatal)), submit(engine, make_client("other"))]
    runner.gate.release(10)
    for client in clients:
        assert isinstance(failure(client)[1], EngineCrashedError)
        assert client.closes in ([0], [1])
    assert crashes == [fatal.fails_with]
    assert not engine.healthy
    with pytest.raises(EngineCrashedError):
        engine.reserve()
    engine.shutdown()
