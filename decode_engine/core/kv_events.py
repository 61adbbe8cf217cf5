"""What a server holds, as vLLM publishes it: routers that read such events send a prompt where its beginning is.

Two sockets of ZeroMQ: PUB sends `[topic, sequence, batch]`, the sequence in 8 bytes, big endian, the batch in msgpack;
ROUTER, at the next port, sends those again that somebody has missed. Once a second what is stored and what is in memory
is compared with what was told last, so whatever changed it, in this process or another, is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

import msgspec
import zmq
from msgspec import Struct

from decode_engine.errors import AddressError
from index_store.errors import SparseKVError
from index_store.family.prefixes import stored_tokens
from index_store.memory.arena import Arena
from index_store.store.catalog import Store
from index_store.store.description.context_id import DIGEST_DIGITS, PREFIX_BLOCK
from index_store.store.description.manifest import Manifest

Medium = Literal["GPU", "CPU", "DISK"]
Held = Mapping[tuple[Medium, str], Manifest]
"""Contexts by the medium that they are on, and their ids."""

_EVERY_S = 1.0
_KEPT_BATCHES = 10_000
_AT_ONCE = 64
"""Blocks in an event: a context of a million tokens has 4,096 of them."""
_END = (-1).to_bytes(8, "big", signed=True)

logger = logging.getLogger(__name__)


class BlockStored(Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow each other are held on a medium. The members of vLLM's event of that name, in its order."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None = None


class BlockRemoved(Struct, frozen=True, array_like=True, tag=True):
    """Blocks are held there no more."""

    block_hashes: Sequence[int]
    medium: Medium


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag=True):
    """Nothing is held: the server has just started."""


class Batch(Struct, frozen=True, array_like=True):
    """Events of one moment. ts: seconds since 1970."""

    ts: float
    events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


class Told:
    """What was told, and what has changed since. first: digits that digests of contexts begin with which requests find.

    tokens_of: the tokens of a context; None where they cannot be read now.
    """

    def __init__(self, first: str, tokens_of: Callable[[Manifest], Sequence[int] | None]) -> None:
        self._first, self._tokens_of = first, tokens_of
        self._blocks: dict[tuple[Medium, str], list[int]] = {}
        self._holders: Counter[tuple[Medium, int]] = Counter()

    def changes(self, held: Held) -> list[BlockStored | BlockRemoved]:
        gone = [place for place in self._blocks if place not in held]
        told: list[BlockStored | BlockRemoved] = [each for place in gone for each in self._remove(place)]
        for place, manifest in held.items():
            if place not in self._blocks:
                told += self._store(place, manifest)
        return told

    def _store(self, place: tuple[Medium, str], manifest: Manifest) -> Iterator[BlockStored]:
        medium, whole = place[0], manifest.token_count // PREFIX_BLOCK
        if not whole or not manifest.prefix_digests.startswith(self._first):
            return  # too short, of another model, or with a salt: no request finds it
        tokens = self._tokens_of(manifest)
        if tokens is None:
            return  # it is tried again
        blocks = block_hashes(manifest.prefix_digests)[:whole]
        self._blocks[place] = blocks
        for hash_ in blocks:
            self._holders[medium, hash_] += 1
        known = sum(self._holders[medium, hash_] > 1 for hash_ in blocks)  # from the first one on
        for at in range(known, whole, _AT_ONCE):
            some = blocks[at : at + _AT_ONCE]
            ids = tokens[at * PREFIX_BLOCK : (at + len(some)) * PREFIX_BLOCK]
            yield BlockStored(some, blocks[at - 1] if at else None, ids, PREFIX_BLOCK, None, medium)

    def _remove(self, place: tuple[Medium, str]) -> Iterator[BlockRemoved]:
        medium, blocks = place[0], self._blocks.pop(place)
        for hash_ in blocks:
            self._holders[medium, hash_] -= 1
        left = [hash_ for hash_ in blocks if not self._holders[medium, hash_]]
        for hash_ in left:
            del self._holders[medium, hash_]
        if left:
            yield BlockRemoved(left, medium)


def held_by(store: Store, arena: Arena) -> Held:
    """Contexts that can be used, by where they are: all in the store, and some in memory, too."""
    held: dict[tuple[Medium, str], Manifest] = {}
    for manifest in store.list():
        if not store.expired(manifest):
            held["DISK", manifest.id] = manifest
            tier = arena.tier(manifest)
            if tier != "disk":
                held["GPU" if tier == "device" else "CPU", manifest.id] = manifest
    return held


def block_hashes(digests: str) -> list[int]:
    """The first 64 bits of the digest behind each whole block."""
    starts = range(DIGEST_DIGITS, len(digests), DIGEST_DIGITS)  # the first one is of no tokens
    return [int(digests[at : at + 16], 16) for at in starts]


class KVEvents:
    """Publishes what a server holds, from `start` to `close`."""

    def __init__(self, listen: str, topic: str = "") -> None:
        """listen: HOST:PORT. topic: what subscribers filter by."""
        self._listen, self._topic = listen, topic.encode()
        self._sequence = count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store: Store, arena: Arena, first: str) -> None:
        """first: see `Told`. Raises AddressError."""
        context = zmq.Context()
        publisher, replays = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        host, _, port = self._listen.rpartition(":")
        for each in (publisher, replays):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.SNDHWM, 2 * _KEPT_BATCHES)  # who is further behind loses some
            each.setsockopt(zmq.IPV6, ":" in host)
        try:
            publisher.bind(f"tcp://{host}:{port}")
            replays.bind(f"tcp://{host}:{int(port) + 1}")
        except zmq.ZMQError as error:
            context.destroy()
            raise AddressError.of(f"{self._listen}, or the port behind it,", "--kv-events") from error

        def tokens_of(manifest: Manifest) -> Sequence[int] | None:
            tokens = stored_tokens(store, manifest)
            return None if tokens is None else tokens.tolist()

        work = (context, publisher, replays, Told(first, tokens_of), partial(held_by, store, arena))
        self._thread = threading.Thread(target=self._run, args=work, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(
        self,
        context: zmq.Context[Any],
        publisher: zmq.Socket[Any],
        replays: zmq.Socket[Any],
        told: Told,
        held: Callable[[], Held],
    ) -> None:
        self._publish(publisher, [AllBlocksCleared()])
        due = time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() >= due:
                self._look(publisher, told, held)
                due = time.monotonic() + _EVERY_S
            if replays.poll(int(1000 * _EVERY_S / 4)):
                self._replay(replays)
        context.destroy()

    def _look(self, publisher: zmq.Socket[Any], told: Told, held: Callable[[], Held]) -> None:
        try:
            changes = told.changes(held())
        except SparseKVError as error:
            logger.warning("what is held is not published now: %s", error.message)
            return
        except Exception:
            logger.exception("what is held is not published now")
            return
        if changes:
            self._publish(publisher, changes)

    def _publish(
        self, publisher: zmq.Socket[Any], events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]
    ) -> None:
        sequence = next(self._sequence).to_bytes(8, "big")
        batch = msgspec.msgpack.encode(Batch(time.time(), list(events)))
        self._kept.append((sequence, batch))
        publisher.send_multipart((self._topic, sequence, batch))

    def _replay(self, replays: zmq.Socket[Any]) -> None:
        """Sends what is kept from a sequence on, and a last message without a batch."""
        frames = replays.recv_multipart()
        if len(frames) != 3:
            logger.info("a request for events of %d parts is not answered, expected 3", len(frames))
            return
        who, empty, wanted = frames
        for sequence, batch in (*self._kept, (_END, b"")):
            if sequence >= wanted:
                replays.send_multipart((who, empty, sequence, batch))
