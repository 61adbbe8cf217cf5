"""Methods over the real server: which there are, how requests choose one, what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from decode_engine.model import method_choice
from decode_engine.model.method_choice import StepTime
from decode_engine.rpc.client import Client, Summary
from decode_engine.rpc.server import DecodeServer
from index_store.errors import ContextCorruptError, InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.store.catalog import TunedDefault
from tests.decode_engine.conftest import Library
from tests.support.serving.service import loaded

REMAINDERS = {
    "csattention": "centred",
    "multipole": "monopole",
    "multipole-windowed": "monopole",
    "multipole-tree": "monopole",
    "refined": "coarse",
    "refined-3": "coarse",
}

Tune = Callable[..., None]

HERE = Placement.DEVICE


def summary_of(client: Client, context: str, **arguments: Any) -> Summary:
    """Of a short generation."""
    generation = client.generate(context, text="Who?", max_tokens=4, **arguments)
    generation.read()
    return generation.summary


def test_exact_says_what_full_says_and_how_much_was_drafted(client: Client, shelf: str) -> None:
    def ask(method: str) -> tuple[str, Summary]:
        generation = client.generate(shelf, text="Who? Who? Who?", max_tokens=60, method=method)
        return generation.read(), generation.summary

    (expected, full), (text, exact) = ask("full"), ask("exact")
    assert text == expected
    assert (exact.method, full.drafted_tokens) == ("exact", 0)
    assert exact.drafted_tokens >= exact.accepted_tokens > 0
    assert exact.timings.decode_steps == exact.completion_tokens - 1 - exact.accepted_tokens


@pytest.fixture
def timed(
    library: Library, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Client, Callable[[float], None]]]:
    """A server that chooses by time, and what says it: a step of the context's own method takes so much, one of full
    attention 1."""
    monkeypatch.setattr(method_choice, "_MOST_WANTED", 0)  # it times nothing itself
    with loaded(library.config(method="auto")) as server, Client(server.address) as client:
        costs = server.backend.costs

        def fill(own: float) -> None:
            costs.chosen.clear()
            costs.set({("full", HERE): _always(1.0), ("csattention 5.00%", HERE): _always(own)})

        yield client, fill


def _always(seconds: float) -> StepTime:
    return StepTime(seconds, 0.0, 0.0, 0.0)


def test_requests_that_leave_the_method_open_get_what_takes_less_time(
    lamp: str, timed: tuple[Client, Callable[[float], None]]
) -> None:
    client, fill = timed
    fill(2.0)
    chosen = summary_of(client, lamp)
    assert (chosen.method, chosen.budget) == ("full", "")
    tokens = client.get_context(lamp).token_count
    assert chosen.method_reason == (
        f"a step takes about 1000.0 ms, by csattention 5.00% 2000.0 ms ({tokens} tokens, sessions on the context: 1)"
    )
    named = summary_of(client, lamp, method="csattention")
    assert (named.method, named.method_reason) == ("csattention", "")
    for wish in ({"keep_ratio": 0.1}, {"search_period": 2}, {"seed": 1, "temperature": 1.0}):
        own = summary_of(client, lamp, **wish)
        assert own.method.startswith("csattention")
        assert own.method_reason.startswith("the context's own, as ")
    fill(0.5)
    assert summary_of(client, lamp, method="auto").method == "csattention"
    assert client.server_status().method_choices == (
        "csattention 5.00% instead of full (device): always with one session on a context, always with 16",
        "chosen so far: csattention 1",
    )


def test_a_keep_ratio_without_a_calibrated_threshold_is_refused_before_anything_is_loaded(
    server: DecodeServer, library: Library, client: Client
) -> None:
    name = "contexts/" + library.prefill("squeezed", method=("squeezed",))
    with pytest.raises(InvalidArgumentError, match="calibrated"):
        summary_of(client, name, method="squeezed", keep_ratio=0.9)
    assert name.removeprefix("contexts/") not in server.backend.arena.ids()


def record_path(server: DecodeServer, context: str) -> Path:
    return server.backend.store.path / "defaults" / f"{context.removeprefix('contexts/')}.json"


@pytest.fixture
def tune(server: DecodeServer, shelf: str) -> Iterator[Tune]:
    """Sets what the shelf was tuned to."""
    store, id_ = server.backend.store, shelf.removeprefix("contexts/")

    def tune_to(method: str, **budget: float | int) -> None:
        sizes: dict[str, Any] = {"keep": None, "mass": None, "tokens": None, **budget}
        record = TunedDefault(
            id_, method, **sizes, target="mass", wanted=0.9, reached={}, created_at=datetime.now(UTC)
        )
        store.set_default_method(id_, record)

    yield tune_to
    record_path(server, shelf).unlink()


def test_a_tuned_default_serves_requests_that_name_no_method(client: Client, shelf: str, tune: Tune) -> None:
    assert client.get_context(shelf).default_method == "full"
    tune("quest@period=2", tokens=7)
    context = client.get_context(shelf)
    assert (context.default_method, context.default_budget, context.tuned) == (
        "quest@period=2",
        "7 keys",
        True,
    )
    summary = summary_of(client, shelf)
    assert (summary.method, summary.budget, summary.remainder) == ("quest@period=2", "7 keys", "dropped")
    assert summary_of(client, shelf, keep_ratio=0.1).budget == "10.00%"
    named = summary_of(client, shelf, method="quest")
    assert (named.method, named.budget) == ("quest", "5.00%")


def test_a_tuned_default_that_cannot_be_used_is_passed_over(client: Client, shelf: str, tune: Tune) -> None:
    for method in ("guesswork", "csattention+dipole"):
        tune(method, keep=0.1)
        assert not client.get_context(shelf).tuned
        assert summary_of(client, shelf).method == "full"


def test_a_damaged_tuned_default_is_not_replaced_silently(
    server: DecodeServer, client: Client, shelf: str, tune: Tune
) -> None:
    tune("quest", keep=0.1)
    record_path(server, shelf).write_text("{")
    context = client.get_context(shelf)
    assert context in list(client.list_contexts())
    assert (context.state, context.default_method, context.default_budget) == ("READY", "", "")
    assert "the tuned default is damaged" in context.state_message
    with pytest.raises(ContextCorruptError, match=r"the tuned default is damaged.*name a method") as caught:
        summary_of(client, shelf)
    assert caught.value.metadata["cause"] == "TUNED_DEFAULT_INVALID"
    assert summary_of(client, shelf, method="full").method == "full"
