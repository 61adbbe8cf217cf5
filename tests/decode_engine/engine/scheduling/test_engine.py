"""The scheduler against a runner without a model; tests take its steps themselves, without a thread."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from decode_engine.engine.engine import Engine
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    TooManyRequestsError,
)
from decode_engine.layers.figures import Figures
from decode_engine.orders.events import Ends, Says
from decode_engine.orders.order import Order, Sampling
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


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(runner: FakeRunner, clock: Clock) -> FakeEngine:
    """An engine without its thread: tests call `step`."""
    return Engine(runner, max_sessions=4, max_waiting=2, prompt_chunk=4, clock_ns=clock)


def test_a_request_from_prompt_to_end(engine: FakeEngine, runner: FakeRunner) -> None:
    client = submit(engine, make_client("a", prompt=[7, 8, 9], max_tokens=3))
    run(engine, 2)
    assert client.stream is not None
    *tokens, last = client.stream
    assert tokens == [Says(0, (10,)), Says(0, (11,)), Says(0, (12,))]
    assert isinstance(last, Ends)
    assert (last.reason, last.completion_tokens) == ("length", 3)
    assert last.times.decode_steps == 2
    assert last.figures == asdict(client.session.figures)
    assert runner.calls == [(("a",), 2), (("a",), 1), (("a",), 1), (("a",), 1)]
    # the last token is not fed: nothing needs what comes after it
    assert client.session.fed == [7, 8, 9, 10, 11]
    assert client.closes == [1]


def test_end_tokens_are_reported(engine: FakeEngine) -> None:
    client = submit(engine, make_client("a", prompt=[3], max_tokens=9, end_ids=frozenset({5, 60})))
    run(engine, 3)
    assert client.stream is not None
    first, second, last = client.stream
    assert (first, second) == (Says(0, (4,)), Says(0, (5,)))
    assert isinstance(last, Ends)
    assert (last.reason, last.completion_tokens) == ("end_of_sequence", 2)


def test_a_stop_string_ends_the_work_at_once(engine: FakeEngine, runner: FakeRunner) -> None:
    client = submit(engine, make_client("a", prompt=[3], max_tokens=50, stops=("G",)))
    run(engine, 3)
    assert client.stream is not None
    client.stream.stop(0, 3)
    run(engine, 5)
    tokens, last = results(client)
    assert tokens == [4, 5, 6, 7], "one was on its way"
    assert (last.reason, last.completion_tokens) == ("stop", 3)
    assert len(runner.calls) == 4


def test_places_are_limited_and_come_back(engine: FakeEngine) -> None:
    clients = [submit(engine, make_client(str(n), max_tokens=1)) for n in range(5)]
    unused = engine.reserve()
    with pytest.raises(TooManyRequestsError) as caught:
        engine.reserve()
    assert caught.value.metadata == {"limit": "6"}
    unused.release()
    unused.release()
    engine.reserve().release()
    run(engine, 5)
    assert [results(client)[0] for client in clients] == [[1]] * 5
    for place in [engine.reserve() for _ in range(6)]:
        place.release()


def test_cancelling_stops_within_one_step(engine: FakeEngine, runner: FakeRunner) -> None:
    kept = submit(engine, make_client("kept", max_tokens=6))
    dropped = submit(engine, make_client("dropped", max_tokens=1000))
    run(engine, 3)
    assert dropped.stream is not None
    dropped.stream.cancel()
    before = len(runner.calls)
    engine.step()
    assert all("dropped" not in names for names, _ in runner.calls[before:])
    tokens, error = failure(dropped)
    assert tokens == [1, 2, 3, 4]
    assert isinstance(error, CancelledError)
    assert dropped.closes == [1]
    run(engine, 5)
    assert results(kept)[0] == [1, 2, 3, 4, 5, 6]


def test_cancelling_while_waiting_and_while_reading_the_prompt(
    engine: FakeEngine, runner: FakeRunner
) -> None:
    reading = submit(engine, make_client("reading", prompt=range(20)))
    engine.step()
    waiting = submit(engine, make_client("waiting"))
    for client in (reading, waiting):
        assert client.stream is not None
        client.stream.cancel()
    run(engine, 2)
    assert runner.calls == [(("reading",), 2)] * 2
    for client in (reading, waiting):
        assert isinstance(failure(client)[1], CancelledError)
        assert client.closes in ([0], [1])


def test_cancelling_after_the_end_changes_nothing(engine: FakeEngine) -> None:
    client = submit(engine, make_client("a", max_tokens=1))
    engine.step()
    assert client.stream is not None
    client.stream.cancel()
    engine.step()
    assert results(client)[0] == [1]
    assert client.closes == [1]


def test_a_passed_deadline_stops_within_one_step(
    engine: FakeEngine, runner: FakeRunner, clock: Clock
) -> None:
    client = submit(engine, make_client("a", max_tokens=1000, deadline_ns=100))
    run(engine, 2)
    clock.now = 99
    engine.step()
    clock.now = 100
    before = len(runner.calls)
    engine.step()
    assert len(runner.calls) == before
    tokens, error = failure(client)
    assert tokens == [1, 2, 3, 4]
    assert isinstance(error, DeadlineExceededError)
    assert error.metadata == {"generated": "4"}
    assert client.closes == [1]


def test_times_are_measured_from_the_submission(engine: FakeEngine, clock: Clock) -> None:
    client = submit(engine, make_client("a", prompt=range(8), max_tokens=2))
    clock.now = 10
    engine.step()  # admitted, first half of the prompt
    clock.now = 30
    engine.step()  # second half, first token and decode step
    times = results(client)[1].times
    assert (times.queue_ns, times.prompt_ns, times.first_token_ns, times.total_ns) == (10, 20, 30, 30)
    assert times.decode_steps == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"), [([], 1, "no tokens"), ([1], 0, "max_tokens is 0")]
)
def test_bad_requests_are_refused_and_closed(
    engine: FakeEngine, prompt: list[int], max_tokens: int, match: str
) -> None:
    client = make_client("a", prompt, max_tokens)
    with pytest.raises(InvalidArgumentError, match=match):
        submit(engine, client)
    assert client.closes == [0]


def test_a_request_whose_sampler_cannot_be_made_is_closed(engine: FakeEngine) -> None:
    client = make_client("a")
    client.work.order = Order(sampling=Sampling(temperature=1.0, seed=0.5))  # type: ignore[arg-type]
    place = engine.reserve()
    with pytest.raises(RuntimeError, match="manual_seed"):
        engine.submit(place, client.work, Stream(engine.wake))
    assert client.closes == [0]
    assert len([engine.reserve() for _ in range(6)]) == 6, "its place came back"


@pytest.mark.parametrize("limit", [{"max_sessions": 0}, {"max_waiting": -1}, {"prompt_chunk": 0}])
def test_limits_out_of_range_are_refused(runner: FakeRunner, limit: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(limit))):
        Engine(runner, **limit)  # type: ignore[arg-type]


def test_what_sessions_moved_is_counted_when_they_end(engine: FakeEngine) -> None:
    moved = Figures(host_bytes_read=5, rows_reused=3, device_wait_for_host_ns=7)
    well = submit(engine, make_client("a", session=FakeSession("a", figures=moved), max_tokens=2))
    ill = submit(engine, make_client("b", session=FakeSession("b", fails_at=0, figures=moved)))
    assert engine.stats().host_bytes_read == 0
    run(engine, 3)
    assert results(well)[1].figures == asdict(moved)
    failure(ill)
    stats = engine.stats()
    assert (stats.host_bytes_read, stats.rows_reused, stats.device_wait_for_host_ns) == (10, 6, 14)
