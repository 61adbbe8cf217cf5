"""Several answers to one prompt, and what is told of prompts: with a scripted model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_engine.engine.engine import Engine
from decode_engine.engine.sampling.parameters import SamplingParameters, parameters_of
from decode_engine.orders.events import Ends, PromptRead, Says
from decode_engine.orders.order import Sampling
from index_store.errors import InvalidArgumentError
from tests.decode_engine.engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    failure,
    make_client,
    results,
    run,
    submit,
)

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
        assert end.seed == parameters_of(COLD).for_answer(answer).seed
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
