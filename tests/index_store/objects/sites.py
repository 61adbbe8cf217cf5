"""Object stores for tests: in memory, in a folder, with seeded faults; processes that work until they are killed."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obstore.store import MemoryStore

from index_store.errors import ObjectsUnavailableError, SparseKVError
from index_store.objects.bucket import Bucket, Found
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from tests.support.store import SyntheticContext, synthetic_context

URL = "memory:///tests"


def memory_bucket() -> Bucket:
    """An empty one."""
    return Bucket(MemoryStore(), URL)


@dataclass
class Faults:
    """What goes wrong of the verbs of a bucket, by the seed: shares of calls that fail, answers that are cut or have a
    bit flipped, puts that fail after they were done, and puts of which a part is another one."""

    seed: int = 0
    failing: float = 0.0
    cut: float = 0.0
    flipped: float = 0.0
    unanswered: float = 0.0
    torn: float = 0.0
    before: Callable[[str, str], object] = lambda verb, key: None
    calls: list[tuple[str, str]] = field(default_factory=list)


class FaultyBucket(Bucket):
    """A bucket that fails as its faults say."""

    def __init__(self, bucket: Bucket, faults: Faults) -> None:
        super().__init__(bucket._store, bucket.url)
        self.faults, self._draws, self._lock = faults, random.Random(faults.seed), threading.Lock()

    def _happens(self, share: float) -> bool:
        with self._lock:
            return self._draws.random() < share

    def _begin(self, verb: str, key: str) -> None:
        self.faults.calls.append((verb, key))
        self.faults.before(verb, key)
        if self._happens(self.faults.failing):
            raise ObjectsUnavailableError(f"{key}: {verb} fails, as it was told to")

    def _spoiled(self, data: bytes) -> bytes:
        if self._happens(self.faults.flipped):
            at = self._draws.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        return data[: len(data) // 2] if self._happens(self.faults.cut) else data

    def list(self, prefix: str) -> Sequence[Found]:
        self._begin("list", prefix)
        return super().list(prefix)

    def get(self, key: str) -> bytes:
        self._begin("get", key)
        return self._spoiled(super().get(key))

    def size(self, key: str) -> int:
        self._begin("size", key)
        return super().size(key)

    def read(self, key: str, start: int, count: int) -> bytes:
        self._begin("read", key)
        return self._spoiled(super().read(key, start, count))

    def put_new(self, key: str, data: bytes) -> bool:
        self._begin("put_new", key)
        done = super().put_new(key, data)
        if self._happens(self.faults.unanswered):
            raise ObjectsUnavailableError(f"{key}: the answer is lost, as it was told to be")
        return done

    def put(self, key: str, pieces: Iterator[bytes], nbytes: int) -> None:
        self._begin("put", key)
        data = b"".join(pieces)
        if self._happens(self.faults.torn):
            middle = len(data) // 2
            data = data[:middle] + bytes(len(data) - middle)
        super().put(key, iter([data]), nbytes)
        if self._happens(self.faults.unanswered):
            raise ObjectsUnavailableError(f"{key}: the answer is lost, as it was told to be")

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._begin("delete", key)
        super().delete(keys)


@dataclass
class Site:
    """A store of one machine in front of a shared bucket, and its courier, which looks when it is told to."""

    store: Store
    tier: Tier
    courier: Courier

    @classmethod
    def at(
        cls, path: Path, bucket: Bucket, store_bytes: int | None = None, timeout_s: float | None = 60.0
    ) -> Site:
        store = Store(path, create=True)
        tier = Tier(store, bucket.url, lambda _: bucket, store_bytes, timeout_s)
        store.beyond = tier
        return cls(store, tier, Courier(store, tier))

    def add(self, *contexts: SyntheticContext) -> None:
        """Writes contexts, and has them uploaded."""
        for each in contexts:
            each.write(self.store)
        self.settle()

    def fails(self, **faults: Any) -> Faults:
        """Its bucket fails so from now on; the calls are noted."""
        made = Faults(**faults)
        self.tier._bucket = FaultyBucket(self.tier.bucket, made)
        return made

    def settle(self) -> None:
        """Looks until nothing is left to be done, without any pause."""
        for _ in range(50):
            self.courier._pauses.clear()
            if self.courier.look():
                return
        raise AssertionError(f"not settled: {self.courier.state()}")


def book(seed: int) -> SyntheticContext:
    """What writers write: different ones may write the same."""
    return synthetic_context(seed=seed, name=f"book {seed}")


def site_of(path: Path, url: str) -> tuple[Store, Courier]:
    store = open_store(path, create=True, objects=url)
    return store, Courier(store, Tier.of(store))


def work(path: Path, url: str, seeds: Sequence[int]) -> None:
    """Writes what is not there, tells the bucket, fetches what it has, checks that, and lets some go again."""
    store, courier = site_of(path, url)
    while True:
        for seed in seeds:
            context = book(seed)
            if not store.folders.context(context.id).is_dir():
                context.write(store)
                with open(path / "written", "a") as file:
                    file.write(f"{context.id}\n")
            look_at_once(courier)
        look_at_once(courier)
        for manifest in store.list():
            try:
                store.bring(manifest.id)
                problems = store.verify(manifest.id)
            except SparseKVError:  # others are at it
                continue
            if problems:
                (path / "problems").write_text(f"{manifest.id}: {problems}")
            if manifest.id[0] in "01234567":
                os.utime(store.folders.context(manifest.id), (time.time() - 3600,) * 2)
                store.evict(manifest.id, lambda each: each == courier._tier.held().get(each.id))


def look_at_once(courier: Courier) -> bool:
    """Without any pause."""
    courier._pauses.clear()
    return courier.look()
