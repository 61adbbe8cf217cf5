"""The scheduler against a runner without a model: requests from beginning to end, loading contexts, and failures."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Step
from decode_engine.engine.sampler import SamplingParameters
from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    EngineCrashedError,
    ShuttingDownError,
    TooManyRequestsError,
)
from decode_engine.layers.figures import Figures
from decode_engine.orders.events import Ends, Event, PromptRead, Says
from decode_engine.orders.order import Order, Sampling
from index_store.errors import InvalidArgumentError
from tests.decode_engine.engine.fake_runner import (
    Client,
    FakeEngine,
    FakeRunner,
    FakeSession,
    Sessions,
    Stream,
    Tokens,
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
    first, second, last = client.stream
    assert (first, second) == (Says(0, (4,)), Says(0, (5,)))
    assert isinstance(last, Ends)
    assert (last.reason, last.completion_tokens) == ("end_of_sequence", 2)


def test_a_stop_string_ends_the_work_at_once(engine: FakeEngine, runner: FakeRunner) -> None:
    client = submit(engine, make_client("a", prompt=[3], max_tokens=50, stops=("G",)))
    run(engine, 3)
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
        client.stream.cancel()
    run(engine, 2)
    assert runner.calls == [(("reading",), 2)] * 2
    for client in (reading, waiting):
        assert isinstance(failure(client)[1], CancelledError)
        assert client.closes in ([0], [1])


def test_cancelling_after_the_end_changes_nothing(engine: FakeEngine) -> None:
    client = submit(engine, make_client("a", max_tokens=1))
    engine.step()
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
    client.stream.cancel()
    engine.step()
    assert (engine.stats().decoding, engine.places, client.closes) == (0, 0, [1])


def test_log_probabilities_of_the_prompt_come_before_its_answer_whatever_its_pieces() -> None:
    told = []
    for chunk in (2, 6, 64):
        engine: FakeEngine = Engine(FakeRunner(), prompt_chunk=chunk)
        sampling = Sampling(top_logprobs=1)
        prompt = [1, 2, 3, 9, 10]
        client = submit(engine, make_client("a", prompt=prompt, prompt_logprobs=True, sampling=sampling))
        run(engine, 12)
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


@dataclass
class LoadingRunner(FakeRunner):
    """Sessions whose names are in `loading` wait for their first layer, as the real one does; `meanwhile` is called."""

    loading: set[str] = field(default_factory=set)
    engine: FakeEngine | None = None
    meanwhile: Callable[[], None] = lambda: None
    waits: int = 0

    def read(self, sessions: Sessions, token_ids: Tokens, **how: Any) -> list[Tensor]:
        while self.loading & {session.name for session in sessions}:
            self.waits += 1
            assert self.waits < 50, "nobody ended the wait"
            self.meanwhile()
            self.engine.give_way()
        return super().read(sessions, token_ids, **how)


def make_loading(max_sessions: int = 4) -> tuple[FakeEngine, LoadingRunner]:
    runner = LoadingRunner()
    runner.engine = Engine(runner, max_sessions=max_sessions, max_waiting=8, prompt_chunk=4)
    return runner.engine, runner


def cold(runner: LoadingRunner, name: str, **changes: object) -> Client:
    """A request whose context is loaded when its name is taken out of `runner.loading`."""
    runner.loading.add(name)
    start = lambda: FakeSession(name)  # noqa: E731
    client = make_client(name, context=name, start=start, max_tokens=3, **changes)  # type: ignore[arg-type]
    client.work.is_loading = lambda: name in runner.loading
    return client


def test_who_is_loaded_passes_who_is_not() -> None:
    engine, runner = make_loading(max_sessions=1)
    running = submit(engine, make_client("running", max_tokens=5))
    engine.step()
    waiting = submit(engine, cold(runner, "cold"))
    later = submit(engine, make_client("later", max_tokens=4))
    run(engine, 6)
    assert len(results(running)[0]) == 5
    assert len(results(later)[0]) == 4
    assert runner.waits == 0
    runner.loading.clear()
    run(engine, 3)
    assert results(waiting)[0] == [1, 2, 3]


def test_who_is_alone_runs_behind_the_loading_until_somebody_comes() -> None:
    engine, runner = make_loading(max_sessions=1)
    waiting = submit(engine, cold(runner, "cold", prompt=range(6)))
    came: list[Client] = []

    def meanwhile() -> None:
        if runner.waits == 5:
            came.append(submit(engine, make_client("resident", max_tokens=2)))

    runner.meanwhile = meanwhile
    engine.step()
    assert runner.waits == 5
    assert engine.stats().waiting == 2
    run(engine, 1)
    assert results(came[0])[0] == [1, 2]
    runner.meanwhile = runner.loading.clear
    run(engine, 4)
    assert results(waiting)[0] == [6, 7, 8]
    assert waiting.closes, "its place is given back once"
    assert engine.places == 0


def test_a_session_that_begins_behind_the_loading_gives_way_as_well() -> None:
    engine, runner = make_loading()
    waiting = cold(runner, "cold")
    start = waiting.work.begin

    def start_behind_the_loading() -> FakeSession:
        while "cold" in runner.loading:
            runner.waits += 1
            runner.meanwhile()
            engine.give_way()
        return start()

    waiting.work.begin = start_behind_the_loading
    submit(engine, waiting)
    came: list[Client] = []
    runner.meanwhile = lambda: came.append(submit(engine, make_client("resident", max_tokens=2)))
    run(engine, 2)
    assert runner.waits == 1
    assert results(came[0])[0] == [1, 2]
    runner.meanwhile = runner.loading.clear
    run(engine, 4)
    assert results(waiting)[0] == [1, 2, 3]
    assert engine.places == 0


def test_of_two_that_are_being_loaded_the_first_that_is_there_is_served() -> None:
    engine, runner = make_loading()
    first, second = submit(engine, cold(runner, "first")), submit(engine, cold(runner, "second"))

    def meanwhile() -> None:
        if runner.waits == 3:
            runner.loading.remove("second")

    runner.meanwhile = meanwhile
    run(engine, 2)
    assert runner.calls == [(("second",), 1), (("second",), 1)]
    run(engine, 1)
    assert results(second)[0] == [1, 2, 3]
    runner.meanwhile = runner.loading.clear
    run(engine, 4)
    assert results(first)[0] == [1, 2, 3]


def test_a_request_that_is_given_up_while_it_waits_for_a_layer_ends() -> None:
    engine, runner = make_loading()
    waiting = submit(engine, cold(runner, "cold"))
    runner.meanwhile = waiting.stream.cancel
    run(engine, 2)
    assert isinstance(failure(waiting)[1], CancelledError)
    assert (runner.waits, engine.places) == (1, 0)


def test_a_shutdown_does_not_wait_for_a_loading() -> None:
    engine, runner = make_loading()
    waiting = submit(engine, cold(runner, "cold"))
    runner.meanwhile = lambda: setattr(engine, "_stopping", True)
    engine.start()
    engine._thread.join(60.0)
    assert isinstance(failure(waiting)[1], ShuttingDownError)
    assert runner.waits == 1


def test_times_tell_loading_from_queueing() -> None:
    now = [0]
    runner = LoadingRunner()
    engine = runner.engine = Engine(runner, max_sessions=1, clock_ns=lambda: now[0])
    running = submit(engine, make_client("running", max_tokens=4))
    engine.step()
    waiting = submit(engine, cold(runner, "cold"))
    now[0] = 10
    engine.step()
    runner.loading.clear()
    now[0] = 30
    engine.step()
    assert results(running)[1].times.load_ns == 0
    now[0] = 60
    run(engine, 3)
    times = results(waiting)[1].times
    assert (times.load_ns, times.queue_ns) == (30, 30)


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
    client = submit(running, make_client("a", max_tokens=3))
    events = iter(client.stream)
    for token in (1, 2, 3):
        runner.gate.release()
        assert next(events) == Says(0, (token,))
    assert isinstance(next(events), Ends)
    assert client.closes == [1]


def test_an_idle_thread_wakes_for_a_cancellation(running: FakeEngine, runner: FakeRunner) -> None:
    client = submit(running, make_client("a", max_tokens=1000))
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
    place = running.reserve()
    client = submit(running, make_client("a", max_tokens=10**6))
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
