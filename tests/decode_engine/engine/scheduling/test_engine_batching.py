"""Batches, admission and turns between tenants, seen in what the scheduler feeds to a runner without a model."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Job, Place, new_job
from decode_engine.engine.prompt_pieces import PromptCost, cut_prompt
from decode_engine.engine.queues import MAX_PASSES, Queues, Turns, Waiting
from decode_engine.errors import CancelledError, SessionMemoryError, TooManyRequestsError
from decode_engine.orders.order import Sampling
from index_store.errors import InvalidArgumentError
from index_store.memory.patience import MAX_PASSED
from tests.decode_engine.engine.fake_runner import (
    Client,
    FakeEngine,
    FakeRunner,
    FakeSession,
    Stream,
    failure,
    make_client,
    results,
    run,
    submit,
)


def test_long_prompts_are_chunked_between_decode_steps_of_others(
    engine: FakeEngine, runner: FakeRunner
) -> None:
    short = submit(engine, make_client("short", prompt=[1], max_tokens=4))
    engine.step()
    long = submit(engine, make_client("long", prompt=range(10), max_tokens=1))
    run(engine, 3)
    assert runner.calls == [
        (("short",), 1),
        (("short",), 1),
        (("long",), 2),
        (("long",), 2),
        (("short",), 1),
        (("long",), 2),
        (("long",), 2),
        (("short",), 1),
        (("long",), 2),
    ]
    assert results(short)[0] == [2, 3, 4, 5]
    assert results(long)[0] == [10]


@pytest.mark.parametrize("others", [0, 1, 3])
def test_prompts_of_requests_with_seeds_are_cut_alike_whoever_is_there(
    engine: FakeEngine, runner: FakeRunner, others: int
) -> None:
    seeded = Sampling(temperature=0.1, seed=1)
    submit(engine, make_client("seeded", prompt=range(7), sampling=seeded))
    for number in range(others):
        submit(engine, make_client(f"other {number}", prompt=range(3 + number)))
    run(engine, 12)
    assert [count for names, count in runner.calls if names == ("seeded",)][:5] == [2, 2, 2, 1, 1]
    assert all(len(fed) == 1 for fed in runner.prompts if "seeded" in fed)


def test_prompts_are_read_together_as_far_as_the_chunk_goes(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=16, max_waiting=100, prompt_chunk=16)
    clients = [submit(engine, make_client(f"{n}", prompt=range(5), max_tokens=2)) for n in range(8)]
    seeded = Sampling(temperature=0.1, seed=1)
    alone = submit(engine, make_client("alone", prompt=range(5), max_tokens=2, sampling=seeded))
    told = submit(engine, make_client("told", prompt=range(3), max_tokens=2, prompt_logprobs=True))
    run(engine, 5)
    first, *others = runner.prompts
    assert first == dict.fromkeys("01234", 5), "two chunks while nobody decodes"
    assert others == [{"told": 3}, dict.fromkeys("567", 5), {"alone": 5}]
    assert all(results(client)[0] == [5, 6] for client in [*clients, alone])
    assert results(told)[0] == [3, 4]


def test_a_prompt_that_fails_harms_nobody_with_whom_it_is_read(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=16, prompt_chunk=64)
    broken = FakeSession("broken", fails_at=2)
    clients = [
        make_client("a", range(5)),
        make_client("broken", range(5), session=broken),
        make_client("b", [7]),
    ]
    for client in clients:
        submit(engine, client)
    run(engine, 5)
    assert set(runner.prompts[0]) == {"a", "broken", "b"}
    assert [results(client)[0] for client in clients[::2]] == [[5, 6, 7, 8], [8, 9, 10, 11]]
    assert isinstance(failure(clients[1])[1], ValueError)


def test_prompts_on_which_no_stream_waits_are_all_read_at_once(
    engine: FakeEngine, runner: FakeRunner
) -> None:
    for name in "abc":
        submit(engine, make_client(name, prompt=range(16), max_tokens=1))
    run(engine, 9)
    everybody = {"a": 2, "b": 2, "c": 2}
    assert runner.prompts == [everybody] * 8


def test_prompts_take_turns_beside_a_stream(engine: FakeEngine, runner: FakeRunner) -> None:
    submit(engine, make_client("stream", max_tokens=100))
    engine.step()
    for name in "abc":
        submit(engine, make_client(name, prompt=range(16), max_tokens=1))
    run(engine, 9)
    assert runner.prompts[1:] == [{"a": 2, "b": 2}, {"b": 2, "c": 2}, {"c": 2, "a": 2}] * 3


def test_a_short_prompt_need_not_wait_for_the_turns_of_long_ones(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=8, prompt_chunk=16)
    for name in "abcdef":
        submit(engine, make_client(name, prompt=range(60), max_tokens=1))
    run(engine, 2)
    runner.calls.clear()
    short = submit(engine, make_client("short", prompt=[1] * 8, max_tokens=2))
    engine.step()
    assert results(short)[0] == [2, 3]
    assert runner.prompts[-1] == {"short": 8, "c": 8, "d": 8, "e": 8}


def test_many_short_prompts_leave_half_of_the_chunk_to_a_long_one(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=16, max_waiting=100, prompt_chunk=16)
    long = submit(engine, make_client("long", prompt=range(60), max_tokens=1))
    for number in range(60):
        submit(engine, make_client(f"short {number}", prompt=[1] * 3, max_tokens=1))
    run(engine, 6)
    assert len(long.session.fed) >= 6 * 8
    run(engine, 9)
    assert results(long)[0] == [60]


def test_where_a_prompt_is_cut_does_not_depend_on_others(runner: FakeRunner) -> None:
    cost = PromptCost(token=1.5, move=3.0, block=5, begin=2)

    def pieces(others: int) -> list[int]:
        runner.prompts.clear()
        engine = Engine(runner, max_sessions=8, max_waiting=100, prompt_chunk=20)
        for number in range(others):
            submit(engine, make_client(f"{number}", [0] * (1 + 7 * number % 40), 9))
            run(engine, number % 3)
        submit(engine, make_client("a", [0] * 50, 1, cost=cost))
        for number in range(others):
            submit(engine, make_client(f"{number} more", [0] * (1 + 11 * number % 60), 3))
            run(engine, number % 2)
        run(engine, 100)
        return [fed["a"] for fed in runner.prompts if "a" in fed]

    alone = pieces(0)
    assert alone == pieces(3) == pieces(20)
    assert (sum(alone), len(alone)) == (50, len(cut_prompt(cost, 50, 10)))


@pytest.mark.parametrize("seed", range(5))
def test_no_stream_waits_longer_than_one_chunk(runner: FakeRunner, seed: int) -> None:
    """Beside a stream a turn reads prompts of the cost of a chunk at most, in at most MAX_PASSES passes."""
    engine = Engine(runner, max_sessions=8, max_waiting=100, prompt_chunk=20)
    generator = random.Random(seed)
    seeded = Sampling(temperature=0.1, seed=1)
    costs: dict[str, float] = {}
    turns: list[tuple[float, int]] = []

    def turn() -> None:
        before = len(runner.prompts)
        engine.step()
        read = runner.prompts[before:]
        spent = sum(count * costs[name] for fed in read for name, count in fed.items())
        turns.append((spent, len(read)))

    clients = [submit(engine, make_client("stream", max_tokens=420))]
    costs["stream"] = 1.0
    for number in range(60):
        length, token = generator.choice([1, 3, 9, 19, 20, 21, 150]), generator.choice([1.0, 1.0, 3.0])
        most, sampling = generator.randint(1, 9), generator.choice([Sampling(), seeded])
        costs[f"{number}"] = token
        cost = PromptCost(token)
        client = make_client(f"{number}", [0] * length, most, cost=cost, sampling=sampling)
        clients.append(submit(engine, client))
        for _ in range(generator.randint(0, 3)):
            turn()
    for _ in range(400):
        turn()
    assert max(spent for spent, _ in turns) == 20, "a chunk is used where there is enough to read"
    assert max(passes for _, passes in turns) <= MAX_PASSES
    assert any(len(fed) > 1 for fed in runner.prompts)
    assert all(len(results(client)[0]) == client.work.max_tokens for client in clients)


def _admitted(clients: list[Client]) -> list[str]:
    """Names of those whose prompts were begun."""
    return [client.session.name for client in clients if client.session.fed]


def test_contexts_take_turns_and_the_first_comes_first_inside_of_one(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=1, max_waiting=100)
    flood = [make_client(f"a{number}", max_tokens=1, context="a") for number in range(5)]
    late = [
        make_client("b0", max_tokens=1, context="b"),
        make_client("b1", max_tokens=1, context="b"),
        make_client("c0", max_tokens=1, context="c"),
    ]
    for client in [*flood, *late]:
        submit(engine, client)
    run(engine, 8)
    assert [names[0] for names, _ in runner.calls] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_admitted_requests_never_need_more_than_the_memory(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=8, max_waiting=100, session_memory=100)
    generator = random.Random(3)
    clients = [
        submit(
            engine,
            make_client(
                f"{n}",
                max_tokens=generator.randint(1, 20),
                context=generator.choice("abc"),
                memory=generator.choice([0, 5, 40, 60, 100]),
            ),
        )
        for n in range(70)
    ]
    most = 0
    for _ in range(600):
        engine.step()
        stats = engine.stats()
        most = max(most, stats.session_bytes)
        assert stats.session_limit_bytes == 100
        assert stats.session_bytes <= 100
    assert most == 100
    assert all(len(results(client)[0]) == client.work.max_tokens for client in clients)
    assert engine.stats().session_bytes == 0


def test_a_request_that_can_never_fit_is_refused_at_once(runner: FakeRunner) -> None:
    engine = Engine(runner, session_memory=100)
    for attempt in (lambda: engine.reserve("a", 101), lambda: submit_anyway(engine, 101)):
        with pytest.raises(
            SessionMemoryError, match=r"need 101 bytes.*have 100; shorten the prompt"
        ) as caught:
            attempt()
        assert caught.value.metadata == {"needed": "101", "limit": "100"}
    assert engine.places == 0
    engine.reserve("a", 100).release()


def submit_anyway(engine: FakeEngine, memory: int) -> None:
    """Submits a request of which `reserve` was not told how much it needs."""
    engine.submit(engine.reserve(), make_client("a", memory=memory).work, Stream(engine.wake))


def test_a_large_request_is_passed_a_bounded_number_of_times(runner: FakeRunner) -> None:
    """The memory is never free for it while small ones of another context come in all the time."""
    engine = Engine(runner, max_sessions=4, max_waiting=10**6, session_memory=100)
    running = submit(engine, make_client("running", max_tokens=40, context="b", memory=30))
    engine.step()
    large = submit(engine, make_client("large", max_tokens=1, context="a", memory=90))
    behind = submit(engine, make_client("behind", max_tokens=1, context="a", memory=1))
    small = [make_client(f"{n}", max_tokens=3, context="b", memory=30) for n in range(50)]
    for client in small:
        submit(engine, client)
    run(engine, 30)
    assert len(_admitted(small)) == MAX_PASSED
    assert _admitted([large, behind]) == []
    run(engine, 15)
    assert results(running)[0] == list(range(1, 41))
    assert results(large)[0] == [1]
    turns = [turn for turn, fed in enumerate(runner.prompts) for name in ("large", "behind") if name in fed]
    assert turns == sorted(turns)
    run(engine, 60)
    assert len(_admitted(small)) == 50


def test_a_cancelled_request_blocks_nobody(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=4, session_memory=100)
    submit(engine, make_client("running", max_tokens=1000, memory=50, context="b"))
    engine.step()
    large = submit(engine, make_client("large", memory=90, context="a"))
    behind = submit(engine, make_client("behind", max_tokens=2, memory=10, context="a"))
    run(engine, 3)
    assert not behind.session.fed
    large.stream.cancel()
    run(engine, 2)
    assert results(behind)[0] == [1, 2]
    assert isinstance(failure(large)[1], CancelledError)


def test_a_flood_on_one_context_leaves_places_for_others(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=2, max_waiting=8)
    flood = [engine.reserve("a") for _ in range(8)]
    with pytest.raises(TooManyRequestsError, match="on this context") as caught:
        engine.reserve("a")
    assert caught.value.metadata == {"limit": "8"}
    others = [engine.reserve("b"), engine.reserve("c")]
    with pytest.raises(TooManyRequestsError, match="10 requests are running"):
        engine.reserve("d")
    for place in [*flood, *others]:
        place.release()
    assert engine.places == 0
    engine.reserve("a").release()


def test_figures_tell_what_runs_and_what_was_fed(runner: FakeRunner) -> None:
    engine = Engine(runner, max_sessions=2, max_waiting=4, prompt_chunk=8, session_memory=50)
    clients = [
        submit(engine, make_client(name, prompt=range(length), max_tokens=6, context=name, memory=20))
        for name, length in (("a", 4), ("b", 20), ("c", 1))
    ]
    assert (engine.stats().waiting, engine.stats().requests) == (3, 3)
    engine.step()
    stats = engine.stats()
    assert (stats.waiting, stats.prompting, stats.decoding) == (1, 1, 1)
    assert (stats.session_bytes, stats.session_limit_bytes) == (40, 50)
    assert (stats.steps, stats.prompt_tokens) == (1, 8)
    assert (stats.decode_steps, stats.decode_tokens, stats.decode_batch) == (1, 1, 1)
    run(engine, 30)
    stats = engine.stats()
    assert (stats.waiting, stats.prompting, stats.decoding, stats.requests, stats.session_bytes) == (0,) * 5
    fed = sum(len(client.session.fed) for client in clients)
    assert stats.prompt_tokens + stats.decode_tokens == fed == 25 + 3 * 5
    batches = [names for names, count in runner.calls if count == 1 and len(names) > 1]
    assert batches, "some decoded together"
    assert stats.decode_steps < stats.decode_tokens
    assert stats.decode_batch == 0


@pytest.mark.parametrize("memory", [0, -1])
def test_memory_out_of_range_is_refused(runner: FakeRunner, memory: int) -> None:
    with pytest.raises(InvalidArgumentError, match="session_memory"):
        Engine(runner, session_memory=memory)


MOST_PROMPT, MOST_ANSWER, SESSIONS = 40, 20, 8


def job(
    tenant: str = "", context: str = "", prompt: int = 1, *, priority: int = 0, max_tokens: int = 4
) -> Job[FakeSession]:
    client = make_client("x", [0] * prompt, max_tokens, context=context, tenant=tenant, priority=priority)
    return new_job(client.work, Place(lambda: None), Stream(lambda: None), 0, 256)


JOBS = st.builds(
    job,
    st.sampled_from(["", "ant", "bee"]),
    st.sampled_from("xyz"),
    st.integers(1, 9),
    priority=st.integers(-1, 1),
)


@given(st.lists(JOBS, max_size=12), st.integers(0, 5), st.sampled_from([0.5, 1.0, 3.0]))
def test_requests_are_taken_in_the_order_that_was_foretold(
    jobs: list[Job[FakeSession]], taken: int, weight: float
) -> None:
    waiting: Waiting[FakeSession] = Waiting(Turns(lambda tenant: weight if tenant == "bee" else 1.0))
    for each in jobs:
        waiting.add(each)
    for _ in range(taken):
        waiting.take(None, 1)
    foretold = {ahead: one for one, ahead in waiting.ahead()}
    assert sorted(foretold) == list(range(len(waiting)))
    for place in range(len(waiting)):
        assert waiting.take(None, 1) is foretold[place]
    assert list(waiting.ahead()) == []


@given(st.lists(st.sampled_from("xyz"), max_size=12))
def test_one_tenants_contexts_take_turns_whatever_their_requests_cost(contexts: list[str]) -> None:
    jobs = [job("ant", context, 1 + 7 * number % 5) for number, context in enumerate(contexts)]
    waiting: Waiting[FakeSession] = Waiting()
    for each in jobs:
        waiting.add(each)
    seen: Counter[str] = Counter()
    places = {each: (seen.update([each.work.context]), seen[each.work.context])[1] for each in jobs}
    first = list(dict.fromkeys(contexts))
    expected = sorted(jobs, key=lambda each: (places[each], first.index(each.work.context)))
    assert [waiting.take(None, 1) for _ in jobs] == expected


def test_priorities_count_within_a_tenant_alone() -> None:
    waiting: Waiting[FakeSession] = Waiting()
    low, high, other = job("ant"), job("ant", priority=9), job("bee", priority=-9)
    for each in (low, high, other):
        waiting.add(each)
    assert [waiting.take(None, 1) for _ in range(3)] == [high, other, low]


def test_what_is_put_back_was_not_given() -> None:
    waiting: Waiting[FakeSession] = Waiting()
    first, second = job("ant", prompt=9), job("bee", prompt=2)
    for each in (first, second):
        waiting.add(each)
    assert waiting.take(None, 1) is first
    waiting.put_back(first)
    assert [waiting.take(None, 1) for _ in range(2)] == [first, second]


def test_time_without_requests_saves_nothing_up() -> None:
    waiting: Waiting[FakeSession] = Waiting()
    busy = [job("ant", prompt=10) for _ in range(20)]
    for each in busy:
        waiting.add(each)
    for _ in range(10):
        waiting.take(None, 1)
    late = [job("bee", prompt=10) for _ in range(10)]
    for each in late:
        waiting.add(each)
    order = [waiting.take(None, 1) for _ in range(10)]
    assert sum(each in late for each in order) in (5, 6), "as many as the other, not all first"


def test_tenants_that_are_gone_are_forgotten() -> None:
    turns = Turns()
    for number in range(9000):
        turns.join(f"{number}")
        turns.serve(f"{number}")
        turns.charge(f"{number}", 1)
    assert len(turns._given) < 5000


@settings(max_examples=4)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=20, max_size=20),
)
def test_twenty_tenants_that_always_want_more_get_shares_by_weight(seed: int, weights: list[float]) -> None:
    """Each has a habit of its own, from many short requests to few long ones, and three that wait at any time."""
    random_ = random.Random(seed)
    weight_of = {f"{number}": weight for number, weight in enumerate(weights)}
    habits = {name: (random_.randint(1, MOST_PROMPT), random_.randint(1, MOST_ANSWER)) for name in weight_of}
    queues: Queues[FakeSession] = Queues(SESSIONS, None, weight_of.__getitem__)
    given_, left = dict.fromkeys(weight_of, 0), dict[Job[FakeSession], int]()

    def ask(tenant: str) -> None:
        prompt, answer = (random_.randint(1, most) for most in habits[tenant])
        queues.waiting.add(job(tenant, "c", prompt, max_tokens=answer))

    for tenant in list(weight_of) * 3:
        ask(tenant)
    # What one is ahead of another at most: a prompt, and answers of all sessions, at the smallest weight.
    most_apart = MOST_PROMPT + SESSIONS * MOST_ANSWER
    while min(given_[name] / weight for name, weight in weight_of.items()) < 10 * most_apart:
        while (admitted := queues.admit()) is not None:
            given_[admitted.tenant] += len(admitted.work.prompt)
            left[admitted] = admitted.work.max_tokens
            queues.start_decoding(admitted, [admitted])
            ask(admitted.tenant)
        for running in list(left):
            given_[running.tenant] += 1
            queues.note_generated(running, 1)
            left[running] -= 1
            if not left[running]:
                del left[running]
                queues.remove(running)
        shares = [given_[name] / weight for name, weight in weight_of.items()]
        assert max(shares) - min(shares) <= most_apart, "nobody who waits falls behind by more, ever"
    assert max(shares) <= 1.1 * min(shares)


def test_prompts_of_tenants_are_read_in_turn() -> None:
    runner = FakeRunner()
    engine: FakeEngine = Engine(runner, max_sessions=9, prompt_chunk=8)
    submit(engine, make_client("stream", max_tokens=50))
    run(engine, 1)
    for number in range(6):
        submit(engine, make_client(f"many {number}", [0] * 40, 1, tenant="many"))
    submit(engine, make_client("one", [0] * 40, 1, tenant="one"))
    run(engine, 8)
    read: Counter[str] = Counter()
    for call in runner.prompts:
        for name, tokens in call.items():
            read[name.split()[0]] += tokens
    assert read["one"] + read["many"] == 64
    assert abs(read["one"] - read["many"]) <= 8, "at most what one step reads"


def test_answers_count_for_their_tenants_turns() -> None:
    engine: FakeEngine = Engine(FakeRunner(), max_sessions=1, max_waiting=60, prompt_chunk=8)
    talkers = [submit(engine, make_client(f"t{n}", max_tokens=9, tenant="talks")) for n in range(9)]
    listeners = [
        submit(engine, make_client(f"l{n}", [0] * 2, max_tokens=1, tenant="listens")) for n in range(9)
    ]
    while not all(client.stream.take() for client in listeners[-1:] if client.stream is not None):
        run(engine, 1)
    ended = [client for client in talkers if client.stream is not None and not client.stream.events.empty()]
    assert len(ended) in (3, 4), "27 tokens went to who listens, and about as many to who talks"
    assert len(results(ended[0])[0]) == 9
