"""The scheduler against a runner without a model: a request from its beginning to its end, and several answers."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from decode_engine.engine.engine import Engine
from decode_engine.engine.sampler import SamplingParameters
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    TooManyRequestsError,
)
from decode_engine.layers.figures import Figures
from decode_engine.orders.events import Ends, PromptRead, Says
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
from tests.decode_engine.engine.scheduling.conftest import Clock


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


COLD = Sampling(temperature=1e-3, seed=5)  # as good as greedy, but drawn


def make(max_sessions: int = 4, session_memory: int | None = None) -> tuple[FakeEngine, FakeRunner]:
    runner = FakeRunner()
    return Engine(
        runner, max_sessions=max_sessions, max_waiting=8, prompt_chunk=8, session_memory=session_memory
    ), runner


def test_the_prompt_is_read_once_and_every_answer_has_its_own_events() -> None:
    engine, runner = make()
    client = submit(engine, make_client("a", prompt=[1, 2, 3], answers=3, max_tokens=4, sampling=COLD))
    run(engine, 5)
    assert runner.calls[0] == (("a",), 3)
    assert [tokens for _, tokens in runner.calls[1:]] == [1] * 9, "with seeds every session steps alone"
    assert client.stream is not None
    events = list(client.stream)
    for answer in range(3):
        said = [event for event in events if isinstance(event, Says) and event.answer == answer]
        assert [each.token_ids for each in said] == [(4,), (5,), (6,), (7,)]
        [end] = [event for event in events if isinstance(event, Ends) and event.answer == answer]
        assert (end.reason, end.completion_tokens) == ("length", 4)
        assert end.seed == SamplingParameters.of(COLD).for_answer(answer).seed
    assert client.session.closed == 1
    assert client.closes == [1], "what all answers share is given back once, after the last of them"
    assert engine.places == 0


def test_the_seeds_of_answers_are_those_that_the_interface_promises() -> None:
    parameters = SamplingParameters(temperature=1.0, seed=2**64 - 1)
    assert parameters.for_answer(0).seed == 2**64 - 1
    assert parameters.for_answer(3).seed == (2**64 - 1 + 3 * 0x9E3779B97F4A7C15) % 2**64
    assert SamplingParameters(temperature=1.0).for_answer(3).seed is None


def test_answers_take_as_many_sessions_and_as_much_memory() -> None:
    engine, _ = make(max_sessions=4, session_memory=100)
    several = submit(engine, make_client("a", answers=3, memory=30, max_tokens=3, sampling=COLD, context="a"))
    one = submit(engine, make_client("b", memory=20, max_tokens=3, context="b"))
    small = submit(engine, make_client("c", memory=10, max_tokens=3, context="c"))
    engine.step()
    stats = engine.stats()
    assert (stats.session_bytes, stats.waiting) == (100, 1)
    run(engine, 8)
    for client in (several, one, small):
        assert client.stream is not None
        assert isinstance(list(client.stream)[-1], Ends)
    with pytest.raises(InvalidArgumentError, match="n is 5, expected 1 to 4"):
        submit(engine, make_client("d", answers=5, sampling=COLD))
    assert engine.stats().session_bytes == 0
    assert engine.places == 0


def test_an_answer_that_fails_ends_its_request_and_no_other() -> None:
    engine, _ = make()

    class Uneven(FakeSession):
        def fork(self) -> FakeSession:
            return replace(super().fork(), fails_at=4)

    session = Uneven("a")
    broken = make_client("a", prompt=[1, 2, 3], answers=2, max_tokens=6, sampling=COLD, session=session)
    submit(engine, broken)
    other = submit(engine, make_client("b", prompt=[1], max_tokens=6))
    run(engine, 8)
    seen, error = failure(broken)
    assert isinstance(error, ValueError)
    assert len(seen) < 12
    assert session.closed == 1
    assert broken.closes == [1]
    assert results(other)[0] == [2, 3, 4, 5, 6, 7]
    assert engine.places == 0


def test_cancelling_ends_all_answers() -> None:
    engine, _ = make()
    client = submit(engine, make_client("a", answers=3, max_tokens=50, sampling=COLD))
    run(engine, 3)
    assert client.stream is not None
    client.stream.cancel()
    engine.step()
    assert (engine.stats().decoding, engine.places, client.closes) == (0, 0, [1])


def test_tokens_that_stop_end_an_answer() -> None:
    engine, _ = make()
    client = submit(engine, make_client("a", prompt=[1], max_tokens=9, stop_ids=frozenset({4})))
    run(engine, 5)
    assert client.stream is not None
    *said, end = client.stream
    assert said == [Says(0, (2,)), Says(0, (3,)), Says(0, (4,))]
    assert isinstance(end, Ends)
    assert end.reason == "stop"


def test_log_probabilities_of_the_prompt_come_before_its_answer_whatever_its_pieces() -> None:
    told = []
    for chunk in (2, 6, 64):
        engine: FakeEngine = Engine(FakeRunner(), prompt_chunk=chunk)
        sampling = Sampling(top_logprobs=1)
        prompt = [1, 2, 3, 9, 10]
        client = submit(engine, make_client("a", prompt=prompt, prompt_logprobs=True, sampling=sampling))
        run(engine, 12)
        assert client.stream is not None
        first, says, *_ = client.stream
        assert isinstance(first, PromptRead)
        assert isinstance(says, Says)
        [told_of] = says.logprobs
        assert told_of.alternatives[0] == (says.token_ids[0], told_of.logprob)
        assert [each.token_id for each in first.logprobs] == prompt[1:]
        # the model says t + 1 after t
        assert [each.alternatives[0][0] for each in first.logprobs] == [2, 3, 4, 10]
        assert first.logprobs[2].logprob < first.logprobs[1].logprob == first.logprobs[0].logprob
        told.append(first.logprobs)
    assert told[0] == told[1] == told[2]
