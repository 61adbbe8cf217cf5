"""Requests whose contexts are still being loaded: everybody passes them, and they run behind the loading when alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decode_engine.engine.engine import Engine
from decode_engine.errors import CancelledError, ShuttingDownError
from tests.decode_engine.engine.fake_runner import (
    Client,
    FakeEngine,
    FakeRunner,
    FakeSession,
    failure,
    make_client,
    results,
    run,
    submit,
)


@dataclass
class LoadingRunner(FakeRunner):
    """Sessions whose names are in `loading` wait for their first layer, as the real one does; `meanwhile` is called."""

    loading: set[str] = field(default_factory=set)
    engine: FakeEngine | None = None
    meanwhile: Callable[[], None] = lambda: None
    waits: int = 0

    def read(
        self,
        sessions: Sequence[FakeSession],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        assert self.engine is not None
        while self.loading & {session.name for session in sessions}:
            self.waits += 1
            assert self.waits < 50, "nobody ended the wait"
            self.meanwhile()
            self.engine.give_way()
        return super().read(sessions, token_ids, all_logits=all_logits, between=between)


def make(max_sessions: int = 4) -> tuple[FakeEngine, LoadingRunner]:
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
    engine, runner = make(max_sessions=1)
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
    engine, runner = make(max_sessions=1)
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


def test_of_two_that_are_being_loaded_the_first_that_is_there_is_served() -> None:
    engine, runner = make()
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
    engine, runner = make()
    waiting = submit(engine, cold(runner, "cold"))
    assert waiting.stream is not None
    runner.meanwhile = waiting.stream.cancel
    run(engine, 2)
    assert isinstance(failure(waiting)[1], CancelledError)
    assert (runner.waits, engine.places) == (1, 0)


def test_a_shutdown_does_not_wait_for_a_loading() -> None:
    engine, runner = make()
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
