"""Who waits: what is said of their turns is what happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import new_job
from decode_engine.engine.places import Place, Places
from decode_engine.engine.queues import Job, Waiting
from decode_engine.engine.reply import Outbox, Reply
from decode_engine.errors import TooManyRequestsError
from decode_engine.orders.events import Ends, Event, Says, Waits
from tests.decode_engine.engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    Stream,
    make_client,
    run,
)


def job(context: str) -> Job[FakeSession]:
    work = make_client("x", context=context).work
    return new_job(work, Place(lambda: None), Stream(lambda: None), 0, 256)


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.integers(0, 5))
def test_requests_are_taken_in_the_order_that_was_foretold(contexts: list[str], taken: int) -> None:
    waiting: Waiting[FakeSession] = Waiting()
    for context in contexts:
        waiting.add(job(context))
    for _ in range(taken):
        waiting.take(None, 1)
    foretold = {ahead: one for one, ahead in waiting.ahead()}
    assert sorted(foretold) == list(range(len(waiting)))
    for place in range(len(waiting)):
        assert waiting.take(None, 1) is foretold[place]
    assert list(waiting.ahead()) == []


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


def test_places_are_counted_by_client_too() -> None:
    places = Places(6, 2)
    own = [places.take(f"context {number}", "a") for number in range(4)]
    with pytest.raises(TooManyRequestsError, match="4 requests of this client"):
        places.take("another", "a")
    nobody = [places.take("another", "") for _ in range(2)]
    with pytest.raises(TooManyRequestsError, match="6 requests are running"):
        places.take("another", "b")
    for place in (*own, *nobody):
        place.release()
    narrow = Places(6, 2, client=1)
    narrow.take("one", "a").release()
    narrow.take("one", "a")
    narrow.take("one", "b")
    with pytest.raises(TooManyRequestsError, match="limit for one client"):
        narrow.take("another", "a")
