"""Answers over gRPC: several at once, in batches, under constraints, and by seeds."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from decode_engine.errors import CancelledError
from decode_engine.orders.events import Waits
from decode_engine.rpc.answers.answering import Inbox
from decode_engine.rpc.client import Client, GenerateOptions
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError
from tests.support.serving.service import leases, wait_until


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
