"""The rule: balance, least movement, the bound, and who stays where."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_engine.rpc.routing.router import (
    BOUND,
    REMEMBERED_S,
    SUSPECTED_S,
    Replica,
    Router,
    Wanted,
    order_of,
)

NAMES = st.lists(st.text(max_size=12), min_size=1, max_size=8, unique=True)
KEYS = [f"{number:064x}" for number in range(2000)]


def made(count: int, **facts: object) -> list[Replica]:
    return [Replica(f"replica-{number}", f"127.0.0.1:{number}", **facts) for number in range(count)]  # type: ignore[arg-type]


def router_of(*replicas: Replica, clock: list[float] | None = None) -> Router:
    router = Router() if clock is None else Router(clock=lambda: clock[0])
    router.update(replicas)
    return router


def taken(router: Router, wanted: Wanted) -> Replica:
    replica = router.take(wanted)
    assert replica is not None
    return replica


@given(NAMES, st.text(max_size=20), st.randoms(use_true_random=False))
def test_an_order_depends_on_the_key_and_the_names_alone(names: list[str], key: str, draws: object) -> None:
    mixed = list(names)
    draws.shuffle(mixed)  # type: ignore[attr-defined]
    assert order_of(key, names) == order_of(key, mixed)
    assert sorted(order_of(key, names)) == sorted(names)


@given(NAMES, st.text(max_size=12), st.text(max_size=20))
def test_a_replica_that_joins_changes_no_order_of_the_others(names: list[str], new: str, key: str) -> None:
    if new not in names:
        assert [name for name in order_of(key, [*names, new]) if name != new] == order_of(key, names)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_keys_are_spread_evenly(count: int) -> None:
    held = Counter(order_of(key, map(str, range(count)))[0] for key in KEYS)
    even = len(KEYS) / count
    assert len(held) == count
    assert all(abs(number - even) < 5 * even**0.5 for number in held.values())  # five standard deviations


def test_growing_from_one_to_four_and_back_moves_what_the_hash_implies() -> None:
    router = Router()
    before = dict.fromkeys(KEYS, "replica-0")
    for count, part in ((1, 0.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4), (3, 1 / 4), (2, 1 / 3), (1, 1 / 2)):
        router.update(made(count))
        after = {key: router.holders(key)[0] for key in KEYS}
        moved = sum(after[key] != before[key] for key in KEYS)
        assert abs(moved - part * len(KEYS)) < 5 * (len(KEYS) * part) ** 0.5 + 1
        before = after


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(1, 6), st.integers(1, 8))
def test_no_replica_gets_more_than_the_bound(keys: list[int], count: int, sessions: int) -> None:
    router = router_of(*made(count, sessions=sessions))
    for number, key in enumerate(keys, 1):
        taken(router, Wanted(f"context {key}"))
        most = max(sessions, BOUND * number / count + 1)
        assert all(router.load(replica.name) <= most for replica in router.replicas)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_two_routers_that_saw_the_same_choose_the_same(calls: list[tuple[int, bool]]) -> None:
    routers = [
        router_of(*made(3, sessions=2), clock=[0.0]),
        router_of(*reversed(made(3, sessions=2)), clock=[0.0]),
    ]
    for key, ends in calls:
        wanted = Wanted(f"context {key}")
        first, second = (taken(router, wanted) for router in routers)
        assert first == second
        if ends:
            for router in routers:
                router.give_back(first, wanted)


def test_requests_of_one_context_meet_until_a_replica_has_no_place_more() -> None:
    router = router_of(*made(4, sessions=3))
    first = [taken(router, Wanted("a")).name for _ in range(3)]
    assert len(set(first)) == 1
    more = [taken(router, Wanted("a")).name for _ in range(3)]
    assert set(more) == {router.holders("a")[1]}
    assert router.holders("a")[0] == first[0]


def test_a_hot_context_keeps_its_holders_for_a_while() -> None:
    clock = [0.0]
    router = router_of(*made(4, sessions=1), clock=clock)
    wanted = Wanted("a")
    running = [taken(router, wanted) for _ in range(3)]
    for replica in running:
        router.give_back(replica, wanted)
    assert len(router.holders("a")) == 3
    router.give_back(taken(router, wanted), wanted)
    assert len(router.holders("a")) == 3
    clock[0] += REMEMBERED_S + 1
    router.give_back(taken(router, wanted), wanted)
    assert len(router.holders("a")) == 1


def test_a_session_stays_though_another_replica_has_joined() -> None:
    router = router_of(*made(1))
    wanted = Wanted(session="s")
    first = taken(router, wanted)
    router.give_back(first, wanted)
    router.update(made(4))
    assert taken(router, wanted) == first


def test_a_session_leaves_a_replica_that_has_gone_or_is_full() -> None:
    replicas = made(3, sessions=2)
    router = router_of(*replicas)
    first = taken(router, Wanted(session="s"))
    router.update([each for each in replicas if each != first])
    second = taken(router, Wanted(session="s"))
    assert second != first
    taken(router, Wanted(session="s"))
    assert taken(router, Wanted(session="s")) != second


def test_nobody_goes_where_the_memory_is_too_small_or_who_drains() -> None:
    small = Replica("small", "a", memory_bytes=10)
    large = Replica("large", "b", memory_bytes=100)
    drains = Replica("drains", "c", memory_bytes=100, draining=True)
    router = router_of(small, large, drains)
    assert all(taken(router, Wanted(key, need_bytes=50)) == large for key in KEYS[:50])
    assert router.take(Wanted("a", need_bytes=1000)) is None
    assert router.take(Wanted("a", need_bytes=50), excluded=("large",)) is None


def test_what_has_to_be_read_in_one_store_goes_there() -> None:
    here, there = Replica("here", "a", store="x"), Replica("there", "b", store="y")
    router = router_of(here, there)
    assert {taken(router, Wanted(store="y")).name for _ in range(20)} == {"there"}


def test_who_did_not_answer_is_asked_last_and_then_again() -> None:
    clock = [0.0]
    router = router_of(*made(2), clock=clock)
    wanted = Wanted("a")
    first = taken(router, wanted)
    router.give_back(first, wanted)
    router.suspect(first.name)
    second = taken(router, wanted)
    assert second != first
    router.give_back(second, wanted)
    assert router.take(wanted, excluded=(second.name,)) == first
    router.give_back(first, wanted)
    clock[0] += SUSPECTED_S + 1
    assert taken(router, wanted) == first


def test_what_has_no_key_goes_where_the_least_is_to_do() -> None:
    router = router_of(*made(4))
    assert sorted(taken(router, Wanted()).name for _ in range(8)) == sorted(
        2 * [f"replica-{n}" for n in range(4)]
    )


def test_what_a_replica_tells_of_itself_counts() -> None:
    busy, idle = Replica("busy", "a", load=9), Replica("idle", "b")
    router = router_of(busy, idle)
    assert [taken(router, Wanted()).name for _ in range(3)] == ["idle"] * 3
