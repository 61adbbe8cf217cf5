"""How long a server takes to say that there is no context tells nobody whether another tenant has it.

Probes of a foreign id and of an absent one go in an order that is drawn, over one connection. What is compared is their
ranks (Mann and Whitney's U), which no outlier moves.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

import pytest

from tests.decode_engine.rpc.isolation.conftest import House
from tests.decode_engine.rpc.isolation.test_isolation import (
    ABSENT,
    ABSENT_NAME,
    WAYS,
    context,
    found,
    grpc_told,
)
from tests.support.waiting import wait_until

_MOST_Z = 4.0
"""Of a thousand tests of two equal samples less than one in ten passes this."""
PROBES: dict[str, Callable[[House, bool], object]] = {
    "gRPC: get": lambda house, foreign: WAYS["gRPC: get by id"](
        house["beta"], house.secret if foreign else ABSENT
    ),
    "gRPC: ask": lambda house, foreign: WAYS["gRPC: ask by tokens"](
        house["beta"], house.secret if foreign else ABSENT
    ),
    "gRPC: delete": lambda house, foreign: WAYS["gRPC: delete"](
        house["beta"], house.secret if foreign else ABSENT
    ),
    "gRPC: name": lambda house, foreign: grpc_told(
        lambda: found(house["beta"], reference="secret" if foreign else ABSENT_NAME)
    ),
    "HTTP: get": lambda house, foreign: WAYS["HTTP: get by id"](
        house["beta"], house.secret if foreign else ABSENT
    ),
}


def z_of(ones: Sequence[float], others: Sequence[float]) -> float:
    """How far the ranks of two samples are apart, in standard deviations of what chance does."""
    ranked = sorted([(each, 0) for each in ones] + [(each, 1) for each in others])
    below = sum(rank for rank, (_, side) in enumerate(ranked, 1) if side == 0)
    n, m = len(ones), len(others)
    return (below - n * (n + m + 1) / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def probe(house: House, way: str, count: int) -> float:
    """z of the times of so many probes a side."""
    ask = PROBES[way]
    drawn = random.Random(1)
    order = [True, False] * count
    for foreign in order[:20]:
        ask(house, foreign)
    drawn.shuffle(order)
    times: dict[bool, list[float]] = {True: [], False: []}
    for foreign in order:
        before = time.perf_counter()
        ask(house, foreign)
        times[foreign].append(time.perf_counter() - before)
    return z_of(times[True], times[False])


def test_the_measure_finds_a_difference_and_none_where_there_is_none() -> None:
    drawn = random.Random(0)
    ones, others = ([drawn.gauss(1, 0.1) for _ in range(1000)] for _ in range(2))
    assert abs(z_of(ones, others)) < _MOST_Z
    assert z_of([each + 0.03 for each in ones], others) > _MOST_Z  # a third of the spread


def test_a_foreign_context_is_not_read_when_it_is_asked_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time with a context, the file system, is not asked about one that is another tenant's."""
    store = house.server.grpc.store
    asked: list[str] = []
    read = type(store._listing)._read
    monkeypatch.setattr(
        type(store._listing), "_read", lambda self, id_, known: (asked.append(id_), read(self, id_, known))[1]
    )
    house["acme"].client.get_context(context(house.secret))
    assert house.secret in asked
    wait_until(
        lambda: store.list() and store._listing._known[house.secret].stamp is not None
    )  # it lies still
    asked.clear()
    for way in (
        "gRPC: get by id",
        "gRPC: delete",
        "gRPC: warm",
        "gRPC: rename",
        "gRPC: ask by tokens",
        "HTTP: get by id",
        "HTTP: complete",
    ):
        WAYS[way](house["beta"], house.secret)
    assert house.secret not in asked


@pytest.mark.parametrize("way", ["gRPC: get"])
def test_a_foreign_id_takes_as_long_as_an_absent_one(house: House, way: str) -> None:
    """In short; where others use the cores, a second try is not the same chance."""
    assert min(abs(probe(house, way, 150)) for _ in range(2)) < _MOST_Z


@pytest.mark.nightly
@pytest.mark.parametrize("way", PROBES)
def test_a_thousand_probes_a_side_tell_nothing(house: House, way: str) -> None:
    z = probe(house, way, 1000)
    assert abs(z) < _MOST_Z, f"{way}: z {z:+.2f} of 1,000 probes a side"
