"""Two servers, each with a store of its own, in front of one object store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.status import reason_of
from index_store.errors import ContextCorruptError, ContextFetchingError, ContextNotFoundError
from index_store.objects.bucket import Bucket
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier
from index_store.store.catalog import Store
from tests.decode_engine.conftest import Library, make_library
from tests.index_store.objects.sites import Faults, FaultyBucket
from tests.support.serving.service import loaded, wait_until

ASK: Any = {"text": "\nQuestion: who lit it?\nAnswer:", "max_tokens": 6, "method": "csattention"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A store with two contexts, uploaded to the folder `bucket` beside it."""
    library = make_library(tmp_path_factory.mktemp("shared"))
    library.prefill("lamp")
    library.prefill("snow", text="It snowed over the harbour, and the keeper slept. " * 9)
    store = Store(library.store)
    store.beyond = Tier(store, bucket_of(library))
    assert Courier(store, Tier.of(store)).look()
    return library


def bucket_of(library: Library) -> str:
    return (library.store.parent / "bucket").as_uri()


@pytest.fixture
def other(shared: Library, tmp_path: Path) -> Iterator[DecodeServer]:
    """A server whose own store is empty."""
    library = replace(shared, store=tmp_path / "other")
    with loaded(library.config(objects=bucket_of(shared))) as started:
        wait_until(lambda: len(started.grpc.store.list()) == 2)
        yield started


def test_another_server_answers_alike_and_says_where_it_was(shared: Library, other: DecodeServer) -> None:
    with loaded(shared.config()) as own, Client(own.address) as client:
        expected = client.generate(context=client.find_context("lamp").name, **ASK).read()
    with Client(other.address) as client:
        lamp = client.find_context("lamp").name
        for tier in ("objects", "host"):
            with client.generate(context=lamp, explain=True, **ASK) as generation:
                assert generation.read() == expected
                assert generation.summary.explanation.tier == tier
        assert not other.grpc.store.elsewhere(client.find_context("lamp").name[9:])
        assert other.grpc.store.elsewhere(client.find_context("snow").name[9:])
        warmed = client.warm_context(client.find_context("snow").name)
        assert warmed.load_ns > 0
        status = client.server_status()
        assert (status.objects_pending, status.objects_fetching, status.objects_problem) == (0, 0, "")


def test_a_slow_object_store_is_told_and_holds_up_nobody(other: DecodeServer) -> None:
    store, go = other.grpc.store, threading.Event()
    tier = Tier.of(store)
    with Client(other.address) as client:
        lamp, snow = (client.find_context(name).name for name in ("lamp", "snow"))
        client.warm_context(snow)
        tier._bucket = FaultyBucket(
            tier.bucket, Faults(before=lambda verb, key: lamp[9:] not in key or go.wait(60))
        )
        tier._timeout_s = 0.1
        with pytest.raises(ContextFetchingError, match=r"0 B of .* ask again, or send the text") as raised:
            client.generate(context=lamp, **ASK).read()
        assert raised.value.metadata["bytes_total"] != "0"
        assert client.server_status().objects_fetching == 1
        assert client.generate(context=snow, **ASK).read()
        assert client.generate(text="Without a context.", max_tokens=3).read()
        tier._timeout_s = 60.0
        go.set()
        assert client.generate(context=lamp, **ASK).read()


def test_what_is_damaged_there_is_not_served(shared: Library, other: DecodeServer) -> None:
    tier = Tier.of(other.grpc.store)
    tier._bucket = FaultyBucket(tier.bucket, Faults(flipped=1.0))
    with Client(other.address) as client:
        lamp = client.find_context("lamp").name
        with pytest.raises(ContextCorruptError) as raised:
            client.generate(context=lamp, **ASK).read()
        assert reason_of(raised.value) == "CONTEXT_CORRUPT"
        assert str(shared.store.parent) not in raised.value.message
        tier._bucket = Bucket.open(bucket_of(shared))
        assert client.generate(context=lamp, **ASK).read()


def test_names_and_deletions_go_both_ways(shared: Library, other: DecodeServer) -> None:
    own = Store(shared.store)
    own.beyond = Tier(own, bucket_of(shared))
    courier = Courier(own, Tier.of(own))
    id_ = shared.prefill("passing", text="A ship came by. " * 30)
    assert courier.look()
    with Client(other.address) as client:
        wait_until(lambda: id_ in {each.name[9:] for each in client.list_contexts()})
        client.update_context(f"contexts/{id_}", labels={"seen": "there"})
        wait_until(lambda: courier.look() and own.manifest(id_).labels == {"seen": "there"})
        client.delete_context(f"contexts/{id_}")

    def gone() -> bool:
        courier.look()
        try:
            return own.manifest(id_) is None
        except ContextNotFoundError:
            return True

    wait_until(gone)
