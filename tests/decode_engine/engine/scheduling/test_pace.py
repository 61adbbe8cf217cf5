"""How prompts and steps share the time, and who waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Outbox, Reply
from decode_engine.engine.requests import Step
from decode_engine.engine.sampler import Sampler
from decode_engine.engine.scheduler import CrashError
from decode_engine.orders.events import Ends, Event, Says, Waits
from tests.decode_engine.engine.fake_runner import (
    Client,
    FakeEngine,
    FakeRunner,
    Samplers,
    Sessions,
    Stream,
    Tokens,
    make_client,
    results,
    run,
    submit,
)

STEP, LAYERS, HOST = 12_000, 32, 300
"""Microseconds of a step; layers of the model; microseconds that the host takes to launch anything."""


@dataclass
class Device:
    """Does what it is given in order. now, free: the host's time, and when the device has done all; microseconds.

    dry: from when until when it had nothing to do though there were streams.
    """

    now: int = 0
    free: int = 0
    dry: list[int] = field(default_factory=list)

    def give(self, micros: int) -> int:
        """Launches work; when that is done."""
        self.now += HOST
        if self.free < self.now:
            self.dry.append(self.now - self.free)
        self.free = max(self.free, self.now) + micros
        return self.free

    def wait(self, done: int) -> None:
        self.now = max(self.now, done)


@dataclass
class Flying:
    """A step in flight."""

    runner: FlyingRunner
    sessions: Sessions
    tokens_fed: Sequence[int]
    samplers: Sequence[Sampler]
    done: int

    def follow(self) -> Step:
        return self.runner.launch(self.sessions, [token + 1 for token in self.tokens_fed], self.samplers)

    def leave(self, number: int) -> None:
        self.runner.device.wait(self.done)

    def tokens(self) -> list[int | Exception]:
        self.runner.device.wait(self.done)
        return [token + 1 for token in self.tokens_fed]


@dataclass
class FlyingRunner(FakeRunner):
    """Steps fly; prompts are launched layer by layer, and their last logits waited for. layer: its microseconds."""

    device: Device = field(default_factory=Device)
    layer: int = 0
    steps: deque[int] = field(default_factory=deque)

    def read(
        self,
        sessions: Sessions,
        token_ids: Tokens,
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        done = 0
        for _ in range(LAYERS):
            done = self.device.give(self.layer)
            between()
        found = super().read(sessions, token_ids, all_logits=all_logits)
        self.device.wait(done)
        return found

    def launch(
        self, sessions: Sessions, last_tokens: Sequence[int], samplers: Samplers, drafts: Tokens = ()
    ) -> Step:
        self.steps.append(len(sessions))
        return Flying(self, sessions, last_tokens, samplers, self.device.give(STEP))


@dataclass
class Watched:
    """A stream, and when it got its tokens."""

    client: Client
    device: Device
    times: list[int] = field(default_factory=list)

    @property
    def gap(self) -> int:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


@pytest.fixture
def runner() -> FlyingRunner:
    return FlyingRunner()


@pytest.fixture
def engine(runner: FlyingRunner) -> FakeEngine:
    return Engine(
        runner,
        max_sessions=64,
        max_waiting=64,
        prompt_chunk=256,
        clock_ns=lambda: runner.device.now * 1000,
    )


def watch(engine: FakeEngine, runner: FlyingRunner, name: str) -> Watched:
    """A long stream. What the device waits for until its first steps is not counted."""
    client = make_client(name, max_tokens=900)
    found = Watched(client, runner.device)
    submit(engine, client)
    tell = client.stream.tell

    def note(event: Event) -> None:
        if not isinstance(event, Waits):
            found.times.append(runner.device.now)
        tell(event)

    client.stream.tell = note
    for _ in range(6):
        engine.step()
    runner.device.dry.clear()
    return found


@pytest.mark.parametrize("layer", [10, 400, 1400, 6000])
@pytest.mark.parametrize("joining", [1, 48])
def test_a_stream_waits_for_three_steps_at_most_while_others_join(
    engine: FakeEngine, runner: FlyingRunner, layer: int, joining: int
) -> None:
    """However long a layer of their prompts takes, up to half of a step."""
    stream = watch(engine, runner, "stream")
    runner.layer = layer
    others = [
        submit(engine, make_client(f"{n}", prompt=[n % 7] * 12, max_tokens=120)) for n in range(joining)
    ]
    for _ in range(200):
        engine.step()
    assert all(len(results(other)[0]) == 120 for other in others)
    assert max(runner.steps) == joining + 1
    assert stream.gap <= 3 * STEP
    assert stream.client.work.max_tokens > len(stream.times) > 20


def test_the_device_is_dry_for_no_longer_than_launches_take(engine: FakeEngine, runner: FlyingRunner) -> None:
    """Also when somebody joins or leaves: the next step is launched before the next prompt is looked at."""
    watch(engine, runner, "stream")
    runner.layer = 400
    for number in range(12):
        submit(engine, make_client(f"{number}", prompt=[1] * 12, max_tokens=20 + 9 * number))
        for _ in range(3):
            engine.step()
    assert len(set(runner.steps)) > 3
    assert max(runner.device.dry, default=0) <= 2 * HOST


def test_a_prompt_is_read_at_once_where_nobody_waits(engine: FakeEngine, runner: FlyingRunner) -> None:
    runner.layer = 400
    client = submit(engine, make_client("alone", prompt=[1] * 12, max_tokens=1))
    engine.step()
    assert results(client)[0] == [2]
    assert not runner.steps


def test_a_failure_of_the_scheduler_between_layers_is_not_the_prompts(
    engine: FakeEngine, runner: FlyingRunner
) -> None:
    watch(engine, runner, "stream")

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    engine._scheduler._note_batch = fail  # type: ignore[method-assign]
    submit(engine, make_client("prompt", prompt=[1] * 12))
    with pytest.raises(CrashError) as raised:
        engine.step()
    assert "a bug" in str(raised.value.__cause__)


class Sent:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, Event]]] = []

    def send(self, batch: object) -> None:
        self.batches.append(list(batch))  # type: ignore[call-overload]


def test_a_turn_sends_one_batch_with_the_events_of_all_requests() -> None:
    sent = Sent()
    outbox = Outbox(sent)
    engine: FakeEngine = Engine(FakeRunner(), send=outbox.flush)
    for number in range(3):
        reply = Reply(lambda event, number=number: outbox.put(number, event))  # type: ignore[misc]
        engine.submit(engine.reserve(), make_client(f"{number}", max_tokens=4).work, reply)
    run(engine, 3)
    waits, begun, *steps = sent.batches[0], *sent.batches[1:]
    assert len(steps) == 2, "one for each turn beside that with the first tokens, which has two"
    assert [type(event) for _, event in waits[:3]] == [Waits] * 3
    assert [event for _, event in begun] == [Says(0, (2,))] * 3
    assert {number for number, _ in steps[0]} == {0, 1, 2}
    assert sum(isinstance(event, Ends) for _, event in steps[1]) == 3


def test_who_waits_is_told_how_many_are_ahead_at_every_change() -> None:
    engine: FakeEngine = Engine(FakeRunner(), max_sessions=1)
    told: list[Event] = []
    for name in "ab":
        engine.submit(engine.reserve(), make_client(name, max_tokens=2).work, Stream(engine.wake))
    engine.submit(engine.reserve(), make_client("c", max_tokens=1).work, Reply(told.append))
    run(engine, 6)
    assert [event for event in told if isinstance(event, Waits)] == [
        Waits("session", 2),
        Waits("session", 1),
        Waits("session", 0),
        Waits(""),
    ]
