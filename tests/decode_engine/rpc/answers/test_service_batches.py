"""Many requests on one context in one call."""

from __future__ import annotations

import asyncio

import pytest

from decode_engine.errors import CancelledError, PromptTooLongError
from decode_engine.rpc.client import AsyncClient, Client, GenerateOptions
from decode_engine.rpc.server import DecodeServer
from index_store.errors import ContextNotFoundError, InvalidArgumentError
from sparsekv.v1 import generation_pb2
from tests.decode_engine.conftest import Stubs
from tests.support.serving.service import ABSENT, fails, wait_until


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


def test_requests_fail_one_by_one(client: Client, lamp: str) -> None:
    requests: list[GenerateOptions] = [
        {"text": "Who?", "max_tokens": 3},
        {"text": "Who?", "max_tokens": -1},
        {"text": "word " * 6000, "max_tokens": 3},
        {"text": "Who?", "max_tokens": 3, "n": 2, "temperature": 1.0},
        {"text": "Who?", "regex": "("},
    ]
    with client.batch_generate(lamp, requests) as batch:
        items = {item.index: item for item in batch}
    assert [type(items[number].error) for number in range(5)] == [
        type(None),
        InvalidArgumentError,
        PromptTooLongError,
        type(None),
        InvalidArgumentError,
    ]
    error = items[1].error
    assert error is not None
    assert error.metadata["field"] == "max_tokens"
    assert [len(ids) for ids in items[3].token_ids] == [3, 3]
    assert len(items[3].summaries) == 2


def test_cancelling_a_batch_ends_all_of_its_requests(client: Client, lamp: str) -> None:
    requests: list[GenerateOptions] = [{"text": "Who?", "max_tokens": 3000} for _ in range(30)]
    batch = client.batch_generate(lamp, [{"text": "Who?", "max_tokens": 2}, *requests])
    assert next(iter(batch)).index == 0
    assert client.server_status().requests > 0
    batch.cancel()
    wait_until(lambda: client.server_status().requests == 0, seconds=60)
    with pytest.raises(CancelledError):
        list(batch)


def test_what_is_wrong_with_the_batch_ends_the_call(stubs: Stubs, client: Client, lamp: str) -> None:
    one = generation_pb2.GenerateRequest(text="Who?", max_tokens=1)
    for request, field in (
        (generation_pb2.BatchGenerateRequest(context=lamp), "requests"),
        (generation_pb2.BatchGenerateRequest(context=lamp, requests=[one] * 1001), "requests"),
        (generation_pb2.BatchGenerateRequest(context="lamp", requests=[one]), "context"),
    ):
        _, info, message = fails(lambda request=request: stubs.generations.BatchGenerate(request))  # type: ignore[misc]
        assert (info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", field)
        assert "expected" in message
    named = generation_pb2.GenerateRequest(context=lamp, text="Who?")
    [response] = stubs.generations.BatchGenerate(
        generation_pb2.BatchGenerateRequest(context=lamp, requests=[named])
    )
    assert "expected it in the batch alone" in response.error.message
    [item] = client.batch_generate(ABSENT, [{"text": "Who?"}])
    assert isinstance(item.error, ContextNotFoundError)


def test_coroutines_read_batches_and_texts_in_the_same_way(
    server: DecodeServer, client: Client, lamp: str
) -> None:
    requests: list[GenerateOptions] = [
        {"text": "Who lit it?", "max_tokens": 5},
        {"text": "W", "max_tokens": 3},
    ]
    expected = {item.index: item.token_ids for item in client.batch_generate(lamp, requests)}

    async def run() -> None:
        async with AsyncClient(server.address) as other:
            async with other.batch_generate(lamp, requests) as batch:
                assert {item.index: item.token_ids async for item in batch} == expected
            cut = await other.tokenize("Who lit it?")
            assert cut == client.tokenize("Who lit it?")
            assert await other.count_tokens("Who lit it?") == len(cut.ids)
            assert await other.detokenize(cut.ids) == "Who lit it?"
            several = other.generate(lamp, text="Who?", max_tokens=3, n=2, temperature=1.0)
            assert len(await several.read_all()) == 2

    asyncio.run(run())
