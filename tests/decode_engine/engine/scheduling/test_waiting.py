"""Who waits: what is said of their turns is what happens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from decode_engine.engine.engine import Engine
from decode_engine.engine.places import Place
from decode_engine.engine.prompt_pieces import Piece
from decode_engine.engine.queues import Job, Waiting
from decode_engine.engine.requests import Finished, Request, Stream, Token
from decode_engine.engine.sampler import Sampler, SamplingParameters
from tests.decode_engine.engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    LetterSink,
    make_client,
    run,
)


def job(context: str) -> Job[FakeSession]:
    sampling = SamplingParameters()
    request = Request(lambda: FakeSession("x"), [1], 1, sampling, LetterSink(), context=context)
    return Job(
        request,
        Place(lambda: None),
        Stream(lambda: None),
        Sampler(sampling),
        LetterSink(),
        0,
        [Piece(1, 1.0)],
    )


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.integers(0, 5))
def test_requests_are_taken_in_the_order_that_was_foretold(contexts: list[str], taken: int) -> None:
    waiting: Waiting[FakeSession] = Waiting()
    jobs = [job(context) for context in contexts]
    for one in jobs:
        waiting.add(one)
    for _ in range(taken):
        waiting.take(None, 1)
    foretold = {waiting.ahead(one.stream): one for one in waiting}
    assert sorted(foretold) == list(range(len(waiting)))
    for place in range(len(waiting)):
        assert waiting.take(None, 1) is foretold[place]
    assert all(waiting.ahead(one.stream) is None for one in jobs)


def test_a_stream_rings_for_every_event_and_gives_all_at_once() -> None:
    engine: FakeEngine = Engine(FakeRunner())
    rings: list[int] = []
    client = make_client("a", max_tokens=2)
    request = replace(client.request, on_event=lambda: rings.append(1))
    stream = engine.submit(engine.reserve(), request)
    assert stream.take() == []
    assert engine.ahead(stream) == 0
    run(engine, 3)
    assert len(rings) == 3
    assert [type(event) for event in stream.take()] == [Token, Token, Finished]
    assert stream.take() == []
    assert engine.ahead(stream) is None
