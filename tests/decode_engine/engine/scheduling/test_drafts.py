"""Requests with drafts, against a runner without a model: the same answers in fewer steps, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from decode_engine.engine.drafting import ContextSuffixes, Drafter
from decode_engine.engine.engine import Engine
from decode_engine.engine.requests import Step
from decode_engine.engine.sampler import Sampler
from decode_engine.orders.events import Says
from decode_engine.orders.order import KeepOptions, Sampling
from tests.decode_engine.engine import fake_runner
from tests.decode_engine.engine.fake_runner import (
    VOCABULARY,
    Client,
    FakeEngine,
    FakeRunner,
    FakeSession,
    make_client,
    results,
    run,
    submit,
)
from tests.decode_engine.engine.scheduling.conftest import Clock

CONTEXT = ContextSuffixes(np.arange(1000) % VOCABULARY)
PROMPT = (3, 4, 5)


def drafting(name: str = "a", *, by_method: bool = False, **options: Any) -> Client:
    """A request whose drafts are right, or by a method every fourth time wrong."""
    client = make_client(name, prompt=PROMPT, **options)
    client.work.drafts = lambda: Drafter(None if by_method else CONTEXT, PROMPT, by_method=by_method)
    return client


def after(token: int, count: int) -> list[int]:
    return [(token + number) % VOCABULARY for number in range(1, count + 1)]


@pytest.mark.parametrize("by_method", [False, True])
def test_tokens_come_in_fewer_steps(engine: FakeEngine, runner: FakeRunner, by_method: bool) -> None:
    client = submit(engine, drafting(by_method=by_method, max_tokens=100))
    run(engine, 80)
    tokens, end = results(client)
    assert tokens == after(5, 100)
    assert end.times.decode_steps == len(runner.calls) - len(runner.prompts) < 60
    assert end.figures["accepted"] == 99 - end.times.decode_steps
    assert end.figures["drafted"] >= end.figures["accepted"]
    assert client.session.fed == [*PROMPT, *after(5, 99)]
    assert (client.session.closed, client.closes) == (1, [1])


@pytest.mark.parametrize("most", range(1, 25))
def test_no_more_is_fed_than_the_answer_may_have(engine: FakeEngine, runner: FakeRunner, most: int) -> None:
    client = submit(engine, drafting(max_tokens=most))
    run(engine, 30)
    tokens, end = results(client)
    assert (tokens, end.reason, end.completion_tokens) == (after(5, most), "length", most)
    assert client.session.fed == [*PROMPT, *after(5, most - 1)]


@pytest.mark.parametrize("token", range(6, 30))
def test_an_end_among_drafts_is_the_end(engine: FakeEngine, token: int) -> None:
    ended = submit(engine, drafting("a", max_tokens=60, end_ids=frozenset({token})))
    stopped = submit(engine, drafting("b", max_tokens=60, stop_ids=frozenset({token})))
    run(engine, 40)
    for client, reason in ((ended, "end_of_sequence"), (stopped, "stop")):
        tokens, end = results(client)
        assert (tokens, end.reason) == (after(5, token - 5), reason)
        assert end.figures["accepted"] == len(tokens) - 1 - end.times.decode_steps


@pytest.mark.parametrize("most", [1, 2, 5, 20])
def test_what_is_kept_has_all_of_its_answer(engine: FakeEngine, most: int) -> None:
    kept: list[tuple[list[int], Sequence[int]]] = []
    client = drafting(max_tokens=most, keep=KeepOptions())

    def keep(session: FakeSession, answer: Sequence[int]) -> Any:
        kept.append((list(session.fed), list(answer)))
        return lambda: "kept"

    client.work.keeps = keep
    submit(engine, client)
    run(engine, 30)
    assert results(client)[0] == after(5, most)
    assert kept[0][1] == after(5, most)
    assert kept[0][0][: 3 + most] == [*PROMPT, *after(5, most)]


def test_each_answer_drafts_for_itself_beside_requests_without(
    engine: FakeEngine, runner: FakeRunner
) -> None:
    client = submit(engine, drafting("a", max_tokens=60, answers=2))
    other = submit(engine, make_client("other", prompt=[7], max_tokens=30))
    run(engine, 80)
    assert client.stream is not None
    events = list(client.stream)
    for answer in range(2):
        said = [event for event in events if isinstance(event, Says) and event.answer == answer]
        assert [token for each in said for token in each.token_ids] == after(5, 60)
        assert len(said) < 40
    assert results(other)[0] == after(7, 30)
    assert any(len(names) == 3 and most > 1 for names, most in runner.calls)


def test_log_probabilities_come_with_their_tokens(engine: FakeEngine) -> None:
    client = submit(engine, drafting(max_tokens=50, sampling=Sampling(top_logprobs=1)))
    run(engine, 60)
    assert client.stream is not None
    said = [event for event in client.stream if isinstance(event, Says)]
    assert max(len(event.token_ids) for event in said) > 3
    for event in said:
        assert [told.token_id for told in event.logprobs] == list(event.token_ids)


def test_a_session_that_fails_among_drafts_fails_alone(engine: FakeEngine) -> None:
    broken = drafting("broken", max_tokens=60, session=FakeSession("broken", fails_at=20))
    submit(engine, broken)
    whole = submit(engine, drafting("whole", max_tokens=60))
    run(engine, 80)
    assert results(whole)[0] == after(5, 60)
    assert broken.stream is not None
    with pytest.raises(ValueError, match="this session is broken"):
        list(broken.stream)
    assert broken.session.closed == 1


class CardRunner(FakeRunner):
    """Drafts that are right with a chance, and steps that take the time of a card's, a plain one a second.

    step: of a method, for all sessions at once. row: of each draft that is verified. Answers have up to a thousand
    tokens.
    """

    def __init__(self, clock: Clock, chance: float, step: float, row: float) -> None:
        super().__init__()
        self._clock, self.chance, self._step, self._row = clock, chance, step, row
        self._random = np.random.default_rng(3)

    def launch(
        self,
        sessions: Sequence[FakeSession],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Step:
        self._clock.now += round(1e9 * (1 + self._row * sum(map(len, drafts))))
        return super().launch(sessions, last_tokens, samplers, drafts)

    def draft(
        self,
        sessions: Sequence[FakeSession],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        counts: Sequence[int],
    ) -> list[list[int]]:
        self._clock.now += round(1e9 * self._step * max(counts))
        return [
            [token + int(self._random.random() >= self.chance) for token in range(last + 1, last + 1 + count)]
            for last, count in zip(last_tokens, counts, strict=True)
        ]


def card_answers(
    clock: Clock, sessions: int, step: float, row: float, chances: Sequence[float]
) -> list[float]:
    """Times of answers of 96 tokens, asked one after another, relative to that of an answer without drafts.

    chances: that a token which the method drafts for an answer is right.
    """
    runner = CardRunner(clock, 0.0, step, row)
    engine: FakeEngine = Engine(runner, max_sessions=16, max_waiting=16, clock_ns=clock)

    def seconds(by_method: bool) -> float:
        clients = [make_client(f"{each}", prompt=PROMPT, max_tokens=96) for each in range(sessions)]
        for client in clients:
            client.work.drafts = lambda: Drafter(None, PROMPT, by_method=by_method)
            submit(engine, client)
        run(engine, 2)  # reads prompts
        begin = clock.now
        while any(client.closes == [] for client in clients):
            run(engine, 1)
        assert all(results(client)[0] == [*range(6, 102)] for client in clients)
        return (clock.now - begin) * 1e-9

    full, found = seconds(False), []
    for runner.chance in chances:
        found.append(seconds(True) / full)
    return found


@pytest.fixture
def large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that answers do not come back to what they said, which would be copied."""
    monkeypatch.setattr(fake_runner, "VOCABULARY", 1024)


@pytest.mark.usefixtures("large_vocabulary")
@pytest.mark.parametrize("sessions", [1, 4, 16])
@pytest.mark.parametrize("step", [0.3, 0.75, 2.3])
def test_a_method_that_is_wrong_costs_next_to_nothing(clock: Clock, sessions: int, step: float) -> None:
    found = card_answers(clock, sessions, step, 0.1 / sessions, [0.0] * 4)
    assert max(found) < (1.02 if step < 1 else 1.03)
    assert sum(found) / len(found) < 1.02


@pytest.mark.usefixtures("large_vocabulary")
@pytest.mark.parametrize(
    ("sessions", "step", "times"), [(1, 0.73, 1.2), (4, 0.45, 1.6), (16, 0.45, 1.4)]
)  # fmt: skip
def test_a_method_that_is_right_is_used_also_after_it_was_wrong(
    clock: Clock, sessions: int, step: float, times: float
) -> None:
    found = card_answers(clock, sessions, step, 0.05 / sessions, [0.99] * 4 + [0.0] * 2 + [0.99] * 4)
    right, wrong, again = sum(found[:4]) / 4, found[4:6], sum(found[6:]) / 4
    assert right < 1 / times > again
    assert max(wrong) < 1.03
