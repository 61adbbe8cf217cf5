"""Beginnings that come again become contexts by themselves, within a bound, and nothing half of them is ever there."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_engine.core import housekeeping
from decode_engine.core.housekeeping import KeepingRules, KeptBeginnings, stored_bytes
from decode_engine.rpc.client import Client, Keep, Summary
from decode_engine.rpc.contexts.creation import Workshop
from decode_engine.rpc.server import DecodeServer
from index_store.errors import QuotaExceededError
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobRecord
from index_store.methods.default import DEFAULT_METHOD
from index_store.models.conversation.messages import Message, Role
from index_store.store.catalog import Store
from index_store.store.clean_up import KEPT_BEGINNING
from tests.decode_engine.conftest import Library, make_library
from tests.support.serving.serve_process import Server
from tests.support.serving.service import answered, wait_until

TOKENS = 512
MOST_BYTES = 2**26


@pytest.fixture
def shop(tmp_path: Path) -> Library:
    return make_library(tmp_path)


class Kept:
    """A server that keeps beginnings, and a worker that works when it is told to."""

    def __init__(self, shop: Library, **changes: object) -> None:
        settings = {"keep_beginnings": TOKENS, "keep_beginnings_bytes": MOST_BYTES, **changes}
        self.server = DecodeServer(shop.config(**settings))
        self.server.load()
        self.client = Client(self.server.address)
        self.store = Store(shop.store)
        self.queue = JobQueue(shop.store)
        self._worker = shop.worker()

    def ask(self, **prompt: Any) -> tuple[list[int], Summary]:
        """The answer, once what it makes of its beginning is queued."""
        found = answered(self.client, **{"max_tokens": 4, **prompt})
        self.server.backend.beginnings.settle()
        return found

    def work(self) -> int:
        """Has the worker do all that is queued; how many jobs there were."""
        jobs = sum(entry.open for entry in self.queue.entries())  # type: ignore[union-attr]
        while self._worker.work_once():
            pass
        return jobs

    def kept(self) -> dict[str, int]:
        """Tokens of the contexts that were kept, by id."""
        return {each.id: each.token_count for each in self.store.list() if KEPT_BEGINNING in each.labels}

    def found(self, text: str) -> str:
        """The id of the context that a text begins with; "" without one."""
        ground, _ = self.server.backend.beginning(list(self.client.tokenize(text).ids))
        return ground.named.id if ground.named.token_count else ""

    def close(self) -> None:
        self.client.close()
        self.server.stop(0.0)


@pytest.fixture
def keeping(shop: Library) -> Iterator[Kept]:
    kept = Kept(shop)
    yield kept
    kept.close()


def document(seed: int, characters: int) -> str:
    """A text that shares no beginning with others."""
    return "".join(random.Random(seed).choices("abcdefghij klmnopqrst ", k=characters))


def test_a_beginning_that_comes_again_becomes_a_context(keeping: Kept) -> None:
    text = document(1, 1100)
    for count, tail in enumerate(("One", "Two"), 1):
        tokens, summary = keeping.ask(text=text + tail)
        assert (summary.context, summary.cached_tokens) == ("", 0)
        assert keeping.work() == count - 1
    ((id_, tokens_kept),) = keeping.kept().items()
    assert tokens_kept == 1024  # whole blocks of what both have
    found, summary = keeping.ask(text=text + "Two")
    assert (summary.context, summary.cached_tokens) == (f"contexts/{id_}", 1024)
    assert found == tokens
    (shown,) = keeping.client.list_contexts(labels={KEPT_BEGINNING: "automatic"})
    assert (shown.name, shown.default_method) == (f"contexts/{id_}", "full")
    assert shown.display_name.startswith("beginning-")
    status = keeping.client.server_status()
    assert (status.plain_requests, status.found_beginnings, status.found_tokens) == (3, 1, 1024)
    assert (status.kept_beginnings, status.removed_beginnings) == (1, 0)
    keeping.client.delete_context(shown.name)
    for tail in ("Three", "Four", "Five"):  # whoever deleted it does not want it back
        assert keeping.ask(text=text + tail)[1].cached_tokens == 0
    assert keeping.work() == 0


def test_what_is_short_or_comes_once_is_not_kept(keeping: Kept) -> None:
    for seed in range(5):
        keeping.ask(text=document(seed, 900))
        keeping.ask(text=document(9, 500) + str(seed))
    assert (keeping.work(), keeping.kept()) == (0, {})


def test_a_context_that_is_named_is_no_beginning(keeping: Kept, shop: Library) -> None:
    stored = shop.prefill("named", method=("full",))
    for tail in ("One", "Two", "Three"):
        keeping.ask(context=f"contexts/{stored}", text=document(1, 700) + tail)
    assert keeping.work() == 0
    assert keeping.client.server_status().plain_requests == 0


def test_tenants_count_for_themselves_and_what_is_kept_is_theirs(keeping: Kept) -> None:
    """What one asks again becomes no other one's context, and makes no other one's prompt come again."""
    backend, ids = keeping.server.backend, [each % 250 + 1 for each in range(600)]
    for tenant in ("acme", "beta", ""):
        backend.beginnings.note(ids, backend.nothing.named, 0, tenant)
    backend.beginnings.settle()
    assert keeping.work() == 0
    backend.beginnings.note(ids, backend.nothing.named, 0, "acme")
    backend.beginnings.settle()
    assert keeping.work() == 1
    (kept,) = keeping.store.list()
    assert (kept.tenant, kept.token_count) == ("acme", 512)
    for tenant, found in (("acme", kept.id), ("beta", ""), ("", "")):
        ground, missed = backend.beginning(ids, tenant)
        assert (ground.named.id if ground.named.token_count else "") == found
        assert missed.context == ""


def test_nothing_is_kept_unasked(shop: Library) -> None:
    kept = Kept(shop, keep_beginnings=0)
    for tail in ("One", "Two", "Three"):
        kept.ask(text=document(1, 900) + tail)
    assert (kept.work(), kept.client.server_status().plain_requests) == (0, 3)
    kept.close()


def test_long_ones_get_the_indexes_of_the_default_method(
    keeping: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "_INDEXED_TOKENS", 1024)
    for tail in ("One", "Two"):
        keeping.ask(text=document(1, 1100) + tail)
    keeping.work()
    assert keeping.ask(text=document(1, 1100), method=DEFAULT_METHOD)[1].cached_tokens == 1024


@pytest.mark.parametrize("methods", [("full",), (DEFAULT_METHOD,)])
def test_estimates_are_no_less_than_what_is_stored(shop: Library, methods: tuple[str, ...]) -> None:
    stored = Store(shop.store).manifest(shop.prefill("it", text=document(1, 700), method=methods))
    held = sum(array.nbytes for array in stored.arrays)
    estimate = stored_bytes(stored.model, stored.dtype, stored.token_count, methods)
    assert held <= estimate <= 1.3 * held


def test_the_bound_is_kept_and_those_not_used_for_longest_go(shop: Library, keeping: Kept) -> None:
    backend = keeping.server.backend
    one = stored_bytes(backend.runner.identity, backend.runner.kv_dtype, TOKENS, ("full",))
    keeping.close()
    keeping = Kept(shop, keep_beginnings_bytes=2 * one)
    texts = [document(seed, 600) for seed in range(4)]

    def keep(number: int) -> list[bool]:
        """Has a beginning come twice; which of all are kept then."""
        for tail in ("One", "Two"):
            keeping.ask(text=texts[number] + tail)
        keeping.work()
        kept = [each for each in keeping.store.list() if KEPT_BEGINNING in each.labels]
        assert sum(array.nbytes for each in kept for array in each.arrays) <= 2 * one
        return [bool(keeping.found(text)) for text in texts]

    assert keep(0) == [True, False, False, False]
    assert keep(1) == [True, True, False, False]
    assert keeping.ask(text=texts[0] + "Three")[1].cached_tokens == TOKENS
    assert keep(2) == [True, False, True, False]  # the second one was not used since
    keeping.client.update_context(f"contexts/{keeping.found(texts[0])}", pinned=True)
    keeping.ask(context=f"contexts/{keeping.found(texts[2])}", text="More", keep=Keep("child"))
    assert keep(3) == [True, False, True, False]  # neither a pinned one nor a parent goes
    assert keeping.client.server_status().removed_beginnings == 1
    keeping.close()


def test_one_that_is_in_use_stays(shop: Library, keeping: Kept) -> None:
    text, backend = document(1, 600), keeping.server.backend
    for tail in ("One", "Two"):
        keeping.ask(text=text + tail)
    keeping.work()
    id_ = keeping.found(text)
    most = 2 * stored_bytes(backend.runner.identity, backend.runner.kv_dtype, TOKENS, ("full",))
    other = KeptBeginnings(backend.workshop, backend.arena, KeepingRules(TOKENS, 2, most))
    with backend.arena.acquire(keeping.store, id_):
        assert not other._make_room(most - 1000)
    assert other._make_room(most - 1000)
    assert keeping.kept() == {}
    other.close()


class Running:
    """`serve` as a process of its own, which makes what it keeps itself, so that it can be killed."""

    def __init__(self, shop: Library, *options: str) -> None:
        self._server = Server(
            shop.store, shop.model, "--no-warm-up", "--prefill", "--device", "cpu", *options
        )
        self.client = Client(self._server.wait_until_served()["address"])
        wait_until(self.client.is_serving)

    def kill(self) -> None:
        """Ends it as no handler can notice."""
        self.client.close()
        self._server.kill()
        assert "Traceback" not in str((self._server.logs, self._server.other))


def converse(shop: Library, conversations: int, kills: int, *options: str) -> dict[str, float]:
    """What conversations of ten turns with one system prompt take, the server killed after some of the turns."""
    store, queue, server = Store(shop.store, create=True), JobQueue(shop.store), Running(shop, *options)
    deaths = random.Random(1).sample(range(10 * conversations), kills)
    figures = {"read": 0, "stored": 0, "most_held": 0}
    messages, first, kept, seen = list[Message](), list[float](), set[str](), set[str]()
    try:
        for turn in range(10 * conversations):
            if turn % 10 == 0:
                messages = [Message(Role.SYSTEM, document(7, 400))]
            messages += [Message(Role.USER, f"{document(1000 + turn, 120)}?")]
            begun = time.monotonic()
            with server.client.generate(messages=messages, max_tokens=4) as generation:
                said = next(pieces := iter(generation)).text
                first.append(time.monotonic() - begun)
                said += "".join(piece.text for piece in pieces)
            messages += [Message(Role.ASSISTANT, said or " ")]
            figures["read"] += generation.summary.prompt_tokens
            figures["stored"] += generation.summary.cached_tokens
            if turn in deaths:
                server.kill()
                server = Running(shop, *options)
            wait_until(lambda: not any(entry.open for entry in queue.entries()))  # who talks reads first
            found = {each.id: each for each in store.list() if KEPT_BEGINNING in each.labels}
            held = sum(array.nbytes for each in found.values() for array in each.arrays)
            figures["most_held"] = max(figures["most_held"], held)
            kept, seen = set(found), seen | set(found)
    finally:
        server.kill()
    assert all(not store.verify(each.id) for each in store.list())
    return {**figures, "removed": len(seen - kept), "first_token_ms": 1000 * statistics.median(first)}


@pytest.mark.nightly
def test_a_hundred_conversations_within_a_bound(tmp_path: Path) -> None:
    """On a server that is killed in between: less is read, sooner answered, and the bound holds."""
    off = converse(make_library(tmp_path / "off"), 100, 0)
    keeping = ("--keep-beginnings", "256", "--keep-beginnings-bytes", str(2**23))
    on = converse(make_library(tmp_path / "on"), 100, 8, *keeping)
    sys.stdout.write(f"{json.dumps({'off': off, 'on': on})}\n")
    assert (off["stored"], on["read"] < 0.7 * off["read"]) == (0, True)
    assert 2**22 < on["most_held"] <= 2**23
    assert on["removed"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["ordered", "begun", "made"])
def test_a_server_that_is_killed_leaves_nothing_half(shop: Library, moment: str) -> None:
    """Its order is there and is worked on by the next one, or its context is."""
    text, store, queue = document(1, 3000), Store(shop.store), JobQueue(shop.store)
    server = Running(shop, "--keep-beginnings", "512")
    for tail in ("One", "Two"):
        server.client.generate(text=text + tail, max_tokens=2).read()
    wait_until(lambda: bool(queue.entries()))
    if moment == "begun":
        wait_until(lambda: not queue.entries() or queue.held(queue.entries()[0].id) or bool(store.list()))
    if moment == "made":
        wait_until(lambda: bool(store.list()))
    server.kill()
    assert all(not store.verify(each.id) for each in store.list())
    again = Kept(shop)
    wait_until(lambda: again.work() == 0)
    ((id_, tokens),) = again.kept().items()
    assert again.ask(text=text + "Three")[1].cached_tokens == tokens == 2816
    assert store.verify(id_) == []
    again.close()


def test_a_beginning_that_was_refused_is_tried_again_by_the_next_request(
    shop: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order, refusals = Workshop.order, [1]

    def refused(self: Workshop, *given: Any) -> JobRecord:
        if refusals.pop():
            refusals.append(0)
            raise QuotaExceededError.of("stored_bytes", 1, 1, 1)
        refusals.append(0)
        return order(self, *given)

    monkeypatch.setattr(Workshop, "order", refused)
    kept = Kept(shop)
    for jobs in (0, 0, 1, 1):
        kept.ask(text="The tide came in. " * 60)
        assert sum(entry.open for entry in kept.queue.entries()) == jobs  # type: ignore[union-attr]
    assert caplog.text.count("is not kept: ") == 1
    kept.client.close()
    kept.server.stop(0.0)
