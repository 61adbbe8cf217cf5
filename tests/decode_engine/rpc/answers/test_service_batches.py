"""Many requests on one context in one call."""

from __future__ import annotations

import pytest

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import Client, GenerateOptions
from tests.support.serving.service import wait_until


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
