"""Answers over gRPC: several at once, in batches, under constraints, by seeds, and by which method."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from decode_engine.errors import CancelledError
from decode_engine.model import method_choice
from decode_engine.model.method_choice import StepTime
from decode_engine.orders.events import Waits
from decode_engine.rpc.answers.answering import Inbox
from decode_engine.rpc.client import Client, GenerateOptions, Summary
from decode_engine.rpc.server import DecodeServer
from index_store.errors import ContextCorruptError, InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.store.catalog import TunedDefault
from tests.decode_engine.conftest import Library
from tests.support.serving.service import answered, leases, loaded, wait_until


def test_sixteen_streams_at_once_equal_one_at_a_time(server: DecodeServer, client: Client, lamp: str) -> None:
    def run(number: int) -> str:
        method = ("full", "csattention", "csattention-paper")[number % 3]
        prompt = f"{number} " * (number + 1)
        return client.generate(
            lamp, text=prompt, max_tokens=16, method=method, temperature=0.5, seed=number
        ).read()

    alone = [run(number) for number in range(16)]
    loads = server.backend.arena.stats().loads
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(run, range(16)))
    assert together == alone
    wait_until(lambda: leases(server) == 0)
    assert server.backend.arena.stats().loads == loads, "the context is shared, not loaded per session"


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_cancellation_that_comes_with_events_is_not_lost(timeout_s: float | None) -> None:
    """Or a request of a batch would go on, and wait for its items to be read by nobody."""

    async def run() -> None:
        inbox = Inbox()
        task = asyncio.ensure_future(inbox.wait(timeout_s))
        await asyncio.sleep(0.01)
        inbox.put([Waits("")])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_more_requests_than_places_are_all_answered_as_alone(client: Client, lamp: str) -> None:
    requests = [
        GenerateOptions(text=f"Ship number {number} came", max_tokens=4 + number % 3) for number in range(40)
    ]
    with client.batch_generate(lamp, requests) as batch:
        items = {item.index: item for item in batch}
    assert sorted(items) == list(range(40))
    for number in (0, 17, 39):
        alone = client.generate(lamp, **requests[number])
        pieces = list(alone)
        assert items[number].texts == ("".join(piece.text for piece in pieces),)
        assert items[number].token_ids == (tuple(id_ for piece in pieces for id_ in piece.token_ids),)
        assert items[number].summaries[0].completion_tokens == 4 + number % 3
        assert items[number].error is None


def test_cancelling_a_batch_ends_all_of_its_requests(client: Client, lamp: str) -> None:
    requests: list[GenerateOptions] = [{"text": "Who?", "max_tokens": 3000} for _ in range(30)]
    batch = client.batch_generate(lamp, [{"text": "Who?", "max_tokens": 2}, *requests])
    assert next(iter(batch)).index == 0
    assert client.server_status().requests > 0
    batch.cancel()
    wait_until(lambda: client.server_status().requests == 0, seconds=60)
    with pytest.raises(CancelledError):
        list(batch)


PROMPT = "Who lit the lamp of the grey harbour?"
SCHEMA = {
    "type": "object",
    "properties": {
        "lit": {"type": "boolean"},
        "ships": {"type": "integer", "minimum": 3, "maximum": 99},
        "keepers": {"type": "array", "items": {"enum": ["Ada", "Émile"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["lit", "ships", "keepers"],
    "additionalProperties": False,
}


def test_sessions_with_and_without_constraints_share_a_batch(client: Client, lamp: str) -> None:
    def ask(constrained: bool) -> str:
        options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 120} if constrained else {}
        return client.generate(lamp, text=PROMPT, **{"max_tokens": 40, **options}).read()

    alone = {constrained: ask(constrained) for constrained in (True, False)}
    before = client.server_status()
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, [True, False] * 4))
    after = client.server_status()
    assert together == [alone[True], alone[False]] * 4
    assert after.decode_tokens - before.decode_tokens > 1.5 * (after.decode_steps - before.decode_steps)


def test_what_would_take_for_ever_is_refused_and_harms_nobody(
    client: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = client.generate(lamp, text=PROMPT, max_tokens=20).read()
    hostile = {"type": "integer", "multipleOf": 99_999_989}
    with ThreadPoolExecutor(2) as threads, monkeypatch.context() as patch:
        patch.setattr("decode_engine.engine.sampling.constraints._TRIAL_S", 2.0)
        refused = threads.submit(client.generate(lamp, text=PROMPT, json_schema=hostile).read)
        assert client.generate(lamp, text=PROMPT, max_tokens=20).read() == expected
        with pytest.raises(InvalidArgumentError, match="too complex"):
            refused.result()
    assert client.generate(lamp, text=PROMPT, regex="[ab]").read() in "ab"


@pytest.mark.parametrize("method", ["full", "csattention"])
def test_every_answer_is_that_of_its_own_seed_alone(client: Client, lamp: str, method: str) -> None:
    with client.generate(
        lamp, text=PROMPT, max_tokens=12, temperature=1.5, seed=7, n=4, method=method
    ) as several:
        pieces = list(several)
    answers = [
        tuple(id_ for piece in pieces if piece.index == index for id_ in piece.token_ids)
        for index in range(4)
    ]
    assert len(set(answers)) == 4
    assert several.usage.completion_tokens == 48
    for answer, summary in zip(answers, several.summaries, strict=True):
        assert summary.completion_tokens == 12
        assert summary.prompt_tokens == several.summary.prompt_tokens
        with client.generate(
            lamp, text=PROMPT, max_tokens=12, temperature=1.5, seed=summary.seed, method=method
        ) as alone:
            assert tuple(id_ for piece in alone for id_ in piece.token_ids) == answer
        assert alone.summary.selection == summary.selection
    assert several.summary.seed == 7


def test_prompt_log_probabilities_are_those_of_feeding_it(client: Client, lamp: str) -> None:
    ids = client.tokenize(PROMPT).ids
    reading = client.generate(
        lamp, token_ids=ids, max_tokens=1, method="full", prompt_logprobs=True, top_logprobs=2
    )
    list(reading)
    assert [each.token_id for each in reading.prompt_logprobs] == list(ids[1:])
    for place in (1, len(ids) // 2, len(ids) - 1):
        asked = client.generate(lamp, token_ids=ids[:place], max_tokens=1, method="full", top_logprobs=20)
        [only] = [each for piece in asked for each in piece.logprobs]
        by_id = {other.token_id: other.logprob for other in only.alternatives}
        own = reading.prompt_logprobs[place - 1]
        assert own.alternatives[0].token_id == only.token_id
        assert own.alternatives[0].logprob == pytest.approx(only.logprob, abs=1e-4)
        if own.token_id in by_id:
            assert own.logprob == pytest.approx(by_id[own.token_id], abs=1e-4)


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
    return answered(client, context, text="Who?", max_tokens=4, **arguments)[1]


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
