"""Processes that write to a bucket and read from it until they are killed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from index_store.errors import SparseKVError
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier, open_store
from index_store.store.catalog import Store
from tests.support.store import SyntheticContext, synthetic_context


def book(seed: int) -> SyntheticContext:
    """What writers write: different ones may write the same."""
    return synthetic_context(seed=seed, name=f"book {seed}")


def site(path: Path, url: str) -> tuple[Store, Courier]:
    store = open_store(path, create=True, objects=url)
    return store, Courier(store, Tier.of(store))


def work(path: Path, url: str, seeds: Sequence[int]) -> None:
    """Writes what is not there, tells the bucket, fetches what it has, checks that, and lets some go again."""
    store, courier = site(path, url)
    while True:
        for seed in seeds:
            context = book(seed)
            if not store.folders.context(context.id).is_dir():
                context.write(store)
                with open(path / "written", "a") as file:
                    file.write(f"{context.id}\n")
            look(courier)
        look(courier)
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


def look(courier: Courier) -> bool:
    """Without any pause."""
    courier._pauses.clear()
    return courier.look()
