"""Who serves, and how many replicas are wanted."""

from __future__ import annotations

import pytest

from decode_engine.processes.cluster.roster import GONE_S, UP_S, Load, Roster, Scale, replicas_wanted
from decode_engine.rpc.routing.router import Replica

IDLE = Load(0, 0, 4, 0)
DOWN_S = 60.0


def test_who_says_nothing_for_a_while_is_there_no_more() -> None:
    now = [0.0]
    roster = Roster(clock=lambda: now[0])
    for name in ("engine-1", "engine-0"):
        roster.note(Replica(name, "a:1", store="s"), IDLE)
    roster.note_worker("worker-0", "s")
    assert [each.name for each in roster.replicas()] == ["engine-0", "engine-1"]
    now[0] += GONE_S - 1
    roster.note(Replica("engine-1", "a:2", store="s"), IDLE)
    now[0] += 2
    assert [(each.name, each.grpc) for each in roster.replicas()] == [("engine-1", "a:2")]
    assert roster.workers() == []
    assert len(roster.loads()) == 1
    roster.leave("engine-1")
    assert roster.replicas() == []


def test_stores_that_a_worker_attends_are_told() -> None:
    roster = Roster()
    roster.note(Replica("engine-0", "a:1", store="s"), IDLE)
    roster.note(Replica("engine-1", "a:2", store="t"), IDLE)
    roster.note_worker("w", "t")
    assert [each.attended for each in roster.replicas()] == [False, True]
    roster.leave("w")
    assert not any(each.attended for each in roster.replicas())


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 1),
        ([Load(0, 0, 4, 0)], 1),
        ([Load(9, 4, 4, 0)], 4),
        ([Load(0, 1, 4, 0.95)], 2),
        ([Load(0, 0, 4, 0.95)], 1),
        ([Load(0, 1, 4, 0.2)] * 3, 2),
        ([Load(0, 1, 4, 0.6)] * 2, 2),
        ([Load(0, 0, 4, 0.6)] * 2, 1),
    ],
)
def test_replicas_are_wanted_for_requests_and_for_memory(loads: list[Load], wanted: int) -> None:
    assert replicas_wanted(loads) == wanted


def test_the_number_follows_what_is_wanted_for_a_while() -> None:
    now = [0.0]
    scale = Scale(1, 3, DOWN_S, clock=lambda: now[0])
    busy = Load(9, 4, 4, 0)

    def after(seconds: float, *loads: Load) -> int:
        now[0] += seconds
        scale.note(loads)
        return scale.number

    assert after(0, busy) == after(UP_S - 1, busy) == 1
    assert after(0, IDLE) == after(2, busy) == after(UP_S - 1, busy) == 1  # it was not wanted all the while
    assert after(2, busy) == 3
    assert after(2 * UP_S, busy) == 3  # who has just been started has not told yet
    assert after(0, busy, busy, busy) == after(2 * UP_S, busy, busy, busy) == 3  # the most
    assert after(0, IDLE, IDLE, IDLE) == after(DOWN_S - 1, IDLE, IDLE, IDLE) == 3
    assert after(2, IDLE, IDLE, IDLE) == 2
    assert after(DOWN_S - 1, IDLE, IDLE) == 2
    assert after(2, IDLE, IDLE) == 1
    assert after(2 * DOWN_S, IDLE) == 1  # the least
