"""Prompts that continue stored tokens, answers that are kept, and requests with drafts: the same in fewer steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from decode_engine.engine.drafting import ContextSuffixes, Drafter
from decode_engine.engine.engine import Engine
from decode_engine.engine.prompt_pieces import PromptCost, stored_cost
from decode_engine.engine.requests import Step
from decode_engine.errors import ShuttingDownError, TooManyRequestsError
from decode_engine.orders.events import Says
from decode_engine.orders.order import KeepOptions, Sampling
from index_store.errors import StoreFullError
from tests.decode_engine.engine import fake_runner
from tests.decode_engine.engine.fake_runner import (
    VOCABULARY,
    Client,
    FakeEngine,
    FakeRunner,
    FakeSession,
    Samplers,
    Sessions,
    Tokens,
    failure,
    make_client,
    results,
    run,
    submit,
)
from tests.decode_engine.engine.scheduling.conftest import Clock
from tests.support.waiting import wait_until


@dataclass
class Keeper:
    """Notes what it is given. gate: waited for while keeping. error: raised then."""

    error: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    fed: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    closed: int = -1

    def take(self, session: FakeSession, answer: Sequence[int]) -> object:
        self.fed, self.answer, self.closed = list(session.fed), list(answer), session.closed

        def work() -> str:
            self.gate.wait()
            if self.error is not None:
                raise self.error
            return "kept"

        return work


def kept(client: Client, keeper: Keeper, **options: bool) -> Client:
    client.work.keeps = keeper.take  # type: ignore[assignment]
    client.work.order = replace(client.work.order, keep=KeepOptions(**options))  # type: ignore[arg-type]
    return client


def test_the_last_token_is_fed_and_the_stream_ends_when_it_is_kept() -> None:
    engine, keeper = Engine(FakeRunner(), max_sessions=1, max_waiting=0), Keeper()
    client = submit(engine, kept(make_client("a", (3,), max_tokens=2, memory=7), keeper))
    run(engine, 2)
    assert client.session.fed == [3, 4, 5]
    assert (keeper.fed, keeper.answer, keeper.closed) == ([3, 4, 5], [4, 5], 0)
    assert client.session.closed == 1
    assert (client.closes, engine.stats().session_bytes, engine.stats().decoding) == ([], 7, 0)
    with pytest.raises(TooManyRequestsError):
        engine.reserve()
    keeper.gate.set()
    tokens, last = results(client)
    assert (tokens, last.reason, last.completion_tokens, last.kept) == (
        [4, 5],
        "length",
        2,
        "kept",
    )
    assert (client.closes, engine.stats().session_bytes, engine.places) == ([1], 0, 0)
    engine.shutdown()


def test_a_stop_string_is_kept_and_the_end_of_a_sequence_is_not() -> None:
    engine, stopped, ended = Engine(FakeRunner()), Keeper(), Keeper()
    clients = [
        submit(engine, kept(make_client("a", (3,), stops=("F",)), stopped)),
        submit(engine, kept(make_client("b", (3,), end_ids=frozenset({5})), ended)),
    ]
    for keeper in (stopped, ended):
        keeper.gate.set()
    run(engine, 1)
    clients[0].stream.stop(0, 2)
    run(engine, 4)
    reasons = [results(client)[1].reason for client in clients]
    assert reasons == ["stop", "end_of_sequence"]
    assert (stopped.fed, stopped.answer) == ([3, 4, 5], [4, 5])
    assert (ended.fed, ended.answer) == ([3, 4], [4])
    engine.shutdown()


def test_the_end_of_a_turn_is_kept_where_it_is_wanted() -> None:
    engine, keeper = Engine(FakeRunner()), Keeper()
    client = submit(engine, kept(make_client("a", (3,), end_ids=frozenset({5})), keeper, turns=True))
    keeper.gate.set()
    run(engine, 4)
    tokens, last = results(client)
    assert (tokens, last.reason, last.completion_tokens) == ([4, 5], "end_of_sequence", 2)
    assert (keeper.fed, keeper.answer) == ([3, 4, 5], [4, 5])
    engine.shutdown()


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("max_tokens", [2, 4])  # the end token is the answer's last one, or in the middle
def test_an_end_that_is_ignored_is_kept_as_any_token(turns: bool, max_tokens: int) -> None:
    engine, keeper = Engine(FakeRunner()), Keeper()
    client = make_client("a", (3,), max_tokens, end_ids=frozenset({5}), ignore_eos=True)
    submit(engine, kept(client, keeper, turns=turns))
    keeper.gate.set()
    run(engine, max_tokens + 1)
    tokens, last = results(client)
    assert (tokens, last.reason, last.completion_tokens) == ([4, 5, 6, 7][:max_tokens], "length", max_tokens)
    assert (keeper.fed, keeper.answer) == ([3, *tokens], tokens)
    engine.shutdown()


def test_a_prompt_alone_can_be_kept() -> None:
    engine, keeper = Engine(FakeRunner(), prompt_chunk=2), Keeper()
    client = submit(engine, kept(make_client("a", range(5)), keeper, prompt_only=True))
    keeper.gate.set()
    run(engine, 6)
    tokens, last = results(client)
    assert (tokens, last.completion_tokens, last.kept) == ([], 0, "kept")
    assert (keeper.fed, keeper.answer) == ([0, 1, 2, 3, 4], [])
    assert 0 <= last.times.first_token_ns <= last.times.total_ns
    engine.shutdown()


def test_what_cannot_be_kept_fails_and_gives_everything_back() -> None:
    engine = Engine(FakeRunner())
    keeper = Keeper(error=StoreFullError("no space"))
    client = submit(engine, kept(make_client("a", max_tokens=1), keeper))
    keeper.gate.set()
    run(engine, 2)
    tokens, error = failure(client)
    assert (tokens, str(error), client.closes) == ([1], "no space", [1])
    assert engine.places == 0
    engine.shutdown()


def test_a_cancelled_request_is_not_kept() -> None:
    engine, keeper = Engine(FakeRunner()), Keeper()
    client = submit(engine, kept(make_client("a"), keeper))
    run(engine, 1)
    client.stream.cancel()
    run(engine, 4)
    assert keeper.closed == -1
    assert client.closes == [1]
    engine.shutdown()


def test_a_shutdown_waits_for_what_is_being_kept_and_ends_what_is_not() -> None:
    engine = Engine(FakeRunner(), max_sessions=3)
    keepers = [Keeper() for _ in range(3)]
    clients = [
        submit(engine, kept(make_client(name, max_tokens=1), keeper))
        for name, keeper in zip("abc", keepers, strict=True)
    ]
    run(engine, 2)
    stopping = threading.Thread(target=engine.shutdown)
    stopping.start()
    wait_until(lambda: engine.places < 3)  # the third was not begun
    for keeper in keepers:
        keeper.gate.set()
    stopping.join()
    assert [results(client)[1].kept for client in clients[:2]] == ["kept", "kept"]
    assert isinstance(failure(clients[2])[1], ShuttingDownError)
    assert [client.closes for client in clients] == [[1]] * 3


def test_stored_tokens_come_before_the_prompt_piece_by_piece() -> None:
    runner, restored = FakeRunner(), []
    engine = Engine(runner, prompt_chunk=4)

    def restore(session: FakeSession, start: int, end: int) -> None:
        assert not session.fed
        restored.append((start, end))

    cost = stored_cost(PromptCost(move=1.0, block=10))
    client = make_client("a", (1, 2, 3), max_tokens=1)
    client.work.stored, client.work.stored_cost, client.work.restores = 45, cost, restore
    submit(engine, client)
    run(engine, 1)
    assert restored[0] == (0, 10)  # a move and ten copies; the next move does not fit into half a chunk
    run(engine, 10)
    assert results(client)[0] == [4]
    assert restored[-1][1] == 45
    assert [end for _, end in restored[:-1]] == [start for start, _ in restored[1:]]
    assert client.session.fed == [1, 2, 3]


def test_stored_tokens_that_cannot_be_restored_end_the_request() -> None:
    engine = Engine(FakeRunner())

    def restore(session: FakeSession, start: int, end: int) -> None:
        raise ValueError("these rows are no rows")

    client = make_client("a")
    client.work.stored, client.work.restores = 4, restore
    submit(engine, client)
    run(engine, 2)
    assert str(failure(client)[1]) == "these rows are no rows"


def test_what_was_read_behind_a_stop_string_is_not_kept() -> None:
    engine, keeper = Engine(FakeRunner()), Keeper()
    client = submit(engine, kept(make_client("a", (3,), max_tokens=50, stops=("F",)), keeper))
    keeper.gate.set()
    run(engine, 4)
    client.stream.stop(0, 2)
    run(engine, 2)
    tokens, last = results(client)
    assert len(tokens) > 2
    assert (last.reason, last.completion_tokens, keeper.answer) == ("stop", 2, [4, 5])
    engine.shutdown()


@pytest.mark.parametrize(("said", "answer"), [(3, [4, 5, 6]), (2, [4, 5])])
def test_an_answer_that_is_kept_ends_when_its_door_has_looked_for_stop_strings(
    said: int, answer: list[int]
) -> None:
    engine, keeper = Engine(FakeRunner()), Keeper()
    client = submit(engine, kept(make_client("a", (3,), max_tokens=3, stops=("F",)), keeper))
    keeper.gate.set()
    run(engine, 8)
    assert [event.last for event in client.stream.take() if isinstance(event, Says)] == [False, False, True]
    assert (keeper.closed, engine.places) == (-1, 1)
    client.stream.stop(0, said)
    run(engine, 2)
    _, last = results(client)
    assert (last.reason, last.completion_tokens) == ("length" if said == 3 else "stop", said)
    assert keeper.answer == answer
    assert engine.places == 0
    engine.shutdown()


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
def test_an_end_among_drafts_is_the_end_unless_it_is_ignored(engine: FakeEngine, token: int) -> None:
    ended = submit(engine, drafting("a", max_tokens=60, end_ids=frozenset({token})))
    stopped = submit(engine, drafting("b", max_tokens=60, stop_ids=frozenset({token})))
    ignored = submit(engine, drafting("c", max_tokens=60, end_ids=frozenset({token}), ignore_eos=True))
    run(engine, 60)
    for client, count, reason in (
        (ended, token - 5, "end_of_sequence"),
        (stopped, token - 5, "stop"),
        (ignored, 60, "length"),
    ):
        tokens, end = results(client)
        assert (tokens, end.reason) == (after(5, count), reason)
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
        self, sessions: Sessions, last_tokens: Sequence[int], samplers: Samplers, drafts: Tokens = ()
    ) -> Step:
        self._clock.now += round(1e9 * (1 + self._row * sum(map(len, drafts))))
        return super().launch(sessions, last_tokens, samplers, drafts)

    def draft(
        self, sessions: Sessions, last_tokens: Sequence[int], samplers: Samplers, counts: Sequence[int]
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
