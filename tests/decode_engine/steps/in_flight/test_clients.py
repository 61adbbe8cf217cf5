"""Steps in flight: who joins, leaves, fails; and every client gets the tokens that it gets alone, step by step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from msgspec import structs

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Work
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Flight
from decode_engine.errors import CancelledError, DeadlineExceededError
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.warm_up import made_up_context
from decode_engine.orders.events import Ends, Says
from decode_engine.orders.order import KeepOptions, Order, Sampling
from decode_engine.steps.step_graph import StepGraph
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import get_method
from tests.decode_engine.engine.fake_runner import Stream
from tests.decode_engine.steps.in_flight.late_world import (
    BROKEN,
    CPU,
    IDENTITY,
    VOCABULARY,
    LateDevice,
    WatchedSession,
    World,
)


@dataclass
class Asked:
    """What a client asks for, when it does, and when it does not care any more."""

    context: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_at: int | None = None
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    answers: int = 1
    keep: bool = False
    begins: int = 0
    cancels: int | None = None
    deadline: int | None = None


@dataclass
class Got:
    """What it got: tokens of each answer, how they ended, and what was kept of the session."""

    tokens: list[list[int]]
    ends: dict[int, Any] = field(default_factory=dict)
    failed: Exception | None = None
    kept: list[Any] = field(default_factory=list)
    closes: int = 0
    stopped: set[int] = field(default_factory=set)


_COUNTED = ("attended", "available", "searches")


def serve(
    world: World, contexts: list[tuple[ResidentContext, FittedMethod]], asked: Sequence[Asked]
) -> list[Got]:
    """All requests through one engine, whose clock counts turns, until all have ended."""
    turn = 0
    engine: Engine[Any] = Engine(world, max_sessions=6, max_waiting=50, prompt_chunk=8, clock_ns=lambda: turn)
    got = [Got([[] for _ in range(each.answers)]) for each in asked]
    streams: dict[int, Stream] = {}
    while len(streams) < len(asked) or engine.places:
        for number, each in enumerate(asked):
            if each.begins == turn:
                streams[number] = Stream(engine.wake)
                work = make_work(world, contexts, each, got[number])
                engine.submit(engine.reserve(), work, streams[number])
            if each.cancels == turn and number in streams:
                streams[number].cancel()
        engine.step()
        turn += 1
        if turn > 1000:  # what a thread keeps is all that is left
            time.sleep(0.01)
        assert turn < 7000
        for number, stream in streams.items():
            take_events(stream, asked[number], got[number])
    engine.shutdown()
    for number, stream in streams.items():
        take_events(stream, asked[number], got[number])
    return got


@dataclass(kw_only=True, eq=False)
class WatchedWork(Work[Any]):
    """What one asks for, in the world."""

    world: World
    base: tuple[ResidentContext, FittedMethod]
    got: Got

    def start(self) -> WatchedSession:
        session = self.world.start(*self.base)
        session.fork = lambda: self.world.fork(session)  # type: ignore[method-assign]
        return session

    def keep(self, session: Session, answer: Sequence[int]) -> Callable[[], str]:
        read = [rows_HT2D[0, :, 0, 0].int().tolist() for rows_HT2D in session.tail_rows()]
        rows = [each[: len(self.prompt) + len(answer)] for each in read]
        self.got.kept.append((rows, list(answer)))
        return lambda: "child"

    def close(self) -> None:
        self.got.closes += 1


def make_work(
    world: World, contexts: list[tuple[ResidentContext, FittedMethod]], asked: Asked, got: Got
) -> WatchedWork:
    order = Order(
        sampling=asked.sampling,
        stops=() if asked.stop_at is None else (str(asked.stop_at),),
        stop_token_ids=asked.stop_ids,
        ignore_eos=asked.ignore_eos,
        answers=asked.answers,
        deadline_ns=asked.deadline,
        keep=KeepOptions() if asked.keep else None,
    )
    return WatchedWork(
        order=order,
        prompt=asked.prompt,
        max_tokens=asked.max_tokens,
        end_ids=asked.end_ids,
        context=str(asked.context),
        world=world,
        base=contexts[asked.context],
        got=got,
    )


def take_events(stream: Stream, asked: Asked, got: Got) -> None:
    """Reads events as a door does: it stops answers, and passes over what comes behind that."""
    ending = asked.end_ids | asked.stop_ids
    for event in stream.take():
        assert got.failed is None, "nothing follows a failure"
        if isinstance(event, Exception):
            got.failed = event
        elif isinstance(event, Ends):
            assert event.answer not in got.ends
            stopped = event.answer in got.stopped
            tokens = len(got.tokens[event.answer])
            assert not stopped or event.completion_tokens >= tokens
            figures = None if stopped else [event.figures[name] for name in _COUNTED]
            reason = "stop" if stopped else event.reason
            got.ends[event.answer] = (reason, tokens, event.kept, event.seed, figures)
        elif isinstance(event, Says):
            assert event.answer not in got.ends, "nothing follows the end of an answer"
            if event.answer in got.stopped:
                continue
            tokens = got.tokens[event.answer]
            tokens += event.token_ids
            if asked.stop_at == tokens[-1] and tokens[-1] not in ending:
                got.stopped.add(event.answer)
            if event.answer in got.stopped or event.last:
                stream.stop(event.answer, len(tokens))


def ask(generator: random.Random) -> Asked:
    """A request; some begin with so many tokens that their tails have to grow."""
    choose = generator.random
    sampling = Sampling()
    if choose() < 0.5:
        top_k, top_p = generator.choice([(0, 1.0), (5, 1.0), (0, 0.8)])
        seed = generator.randrange(100) if choose() < 0.8 else None
        sampling = Sampling(generator.choice([0.7, 2.0]), top_p, top_k, seed or 1)
    by_hand = choose() < 0.1
    if by_hand:
        bias = {generator.randrange(BROKEN): 6.0 for _ in range(8)}
        sampling = structs.replace(sampling, frequency_penalty=2.0, logit_bias=bias)
    length = generator.randint(118, 127) if choose() < 0.2 else generator.randint(1, 9)
    begins = generator.randrange(40)
    return Asked(
        context=generator.randrange(3),
        prompt=[generator.randrange(BROKEN) for _ in range(length)],
        max_tokens=generator.choice([1, 3, 9] if by_hand else [1, 2, 10, 30, 50]),
        sampling=sampling,
        stop_at=generator.randrange(VOCABULARY) if choose() < 0.3 else None,
        stop_ids=frozenset(generator.sample(range(VOCABULARY), 1 if choose() < 0.3 else 0)),
        end_ids=frozenset(generator.sample(range(VOCABULARY), 1)),
        ignore_eos=choose() < 0.2,
        answers=generator.choice([1, 1, 1, 2, 3]),
        begins=begins,
        cancels=begins + generator.randrange(40) if choose() < 0.2 else None,
        deadline=begins + generator.randrange(40) if choose() < 0.2 else None,
    )


@pytest.mark.parametrize("seed", range(10))
def test_clients_get_what_they_get_alone_and_step_by_step(
    contexts: list[tuple[ResidentContext, FittedMethod]],
    monkeypatch: pytest.MonkeyPatch,
    flying: list[int],
    seed: int,
) -> None:
    generator = random.Random(seed)
    asked = [ask(generator) for _ in range(10)]
    for each in asked[:2]:
        each.answers, each.keep = 1, True
    device = LateDevice(generator)
    world = World(device)
    got = serve(world, contexts, asked)
    assert device.faults == []
    assert world.open == []
    assert len(flying) > 5
    monkeypatch.setattr(Stepper, "flies", False)
    for each, found in zip(asked, got, strict=True):
        patient = replace(each, cancels=None, deadline=None, begins=0)
        (alone,) = serve(World(None), contexts, [patient])
        assert found.closes == alone.closes == 1
        if isinstance(found.failed, CancelledError | DeadlineExceededError):
            for tokens, whole in zip(found.tokens, alone.tokens, strict=True):
                assert tokens == whole[: len(tokens)]
        else:
            assert str(found.failed) == str(alone.failed)
            assert found.kept == alone.kept
            if found.failed is None:
                assert (found.tokens, found.ends) == (alone.tokens, alone.ends)


def test_no_step_is_launched_behind_one_that_is_known_to_be_the_last(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int]
) -> None:
    asked = Asked(0, [1, 2], 6, Sampling())
    (got,) = serve(World(LateDevice(random.Random(0))), contexts, [asked])
    assert len(got.tokens[0]) == 6
    assert len(flying) == 4, "the first token is the prompt's, and the first step follows none"


def test_who_joins_steps_as_soon_as_the_step_in_flight_has_ended(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int]
) -> None:
    world = World(LateDevice(random.Random(0)))
    one, other = sessions = [world.start(*contexts[0]) for _ in range(2)]
    world.read(sessions, [[5], [7]])
    flight, samplers = Flight(world), [Sampler(SamplingParameters()) for _ in sessions]
    (first,) = flight.step([one], [3], samplers[:1], follow=True)
    second, none = flight.step(sessions, [first, 4], samplers, follow=True)  # type: ignore[list-item]
    assert isinstance(second, int)
    assert none is None
    assert all(isinstance(each, int) for each in flight.step(sessions, [second, 4], samplers, follow=True))
    assert (one.tail_keys, other.tail_keys) == (4, 2)
    flight.leave(one)
    (left,) = flight.step([other], [0], samplers[1:], follow=True)
    assert isinstance(left, int)
    assert (one.tail_keys, other.tail_keys) == (4, 3), "who has left has not advanced"
    flight.leave(other)
    assert world.device.faults == []


def test_a_step_that_fails_behind_one_in_flight_ends_its_sessions_only(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the other batch go on."""
    world = World(LateDevice(random.Random(0)))
    sessions = [world.start(*contexts[0]), world.start(*contexts[2])]
    world.read(sessions, [[5], [7]])
    flight, samplers = Flight(world), [Sampler(SamplingParameters()) for _ in sessions]
    launch = StepGraph.launch

    def failing(graph: StepGraph, rows: Any, tokens: Any, samplers: Any) -> Any:
        if tokens is None and graph.batch.sessions[0] is sessions[0]:
            raise RuntimeError("out of something")
        return launch(graph, rows, tokens, samplers)

    monkeypatch.setattr(StepGraph, "launch", failing)
    tokens = flight.step(sessions, [3, 4], samplers, follow=True)
    assert all(isinstance(each, int) for each in tokens)
    failed, token = flight.step(sessions, tokens, samplers, follow=False)  # type: ignore[arg-type]
    assert str(failed) == "out of something"
    assert isinstance(token, int)
    assert [session.tail_keys for session in sessions] == [2, 3]


@pytest.mark.parametrize(
    ("name", "placement", "flies"),
    [
        ("full", Placement.DEVICE, True),
        ("refined+dropped", Placement.HYBRID, True),
        ("csattention", Placement.HOST, False),
    ],
)
def test_steps_that_the_host_has_a_part_in_do_not_fly(name: str, placement: Placement, flies: bool) -> None:
    method = get_method(name)
    context = made_up_context(IDENTITY, "float32", method, 90, placement=placement)
    stepper = Stepper(World(None).model, IDENTITY, torch.float32, CPU, searching=SearchThreads(1))
    assert stepper._required(Session(context, method.on(context.manifest))).flies is flies
