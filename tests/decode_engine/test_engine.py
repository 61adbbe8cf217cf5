"""The scheduler against a runner without a model; tests take its steps themselves, without a thread."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from decode_engine.engine import Engine
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineCrashedError,
    TooManyRequestsError,
)
from decode_engine.requests import Finished, FinishReason, Token
from decode_engine.sampler import SamplingParameters
from index_store.errors import InvalidArgumentError
from tests.decode_engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    LetterSink,
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
    assert tokens == [Token(10, "K"), Token(11, "L"), Token(12, "M")]
    assert isinstance(last, Finished)
    assert (last.reason, last.text, last.completion_tokens) == (FinishReason.LENGTH, ".", 3)
    assert last.times.decode_steps == 2
    assert last.figures is client.session.figures
    assert runner.calls == [(("a",), 3), (("a",), 1), (("a",), 1)]
    # the last token is not fed: nothing needs what comes after it
    assert client.session.fed == [7, 8, 9, 10, 11]
    assert client.closes == [1]


def test_end_tokens_are_reported_but_not_read_as_text(engine: FakeEngine) -> None:
    client = submit(engine, make_client("a", prompt=[3], max_tokens=9, end_ids=frozenset({5, 60})))
    run(engine, 3)
    assert client.stream is not None
    first, second, last = client.stream
    assert (first, second) == (Token(4, "E"), Token(5, ""))
    assert isinstance(last, Finished)
    assert (last.reason, last.completion_tokens) == (FinishReason.END_OF_SEQUENCE, 2)


def test_a_stop_string_ends_the_work_at_once(engine: FakeEngine, runner: FakeRunner) -> None:
    client = submit(engine, make_client("a", prompt=[3], max_tokens=50, sink=LetterSink(stop_at=6)))
    run(engine, 10)
    tokens, last = results(client)
    assert tokens == [4, 5, 6]
    assert last.reason is FinishReason.STOP
    assert len(runner.calls) == 3


def test_long_prompts_are_chunked_between_decode_steps_of_others(
    engine: FakeEngine, runner: FakeRunner
) -> None:
    short = submit(engine, make_client("short", prompt=[1], max_tokens=4))
    engine.step()
    long = submit(engine, make_client("long", prompt=range(10), max_tokens=1))
    run(engine, 3)
    assert runner.calls == [
        (("short",), 1),
        (("short",), 1),
        (("long",), 4),
        (("short",), 1),
        (("long",), 4),
        (("short",), 1),
        (("long",), 2),
    ]
    assert results(short)[0] == [2, 3, 4, 5]
    assert results(long)[0] == [10]


def test_a_second_request_streams_before_a_long_first_prompt_is_read(engine: FakeEngine) -> None:
    first = submit(engine, make_client("first", prompt=[0] * 400, max_tokens=1))
    run(engine, 3)
    second = submit(engine, make_client("second", prompt=[1], max_tokens=2))
    run(engine, 3)
    assert results(second)[0] == [2, 3]
    assert len(first.session.fed) < 40


def test_prompts_take_turns(engine: FakeEngine, runner: FakeRunner) -> None:
    for name in "abc":
        submit(engine, make_client(name, prompt=range(16), max_tokens=1))
    run(engine, 9)
    assert "".join(names[0] for names, _ in runner.calls) == "aabacbacb"


def test_decoding_sessions_share_one_batch(engine: FakeEngine, runner: FakeRunner) -> None:
    clients = [submit(engine, make_client(name, prompt=[n], max_tokens=6)) for n, name in enumerate("abcd")]
    run(engine, 12)
    assert (("a", "b", "c", "d"), 1) in runner.calls
    assert [results(client)[0] for client in clients] == [list(range(n + 1, n + 7)) for n in range(4)]


def test_no_more_sessions_than_allowed(engine: FakeEngine, runner: FakeRunner) -> None:
    clients = [submit(engine, make_client(str(n), max_tokens=3)) for n in range(6)]
    run(engine, 30)
    assert max(len(names) for names, _ in runner.calls) <= 4
    assert all(results(client)[0] == [1, 2, 3] for client in clients)


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
    assert len(tokens) == 3
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
    assert runner.calls == [(("reading",), 4)]
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


def test_a_job_without_a_session_fails_alone_and_nobody_gets_its_token(engine: FakeEngine) -> None:
    clients = [submit(engine, make_client(name, prompt=[n], max_tokens=6)) for n, name in enumerate("abc")]
    run(engine, 3)
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


def test_a_failing_prompt_and_a_failing_sink_fail_alone(engine: FakeEngine) -> None:
    class BrokenSink(LetterSink):
        def push(self, token_id: int):  # type: ignore[no-untyped-def]
            raise UnicodeError("no letter")

    prompt = submit(engine, make_client("prompt", session=FakeSession("prompt", fails_at=0)))
    sink = submit(engine, make_client("sink", sink=BrokenSink()))
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

    object.__setattr__(bad.request, "on_close", explode)
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

    stream = engine.submit(engine.reserve(), make_client("a", max_tokens=1, start=start).request)
    engine.step()
    gc.collect()
    assert sessions[0]() is None
    assert len(list(stream)) == 2


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
    half = SamplingParameters(temperature=1.0, seed=0.5)  # type: ignore[arg-type]
    place = engine.reserve()
    with pytest.raises(RuntimeError, match="manual_seed"):
        engine.submit(place, replace(client.request, sampling=half))
    assert client.closes == [0]
    assert len([engine.reserve() for _ in range(6)]) == 6, "its place came back"


@pytest.mark.parametrize("limit", [{"max_sessions": 0}, {"max_waiting": -1}, {"prompt_chunk": 0}])
def test_limits_out_of_range_are_refused(runner: FakeRunner, limit: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(limit))):
        Engine(runner, **limit)  # type: ignore[arg-type]
