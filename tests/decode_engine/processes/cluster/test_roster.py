"""Who serves: places are kept, and taken over; and how many replicas are wanted."""

from __future__ import annotations

import pytest

from decode_engine.processes.cluster.roster import GONE_S, Roster
from decode_engine.processes.cluster.scaling import Load, replicas_wanted
from decode_engine.rpc.routing.router import Replica


def test_who_comes_new_takes_the_place_of_who_has_gone() -> None:
    now = [0.0]
    roster = Roster(clock=lambda: now[0])
    names = [roster.note(each, Replica("", "a:1", store="s")) for each in ("x", "y", "z")]
    assert names == ["engine-0", "engine-1", "engine-2"]
    now[0] += GONE_S - 1
    roster.note("x", Replica("engine-0", "a:1"))
    roster.note("z", Replica("engine-2", "a:1"))
    now[0] += 2
    assert [each.name for each in roster.replicas()] == ["engine-0", "engine-2"]
    assert roster.note("new", Replica("", "a:1")) == "engine-1"


def test_a_roster_that_was_lost_gives_back_the_same_places() -> None:
    roster = Roster()
    assert roster.note("y", Replica("engine-1", "a:1")) == "engine-1"
    assert roster.note("x", Replica("engine-1", "a:1")) == "engine-0"


def test_one_that_does_not_serve_keeps_its_place_and_is_not_told() -> None:
    roster = Roster()
    name = roster.note("x", Replica("", "a:1"))
    assert roster.note("x", Replica(name, "")) == name
    assert roster.replicas() == []
    assert roster.note("y", Replica("", "a:1")) != name


def test_stores_that_a_worker_attends_are_told() -> None:
    roster = Roster()
    roster.note("x", Replica("", "a:1", store="s"))
    roster.note("y", Replica("", "a:2", store="t"))
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
