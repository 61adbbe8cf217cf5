"""What the scheduler does before a prompt that continues stored tokens, and after an answer that is kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from decode_engine.engine.engine import Engine
from decode_engine.engine.prompt_pieces import PromptCost, stored_cost
from decode_engine.errors import ShuttingDownError, TooManyRequestsError
from decode_engine.orders.events import Says
from decode_engine.orders.order import KeepOptions
from index_store.errors import StoreFullError
from tests.decode_engine.engine.fake_runner import (
    Client,
    FakeRunner,
    FakeSession,
    failure,
    make_client,
    results,
    run,
    submit,
)
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
    assert clients[0].stream is not None
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
    assert (tokens, last.reason) == ([4, 5], "end_of_sequence")
    assert (keeper.fed, keeper.answer) == ([3, 4, 5], [4, 5])
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
    assert client.stream is not None
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
    assert client.stream is not None
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
    assert client.stream is not None
    assert [event.last for event in client.stream.take() if isinstance(event, Says)] == [False, False, True]
    assert (keeper.closed, engine.places) == (-1, 1)
    client.stream.stop(0, said)
    run(engine, 2)
    _, last = results(client)
    assert (last.reason, last.completion_tokens) == ("length" if said == 3 else "stop", said)
    assert keeper.answer == answer
    assert engine.places == 0
    engine.shutdown()
