"""What doors of one server have together."""

from __future__ import annotations

import pytest

from decode_engine.rpc.contexts.listing import Pager
from decode_engine.rpc.door.access import FailedAttempts, Sharing
from decode_engine.rpc.transport.calls import Limits
from index_store.errors import InvalidArgumentError
from index_store.store.catalog import Store
from sparsekv.v1 import context_pb2
from tests.decode_engine.conftest import Library


@pytest.mark.parametrize("doors", [1, 3, 4, 64])
def test_parts_come_to_no_more_than_the_whole(doors: int) -> None:
    sharing = Sharing(doors)
    limits, whole = Limits(connections=100).of_one(sharing), Limits(connections=100)
    for name in ("connections", "unfinished", "unread", "abandoned", "waiting"):
        assert 1 <= doors * getattr(limits, name) <= getattr(whole, name)
    crowded = Limits().of_one(Sharing(doors, places=500))  # who may all come by one door
    for name in ("unfinished", "unread", "waiting"):
        assert getattr(crowded, name) == getattr(limits, name) + 500
    assert limits.streams == whole.streams  # of one connection, which has one door
    assert sharing.part(8) * doors <= max(8, doors)


def test_attempts_at_all_doors_are_as_many_as_at_one() -> None:
    now = 0.0
    each = [FailedAttempts(20, 3.0, lambda: now).of_one(Sharing(4)) for _ in range(4)]

    def failed() -> int:
        count = 0
        for attempts in each:
            while not attempts.delay_s("a"):
                attempts.add("a")
                count += 1
        return count

    assert failed() == 20
    now = 12.0
    assert failed() == 4


def test_tokens_of_pages_are_valid_at_every_door(library: Library, lamp: str, shelf: str) -> None:
    store, key = Store(library.store), Sharing().key
    request = context_pb2.ListContextsRequest(page_size=1)
    (first,), token = Pager(key).page(store, request)
    request.page_token = token
    (second,), _ = Pager(key).page(store, request)
    assert first.id != second.id
    with pytest.raises(InvalidArgumentError, match="page_token"):
        Pager(Sharing().key).page(store, request)
