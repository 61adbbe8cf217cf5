"""What routers read of a server: a subscriber that is written by vLLM's format alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from msgspec import Struct, msgpack

from decode_engine.core.kv_events import BlockRemoved as Removed
from decode_engine.core.kv_events import Told, block_hashes
from decode_engine.errors import AddressError
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError
from index_store.store.catalog import Store
from index_store.store.description.context_id import DIGEST_DIGITS, PREFIX_BLOCK
from tests.decode_engine.conftest import TEXT, Library
from tests.support.serving.service import loaded

TOPIC = "kv@here@model"


# As the documentation of vLLM's subscriber has them.
class EventBatch(Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]


class KVCacheEvent(Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """Knows what a server holds by its events. blocks: tokens of each by medium and hash."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._context: zmq.Context[Any] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(f"tcp://{address}")
        self._events.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://{host}:{int(port) + 1}")
        self.blocks: dict[tuple[str | None, Any], list[int]] = {}
        self.parents: dict[Any, Any] = {}
        self.next = 0
        self.cleared = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """Takes the next batch, and before it those that were missed; all that were where none comes."""
        if not self._events.poll(1000):
            self.catch_up()
            return
        topic, sequence, payload = self._events.recv_multipart()
        assert topic == TOPIC.encode()
        number = int.from_bytes(sequence, "big")
        if number > self.next:
            self.catch_up()
        if number == self.next:
            self._take(number, payload)

    def catch_up(self) -> None:
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(60_000), "nothing was sent again"
            _, sequence, payload = self._replay.recv_multipart()
            if not payload:
                assert int.from_bytes(sequence, "big", signed=True) == -1
                return
            self._take(int.from_bytes(sequence, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        assert number == self.next
        self.next += 1
        for event in msgpack.decode(payload, type=KVEventBatch).events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                for at, hash_ in enumerate(event.block_hashes):
                    tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                    assert (event.medium, hash_) not in self.blocks
                    assert parent is None or (event.medium, parent) in self.blocks
                    self.blocks[event.medium, hash_] = tokens
                    self.parents[hash_] = parent
                    parent = hash_
            elif isinstance(event, BlockRemoved):
                for hash_ in event.block_hashes:
                    del self.blocks[event.medium, hash_]
            else:
                self.cleared += 1
                self.blocks.clear()

    def longest(self, medium: str, tokens: list[int]) -> int:
        """Tokens of a prompt that are held on a medium, as a router finds out."""
        held, parent = 0, None
        for at in range(0, len(tokens) - PREFIX_BLOCK + 1, PREFIX_BLOCK):
            part = tokens[at : at + PREFIX_BLOCK]
            found = [
                hash_
                for (on, hash_), own in self.blocks.items()
                if on == medium and own == part and self.parents[hash_] == parent
            ]
            if not found:
                break
            held, (parent,) = at + PREFIX_BLOCK, found
        return held


@pytest.fixture
def address() -> str:
    """A free port with a free one behind it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return f"127.0.0.1:{port}"
            except (OSError, OverflowError):
                continue


@pytest.fixture
def subscriber(library: Library, address: str) -> Iterator[Subscriber]:
    made = Subscriber(address)
    yield made
    made.close()


def test_a_subscriber_of_vllms_format_knows_what_is_held_and_where(
    library: Library, address: str, subscriber: Subscriber
) -> None:
    text = (TEXT * 4)[:700]
    stored = library.prefill("told", text=text, salt="", method=("full",))
    secret = library.prefill("secret", text="A secret. " * 60, salt="mine", method=("full",))
    config = library.config(kv_events=address, kv_events_topic=TOPIC)
    with loaded(config) as server, Client(server.address) as client:
        tokens = list(client.tokenize(text).ids)
        hidden = list(client.tokenize("A secret. " * 60).ids)
        while subscriber.longest("DISK", tokens) < 512:
            subscriber.read()
        assert subscriber.cleared == 1
        assert not any(medium == "CPU" for medium, _ in subscriber.blocks)
        client.warm_context(f"contexts/{stored}")
        client.warm_context(f"contexts/{secret}")
        while subscriber.longest("CPU", tokens) < 512:
            subscriber.read()
        assert subscriber.longest("DISK", hidden) == subscriber.longest("CPU", hidden) == 0
        late = Subscriber(address)  # joins when all has been said
        late.catch_up()
        assert late.blocks == subscriber.blocks
        late.close()
        client.delete_context(f"contexts/{stored}")
        while subscriber.longest("DISK", tokens) or subscriber.longest("CPU", tokens):
            subscriber.read()


def test_blocks_that_several_contexts_have_are_told_once_and_stay_until_the_last_goes(
    library: Library,
) -> None:
    text = (TEXT * 6)[:600]
    ids = [
        library.prefill(str(length), text=text[:length] + end, salt="", method=("full",))
        for length, end in ((300, ""), (600, ""), (530, "another end" * 30))
    ]
    store = Store(library.store)
    manifests = {("CPU", id_): store.manifest(id_) for id_ in ids}
    tokens: dict[str, list[int]] = {}
    for manifest in manifests.values():
        with store.open(manifest.id) as context:
            tokens[manifest.id] = context.tokens().tolist()
    first = next(iter(manifests.values())).prefix_digests[:DIGEST_DIGITS]
    told = Told(first, lambda manifest: tokens[manifest.id])
    short, long, other = manifests
    blocks = {place: block_hashes(manifest.prefix_digests) for place, manifest in manifests.items()}
    held: dict[Any, Any] = {}
    seen = []
    for place in (short, long, other):
        held[place] = manifests[place]
        seen.append(told.changes(held))
    assert [[each.block_hashes for each in one] for one in seen] == [
        [blocks[short]],
        [blocks[long][1:]],
        [blocks[other][2:]],
    ]
    ((_,), (second,), (third,)) = seen
    assert second.parent_block_hash == blocks[long][0]  # type: ignore[union-attr]
    assert third.parent_block_hash == blocks[long][1]  # type: ignore[union-attr]
    assert told.changes(held) == []
    del held[long]
    assert told.changes(held) == []  # the other one has both
    del held[other]
    assert told.changes(held) == [Removed(blocks[other][1:], "CPU")]
    assert told.changes({}) == [Removed(blocks[short], "CPU")]


def test_a_context_that_cannot_be_read_now_is_told_later(library: Library, lamp: str) -> None:
    manifest = Store(library.store).manifest(library.prefill("now", text=TEXT * 2, salt="", method=("full",)))
    able = False
    told = Told(manifest.prefix_digests[:DIGEST_DIGITS], lambda one: [7] * one.token_count if able else None)
    assert told.changes({("GPU", manifest.id): manifest}) == []
    able = True
    (event,) = told.changes({("GPU", manifest.id): manifest})
    assert event.medium == "GPU"


def test_addresses_that_others_reach_or_have_are_refused(library: Library, address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--kv-events is 0\.0\.0\.0:5557, which other machines"):
        library.config(kv_events="0.0.0.0:5557")
    host, port = address.split(":")
    with (
        socket.create_server((host, int(port) + 1)),
        DecodeServer(library.config(kv_events=address)) as server,
        pytest.raises(AddressError, match="--kv-events"),
    ):
        server.load()
