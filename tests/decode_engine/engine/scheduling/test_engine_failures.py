"""What becomes of others when a request fails, and the scheduler with its thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Step
from decode_engine.errors import (
    CancelledError,
    EngineCrashedError,
    ShuttingDownError,
)
from decode_engine.orders.events import Ends, Event, Says
from index_store.errors import InvalidArgumentError
from tests.decode_engine.engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    Stream,
    failure,
    make_client,
    results,
    run,
    submit,
)


def test_a_failing_session_fails_alone(engine: FakeEngine) -> None:
    broken = FakeSession("broken", fails_at=3)
    clients = [
        submit(engine, make_client("a", max_tokens=8)),
        submit(engine, make_client("broken", max_tokens=8, session=broken)),
        submit(engine, make_client("c", max_tokens=8)),
    ]
    run(engine, 20)
    assert results(clients[0])[0] == results(clients[2])[0] == list(range(1, 9))
    tokens, error = failure(clients[1])
    assert tokens == [1, 2, 3]
    assert error is broken.fails_with
    assert clients[0].session.fed == list(range(8)), "nothing is fed twice when a batch is repeated"
    assert [client.closes for client in clients] == [[1], [1], [1]]
    assert engine.healthy


def test_tokens_of_a_prompt_that_fails_do_not_count_as_fed(engine: FakeEngine) -> None:
    submit(engine, make_client("broken", prompt=range(8), session=FakeSession("broken", fails_at=6)))
    run(engine, 3)
    assert engine.stats().prompt_tokens == 6


def test_a_job_without_a_session_fails_alone_and_nobody_gets_its_token(engine: FakeEngine) -> None:
    clients = [submit(engine, make_client(name, prompt=[n], max_tokens=6)) for n, name in enumerate("abc")]
    run(engine, 2)
    engine._queues.decoding[1].session = None
    run(engine, 8)
    tokens, error = failure(clients[1])
    assert tokens == [2, 3, 4]
    assert isinstance(error, EngineCrashedError)
    assert results(clients[0])[0] == list(range(1, 7))
    assert results(clients[2])[0] == list(range(3, 9))
    assert engine.healthy


def test_a_session_that_cannot_start_fails_alone(engine: FakeEngine) -> None:
    def start() -> FakeSession:
        raise InvalidArgumentError("no such thing")

    bad = submit(engine, make_client("bad", start=start))
    good = submit(engine, make_client("good", max_tokens=2))
    run(engine, 4)
    assert isinstance(failure(bad)[1], InvalidArgumentError)
    assert bad.closes == [0]
    assert results(good)[0] == [1, 2]


def test_a_failing_prompt_and_a_failing_reply_fail_alone(engine: FakeEngine) -> None:
    class BrokenReply(Stream):
        def _put(self, event: Event) -> None:
            if isinstance(event, Says):
                raise UnicodeError("no letter")
            super()._put(event)

    prompt = submit(engine, make_client("prompt", session=FakeSession("prompt", fails_at=0)))
    sink = make_client("sink")
    sink.stream = BrokenReply(engine.wake)
    engine.submit(engine.reserve(), sink.work, sink.stream)
    good = submit(engine, make_client("good", max_tokens=2))
    run(engine, 5)
    assert isinstance(failure(prompt)[1], ValueError)
    assert isinstance(failure(sink)[1], UnicodeError)
    assert results(good)[0] == [1, 2]
    assert prompt.closes == [1]
    assert sink.closes == [1]


def test_a_failing_close_does_not_stop_the_others(engine: FakeEngine) -> None:
    client = make_client("a", max_tokens=1)
    bad = make_client("b", max_tokens=1)

    def explode() -> None:
        raise OSError("unmapped twice")

    bad.work.on_close = explode
    submit(engine, bad)
    submit(engine, client)
    run(engine, 3)
    assert results(bad)[0] == results(client)[0] == [1]


def test_ended_sessions_are_freed_while_their_events_wait(engine: FakeEngine) -> None:
    sessions: list[weakref.ref[FakeSession]] = []

    def start() -> FakeSession:
        session = FakeSession("a")
        sessions.append(weakref.ref(session))
        return session

    stream = Stream(engine.wake)
    engine.submit(engine.reserve(), make_client("a", max_tokens=1, start=start).work, stream)
    engine.step()
    gc.collect()
    assert sessions[0]() is None
    assert len(list(stream)) == 2


def test_a_runner_that_raises_ends_its_batch_only() -> None:
    class Broken(FakeRunner):
        broken = False

        def launch(self, *arguments: Any) -> Step:
            if self.broken:
                raise MemoryError("the device is full")
            return super().launch(*arguments)

    broken = Broken()
    engine = Engine(broken, max_sessions=4)
    clients = [submit(engine, make_client(name, max_tokens=5)) for name in "ab"]
    engine.step()
    broken.broken = True
    engine.step()
    broken.broken = False
    for client in clients:
        tokens, error = failure(client)
        assert tokens == [1, 2]
        assert isinstance(error, MemoryError)
        assert client.closes == [1]
    later = submit(engine, make_client("later", max_tokens=3))
    run(engine, 2)
    assert results(later)[0] == [1, 2, 3]


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
    class Device:
        def synchronize(self) -> None:
            if lost:
                raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "current_stream", Device)
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
