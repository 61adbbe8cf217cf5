"""Writers and readers of one bucket, killed at random moments, and what they leave to those who come next."""

from __future__ import annotations

import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from index_store.objects.records import content_key, look
from index_store.objects.tier import Tier
from tests.index_store.objects import site_process
from tests.index_store.objects.site_process import book, site, work
from tests.support.forking import start
from tests.support.waiting import wait_until

SITES = {"first writer": range(4), "second writer": range(2, 6), "first reader": (), "second reader": ()}


def killed_at_random(tmp_path: Path, kills: int, seed: int) -> None:
    url = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    draws = random.Random(seed)

    def begin(name: str) -> ForkServerProcess:
        return start(work, tmp_path / name, url, SITES[name])

    def written() -> set[str]:
        return {id_ for path in tmp_path.glob("*/written") for id_ in path.read_text().split()}

    running = {name: begin(name) for name in SITES}
    try:
        for _ in range(kills):
            time.sleep(draws.uniform(0.05, 0.6))
            name = draws.choice([*SITES])
            running[name].kill()
            running[name].join()
            assert running[name].exitcode == -signal.SIGKILL
            running[name] = begin(name)
        wait_until(lambda: len(written()) == 6)
    finally:
        for process in running.values():
            process.kill()
            process.join()
    assert_alike(tmp_path, url)


def assert_alike(tmp_path: Path, url: str) -> None:
    """All stores come to hold all contexts, whole."""
    sites = [site(tmp_path / name, url) for name in SITES]
    wanted = {book(seed).id for seed in range(6)}
    for _ in range(20):
        looked = [site_process.look(courier) for _, courier in sites]
        # Whoever looks last may upload what the others looked for before.
        if all(looked) and all({each.id for each in store.list()} == wanted for store, _ in sites):
            break
    for name, (store, courier) in zip(SITES, sites, strict=True):
        assert not (tmp_path / name / "problems").exists()
        assert courier.state() == type(courier.state())()
        assert {each.id for each in store.list()} == wanted
        for id_ in wanted:
            store.bring(id_)
            assert store.verify(id_) == []
    held = look(Tier.of(sites[0][0]).bucket)
    assert held.keys() == wanted
    assert {key for each in held.values() for key in each.contents} == {
        content_key(sites[0][0].manifest(id_)) for id_ in wanted
    }
    assert not any(each.deleted or each.old for each in held.values())


def test_a_few_kills(tmp_path: Path) -> None:
    killed_at_random(tmp_path, kills=6, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 3))
def test_fifty_kills(tmp_path: Path, seed: int) -> None:
    killed_at_random(tmp_path, kills=50, seed=seed)
