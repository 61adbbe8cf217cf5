"""The simulation of a fleet: nothing is lost, and what can be computed by hand comes out."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ops" / "plan"))

import plan
from fleet import HEAD, Fleet, Load, Sample, sample
from routing import Replica, choose, orders
from simulation import Shelf, simulate

from decode_engine.rpc.routing.router import BOUND, Router, Wanted, _Demand, order_of
from decode_engine.rpc.routing.router import Replica as Member

SMALL = Fleet(
    replicas=4, sessions=4, device=40.0, host=80.0, disk=400.0, host_rate=1e3, disk_rate=1e3, objects_rate=1e3
)


def arrivals(contexts: int, rate: float, count: int, seed: int = 0) -> tuple[Sample, Any, Any]:
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, contexts + 1)
    shares /= shares.sum()
    ones = np.ones(contexts)
    times = np.cumsum(random.exponential(1 / rate, count))
    return Sample(shares * rate, ones, ones * 10.0), times, random.choice(contexts, count, p=shares)


@pytest.mark.parametrize("lifetime_s", [1e15, 5.0])
def test_every_request_ends_in_one_way(lifetime_s: float) -> None:
    contexts, times, asked = arrivals(100, 20.0, 2000)
    fleet = replace(SMALL, lifetime_s=lifetime_s, away_s=2.0)
    found = simulate(fleet, contexts, times, asked)
    assert len(found.tiers_N) + found.refused == len(times) == found.arrived
    assert (found.broken + found.retried > 0) == (lifetime_s < 10)
    assert found.first_N.min() >= fleet.prompt_s + fleet.step_s
    loads = np.bincount(found.tiers_N, minlength=4)
    assert (loads > 0).all()
    if lifetime_s > 10:  # else what was lost was loaded, too
        assert found.moved["objects"] == loads[3] * 10
        assert found.moved["host"] == loads[1:].sum() * 10  # all comes through the host


def test_all_are_hits_where_all_fit() -> None:
    contexts, times, asked = arrivals(100, 20.0, 1000)
    fleet = replace(SMALL, device=1e6, host=1e6, lifetime_s=1e15)
    found = simulate(fleet, contexts, times, asked, warm_N=np.tile(np.arange(100), 50), measured_from=10.0)
    # A context that is asked for more than before gets one more holder, which loads it.
    assert found.figures()["device"] > 0.98
    one = simulate(replace(fleet, replicas=1), contexts, times, asked, warm_N=np.arange(100))
    assert one.figures()["device"] == 1.0
    assert one.moved == {"device": 0.0, "host": 0.0, "disk": 0.0, "objects": 0.0}


def erlang_c(servers: int, offered: float) -> float:
    """The share that waits in M/M/c."""
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)


@pytest.mark.parametrize("offered", [2.0, 3.2])
def test_one_replica_waits_as_a_queue_with_so_many_servers(offered: float) -> None:
    """M/M/4, by Erlang's C formula: answers alone take time, and their tokens are exponential."""
    fleet = replace(
        SMALL, replicas=1, device=1e9, prompt_s=0.0, token_s=0.0, step_s=0.01, answer=1000, lifetime_s=1e15
    )
    service_s = fleet.step_s * fleet.answer
    contexts, times, asked = arrivals(3, offered / service_s, 60_000)
    found = simulate(fleet, contexts, times, asked, warm_N=np.arange(3), measured_from=float(times[2000]))
    waits = found.first_N - fleet.step_s
    chance = erlang_c(fleet.sessions, offered)
    assert np.mean(waits > 1e-6) == pytest.approx(chance, rel=0.1)
    assert waits.mean() == pytest.approx(chance * service_s / (fleet.sessions - offered), rel=0.15)
    assert found.use["sessions"] == pytest.approx(offered / fleet.sessions, rel=0.05)


def test_the_least_recently_used_goes_first_and_never_what_is_used() -> None:
    shelf = Shelf(30.0)
    assert all(shelf.add(context, 10.0) for context in (1, 2, 3))
    assert shelf.touch(1)
    assert shelf.add(4, 10.0)
    assert list(shelf.held) == [3, 1, 4]
    assert shelf.add(5, 20.0, {3: 1})
    assert list(shelf.held) == [3, 5]
    assert not shelf.add(6, 20.0, {3: 1, 5: 1})
    assert shelf.used == 30.0


def test_a_replica_that_joins_takes_its_part_and_moves_nothing_else() -> None:
    few, more = orders(5000, 4)[:, 0], orders(5000, 5)[:, 0]
    moved = few != more
    assert set(more[moved]) == {4}
    assert moved.mean() == pytest.approx(1 / 5, abs=0.03)
    assert np.bincount(few).min() > 1100


def test_who_has_too_much_passes_requests_on() -> None:
    replicas = [Replica(str(number)) for number in range(4)]
    order = [2, 0, 3, 1]
    assert choose(order, replicas, 0, 1.25, 4, 1) == 2
    replicas[2].load = 6
    assert choose(order, replicas, 6, 1.25, 4, 1) == 0
    assert choose(order, replicas, 6, 1.25, 8, 1) == 2  # it can run more
    assert choose(order, replicas, 6, 1.25, 8, 2) == 0  # which holds it, too
    replicas[0].up = False
    assert choose(order, replicas, 6, 1.25, 4, 1) == 3
    for replica in replicas:
        replica.up = False
    assert choose(order, replicas, 6, 1.25, 4, 1) == -1


@pytest.mark.parametrize("part", [1, 7, 50])
def test_a_part_has_its_part_of_contexts_and_requests(part: int) -> None:
    load = Load(rate=1000.0, contexts=20_000, sigma=0.0)
    found = sample(load, part, np.random.default_rng(0))
    assert found.rates_C.sum() == pytest.approx(load.rate / part)
    assert len(found.rates_C) == pytest.approx(HEAD + (load.contexts - HEAD) / part, abs=1)
    assert (np.diff(found.rates_C[HEAD:-1]) <= 0).all()
    assert set(found.tokens_C) == {load.tokens}


def test_parts_of_two_sizes_agree() -> None:
    fleet, load = Fleet(replicas=100), Load(rate=1e4, contexts=100_000)
    small, large = (plan.run(fleet, load, part, 4.0) for part in (10, 5))
    assert small["device"] == pytest.approx(large["device"], abs=0.04)
    assert small["use_host"] == pytest.approx(large["use_host"], rel=0.3)
    assert small["p50_s"] == pytest.approx(large["p50_s"], rel=0.3)


def test_a_recorded_run_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"at_s": 0.5 * number, "context": number % 2, "first_s": 0.1, "end_s": 0.2, "hit": True}
        for number in range(50)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    figures = {"contexts": 2, "tokens": 10, "context_bytes": 10, "device": 25, "sessions": 4, "answer": 10}
    times = {"host_rate": 100.0, "step_s": 0.01, "token_s": 0.0, "prompt_s": 0.09}
    (tmp_path / "figures.json").write_text(json.dumps({**figures, **times}))
    plan.compare(tmp_path)
    measured, predicted = map(json.loads, capsys.readouterr().out.splitlines())
    assert (measured["hits"], measured["p50_s"]) == (1.0, 0.1)
    assert predicted["hits"] == 1.0
    assert predicted["p50_s"] == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(40))
def test_requests_go_where_the_service_sends_them(seed: int) -> None:
    """The rule is computed from hashes in arrays here, so it is held to the service's own."""
    draws = np.random.default_rng(seed)
    count, sessions, holders = int(draws.integers(1, 9)), int(draws.integers(1, 9)), int(draws.integers(1, 4))
    loads = [int(load) for load in draws.integers(0, 30, count)]
    up = [bool(one) for one in draws.random(count) < 0.8]
    router = Router()
    router.update(
        Member(str(number), "", sessions=sessions, load=load, draining=not up[number])
        for number, load in enumerate(loads)
    )
    router._demands["a"] = _Demand(0, holders, math.inf)
    order = [int(name) for name in order_of("a", map(str, range(count)))]
    replicas = [Replica(str(number), load, up[number]) for number, load in enumerate(loads)]
    total = sum(load for load, one in zip(loads, up, strict=True) if one)
    found = router.take(Wanted("a"))
    assert choose(order, replicas, total, BOUND, sessions, holders) == (
        -1 if found is None else int(found.name)
    )
