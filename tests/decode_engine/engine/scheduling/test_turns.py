"""Turns between tenants: shares of tokens by weight, priorities within one, and nobody who waits for ever."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Job, Place, new_job
from decode_engine.engine.queues import Queues, Turns, Waiting
from tests.decode_engine.engine.fake_runner import (
    FakeEngine,
    FakeRunner,
    FakeSession,
    Stream,
    make_client,
    results,
    run,
    submit,
)

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
