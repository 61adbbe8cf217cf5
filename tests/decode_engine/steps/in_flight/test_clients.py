"""Every client gets the tokens that it gets alone and step by step, whatever is in flight."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Finished, Keeping, Request, Stream, Token
from decode_engine.engine.sampler import SamplingParameters
from decode_engine.engine.sampling.logit_rules import LogitRules
from decode_engine.errors import CancelledError, DeadlineExceededError
from decode_engine.layers.session import Session
from decode_engine.steps.stepper import Stepper
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from tests.decode_engine.engine.fake_runner import LetterSink
from tests.decode_engine.steps.in_flight.late_world import (
    BROKEN,
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
    sampling: SamplingParameters
    stop_at: int | None = None
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
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
                request = make_request(world, contexts, each, got[number])
                streams[number] = engine.submit(engine.reserve(), request)
            if each.cancels == turn and number in streams:
                streams[number].cancel()
        engine.step()
        turn += 1
        assert turn < 2000
        for number, stream in streams.items():
            take_events(stream, got[number])
    engine.shutdown()
    for number, stream in streams.items():
        take_events(stream, got[number])
    return got


def make_request(
    world: World, contexts: list[tuple[ResidentContext, FittedMethod]], asked: Asked, got: Got
) -> Request[Any]:
    context, fitted = contexts[asked.context]

    def start() -> WatchedSession:
        session = world.start(context, fitted)
        session.fork = lambda: world.fork(session)  # type: ignore[method-assign]
        return session

    def keep(session: Session, tokens: Sequence[int]) -> Callable[[], str]:
        rows = [rows_HT2D[0, :, 0, 0].int().tolist() for rows_HT2D in session.tail_rows()]
        got.kept.append((rows, list(tokens)))
        return lambda: "child"

    def closed() -> None:
        got.closes += 1

    return Request(
        start,
        asked.prompt,
        asked.max_tokens,
        asked.sampling,
        LetterSink(asked.stop_at),
        end_ids=asked.end_ids,
        stop_ids=asked.stop_ids,
        deadline_ns=asked.deadline,
        on_close=closed,
        context=str(asked.context),
        answers=asked.answers,
        keeping=Keeping(keep) if asked.keep else None,
    )


def take_events(stream: Stream, got: Got) -> None:
    for event in stream.take():
        assert got.failed is None, "nothing follows a failure"
        if isinstance(event, Exception):
            got.failed = event
        elif isinstance(event, Finished):
            figures = event.figures
            counted = (event.reason, event.completion_tokens, event.text, event.kept, event.seed)
            assert event.answer not in got.ends
            got.ends[event.answer] = (*counted, figures.attended, figures.available, figures.searches)
        elif isinstance(event, Token):
            assert event.answer not in got.ends, "nothing follows the end of an answer"
            got.tokens[event.answer].append(event.token_id)


def ask(generator: random.Random) -> Asked:
    """A request; some begin with so many tokens that their tails have to grow."""
    choose = generator.random
    sampling = SamplingParameters()
    if choose() < 0.5:
        top_k, top_p = generator.choice([(0, 1.0), (5, 1.0), (0, 0.8)])
        seed = generator.randrange(100) if choose() < 0.8 else None
        sampling = SamplingParameters(generator.choice([0.7, 2.0]), top_p, top_k, seed or 1)
    by_hand = choose() < 0.1
    if by_hand:
        bias = {generator.randrange(BROKEN): 6.0 for _ in range(8)}
        sampling = replace(sampling, rules=LogitRules(frequency_penalty=2.0, logit_bias=bias))
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
    asked = Asked(0, [1, 2], 6, SamplingParameters())
    (got,) = serve(World(LateDevice(random.Random(0))), contexts, [asked])
    assert len(got.tokens[0]) == 6
    assert len(flying) == 4, "the first token is the prompt's, and the first step follows none"
