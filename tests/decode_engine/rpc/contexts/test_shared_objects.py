"""Two workers write contexts into one object store, two servers answer about them, one is killed at random moments.

Each process has a store of its own. Every answer is that of a server which has the context on its local disk.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from decode_engine.rpc.client import Client
from index_store.errors import ContextExpiredError, ContextNotFoundError, SparseKVError
from index_store.objects.bucket import Bucket
from index_store.objects.courier import Courier
from index_store.objects.records import look
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from tests.decode_engine.conftest import Library, make_library
from tests.index_store.objects.test_s3 import bucket, endpoint
from tests.support.forking import start
from tests.support.serving.service import loaded, wait_until

__all__ = ["bucket", "endpoint"]  # fixtures

ASK: Any = {"text": "\nWho?", "max_tokens": 4, "method": "csattention", "explain": True}
PATIENCE_S = 120.0

logger = logging.getLogger(__name__)


def text_of(number: int) -> str:
    draws = random.Random(number)
    return " ".join(draws.choice(("lamp", "keeper", "harbour", "ship", "snow")) for _ in range(120))


def write(library: Library, url: str, environment: Mapping[str, str], numbers: range) -> None:
    """A worker: has its contexts made and uploaded, some at a time, and goes on looking."""
    os.environ.update(environment)
    store = open_store(library.store, create=True, objects=url)
    courier = Courier(store, Tier.of(store), every_s=0.2)
    courier.start()
    for number in numbers:
        library.prefill(f"text {number}", text=text_of(number))
    (library.store / "written").touch()
    threading.Event().wait()


def answer(library: Library, url: str, environment: Mapping[str, str]) -> None:
    """A server that says where it listens, until it is killed. Its memory holds a few contexts at a time."""
    os.environ.update(environment)
    with loaded(library.config(objects=url, memory=2**22)) as server:
        place = library.store.parent / f"{library.store.name}.address"
        place.with_suffix(".new").write_text(server.address)
        place.with_suffix(".new").rename(place)
        threading.Event().wait()


class Asked:
    """What servers said, by context, and how long first tokens took, by where the context was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: dict[str, set[str]] = {}
        self.first_s: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def ask(self, address: str, name: str) -> None:
        with Client(address, timeout_s=PATIENCE_S) as client:
            begun = time.monotonic()
            with client.generate(name, **ASK) as generation:
                said = next(iter(generation), None)
                first_s = time.monotonic() - begun
                said_all = ("" if said is None else said.text) + generation.read()
                explanation = generation.summary.explanation
            self.first_s.setdefault(explanation.tier, []).append(first_s)
            self.answers.setdefault(name, set()).add(said_all)

    def keep_on(self, site: str, seed: int, stopped: threading.Event) -> None:
        """Asks a server about whatever it lists, however often that is killed."""
        draws = random.Random(seed)
        while not stopped.is_set():
            try:
                address = (self.folder / f"{site}.address").read_text()
                with Client(address, timeout_s=PATIENCE_S) as client:
                    names = [each.name for each in client.list_contexts()]
                for name in draws.sample(names, min(4, len(names))):
                    self.ask(address, name)
                    self.counts[site] += 1
            except (SparseKVError, OSError) as error:
                self.failures[f"{site}: {getattr(error, 'reason', type(error).__name__)}"] += 1
                stopped.wait(0.1)


@pytest.fixture
def running() -> Iterator[dict[str, ForkServerProcess]]:
    """Processes by name, which end with the test."""
    found: dict[str, ForkServerProcess] = {}
    yield found
    for process in found.values():
        process.kill()
        process.join()


def shared(
    tmp_path: Path,
    running: dict[str, ForkServerProcess],
    url: str,
    environment: Mapping[str, str],
    contexts: int,
    kills: int,
) -> None:
    library = make_library(tmp_path)
    begun = time.monotonic()

    def at(site: str) -> Library:
        return replace(library, store=tmp_path / site)

    def stores() -> list[Store]:
        return [Store(tmp_path / site) for site in ("one writer", "other writer", "one", "other")]

    def serve(site: str) -> None:
        (tmp_path / f"{site}.address").unlink(missing_ok=True)
        running[site] = start(answer, at(site), url, environment)

    halves = {"one writer": range(contexts // 2), "other writer": range(contexts // 2, contexts)}
    for site, numbers in halves.items():
        running[site] = start(write, at(site), url, environment, numbers)
    for site in ("one", "other"):
        serve(site)
    asked, stopped, draws = Asked(tmp_path), threading.Event(), random.Random(contexts)
    askers = [
        threading.Thread(target=asked.keep_on, args=(site, seed, stopped), daemon=True)
        for seed, site in enumerate(("one", "other"))
    ]
    for asker in askers:
        asker.start()
    for _ in range(kills):
        time.sleep(draws.uniform(0.1, 5.0))  # the moments are what is drawn
        running["other"].kill()
        running["other"].join()
        serve("other")
    wait_until(lambda: all((tmp_path / site / "written").exists() for site in halves), 900)
    wait_until(lambda: all(len(store.list()) == contexts for store in stores()), 300)
    before = asked.counts["other"]
    wait_until(lambda: asked.counts["other"] > before, 300)
    stopped.set()
    for asker in askers:
        asker.join()
    written_s = time.monotonic() - begun
    assert not {each for each in asked.failures if "CORRUPT" in each or "INTERNAL" in each}, asked.failures

    addresses = [(tmp_path / f"{site}.address").read_text() for site in ("one", "other")]
    names = sorted(each.id for each in Store(tmp_path / "one").list())
    tenth = contexts // 10
    deleted, expired, kept = names[:tenth], names[tenth : 2 * tenth], names[2 * tenth :]
    begun = time.monotonic()
    let_go(addresses, stores(), deleted, expired, {*expired, *kept})
    everywhere_s = time.monotonic() - begun
    for id_ in kept:
        for address in addresses:
            asked.ask(address, f"contexts/{id_}")
    os.environ.update(environment)
    held = look(Tier.of(open_store(tmp_path / "one", objects=url)).bucket)
    assert {id_ for id_, each in held.items() if not each.deleted} == {*expired, *kept}
    compare(asked, at, halves, kept)
    tiers = {tier: (len(each), round(statistics.median(each), 3)) for tier, each in asked.first_s.items()}
    logger.info(
        "%d contexts, %d kills: all at every site after %.0f s; deletions and expiries everywhere after %.1f s; "
        "answers %s, failures %s; first tokens by tier (count, median s): %s",
        contexts, kills, written_s, everywhere_s, dict(asked.counts), dict(asked.failures), tiers,
    )  # fmt: skip


def let_go(
    addresses: Sequence[str], stores: Sequence[Store], deleted: list[str], expired: list[str], there: set[str]
) -> None:
    """Deletes and ends contexts at the first server; returns when all servers and stores say so."""
    with Client(addresses[0], timeout_s=PATIENCE_S) as client:
        for id_ in deleted:
            client.delete_context(f"contexts/{id_}")
        for id_ in expired:
            client.update_context(f"contexts/{id_}", expire_time=datetime.now(UTC) + timedelta(seconds=1))
    for address in addresses:
        for id_ in deleted:
            wait_until(lambda: told(address, id_) is ContextNotFoundError)  # noqa: B023  called at once
        for id_ in expired:
            wait_until(lambda: told(address, id_) is ContextExpiredError)  # noqa: B023
    for store in stores:
        wait_until(lambda: {each.id for each in store.list()} == there)  # noqa: B023
        wait_until(lambda: all(store.expired(store.manifest(id_)) for id_ in expired))  # noqa: B023


def told(address: str, id_: str) -> type[SparseKVError] | None:
    """How a question about a context fails."""
    with Client(address, timeout_s=PATIENCE_S) as client:
        try:
            client.generate(f"contexts/{id_}", **ASK).read()
        except SparseKVError as error:
            return type(error)
    return None


def compare(
    asked: Asked, at: Callable[[str], Library], writers: Mapping[str, range], kept: list[str]
) -> None:
    """All answers about a context are those of its writer's own store."""
    known: dict[str, str] = {}
    for site in writers:
        with loaded(at(site).config()) as server, Client(server.address) as client:
            for id_ in kept:
                with suppress(SparseKVError):  # the other writer made it
                    known[id_] = client.generate(f"contexts/{id_}", **ASK).read()
    assert known.keys() == set(kept)
    for id_ in kept:
        assert asked.answers[f"contexts/{id_}"] == {known[id_]}


@pytest.mark.nightly
def test_two_hundred_contexts_in_a_folder_and_fifty_kills(
    tmp_path: Path, running: dict[str, ForkServerProcess]
) -> None:
    (tmp_path / "bucket").mkdir()
    shared(tmp_path, running, (tmp_path / "bucket").as_uri(), {}, contexts=200, kills=50)


@pytest.mark.nightly
def test_forty_contexts_in_s3_and_ten_kills(
    tmp_path: Path, running: dict[str, ForkServerProcess], bucket: Bucket
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    shared(tmp_path, running, bucket.url, environment, contexts=40, kills=10)
