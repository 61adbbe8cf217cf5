"""A server tidies its store by itself: what has expired goes, nothing in use does, and a bound is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from decode_engine.core import housekeeping
from decode_engine.core.housekeeping import Housekeeping
from decode_engine.rpc.client import Client, Keep
from index_store.errors import StoreBoundError, StoreError
from index_store.store.catalog import Store, utc_now
from index_store.store.clean_up import StoreRoom
from tests.decode_engine.conftest import Library, make_library
from tests.support.serving.service import loaded, wait_until

NO_MARGIN = timedelta(0)


class Room(StoreRoom):
    """Says when it is swept."""

    def __init__(self, store: Store, swept: list[bool]) -> None:
        super().__init__(store)
        self._swept = swept

    def sweep(self) -> Sequence[str]:
        self._swept.append(True)
        if len(self._swept) == 2:
            raise StoreError("the disk is away")
        return ()


def test_it_waits_for_an_idle_moment_but_not_for_ever(
    library: Library, lamp: str, caplog: pytest.LogCaptureFixture
) -> None:
    swept: list[bool] = []
    busy = [True]
    store = Store(library.store)
    keeping = Housekeeping(store, Room(store, swept), lambda: [lamp[9:]], lambda: not busy[0])
    for _ in range(housekeeping._MOST_PUT_OFF):
        keeping.look()
    assert swept == []
    keeping.look()
    assert len(swept) == 1
    busy[0] = False
    keeping.look()  # which fails, and is told
    assert "not removed now: the disk is away" in caplog.text
    keeping.look()
    assert len(swept) == 3


def test_an_expired_context_goes_and_one_in_use_stays(library: Library) -> None:
    gone, kept = (library.prefill(f"passing {number}", text=f"{number} " * 99) for number in (1, 2))
    store = Store(library.store)
    for id_ in (gone, kept):
        store.update(id_, lambda manifest: replace(manifest, expires_at=utc_now()))
    used = StoreRoom(store, margin=timedelta(hours=1))  # whose folders are new
    assert used.sweep() == []
    room = StoreRoom(store, margin=NO_MARGIN)
    with store.lock(kept):
        keeping = Housekeeping(store, room, lambda: (), lambda: True, every_s=0.01)
        keeping.start()
        wait_until(lambda: gone not in {manifest.id for manifest in store.list()})
        keeping.stop()
    assert kept in {manifest.id for manifest in store.list()}
    store.delete(kept)


def test_what_is_kept_of_sessions_counts_to_the_bound(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It makes room like a context that is ordered, and is refused where there is none, before anything is read."""
    library = make_library(tmp_path_factory.mktemp("kept"))
    named, old = library.prefill("named"), library.prefill("old", text="It snowed. " * 20)
    store = Store(library.store)
    store.update(old, lambda manifest: replace(manifest, expires_at=utc_now() + timedelta(days=1)))
    os.utime(store.folders.context(old), (0, 0))
    bound = StoreRoom(store).used()
    with loaded(library.config(store_bytes=bound)) as server, Client(server.address) as client:
        ask: Any = {"context": f"contexts/{named}", "max_tokens": 3}
        client.generate(**ask, text="More.", keep=Keep("child")).read()
        assert {manifest.name for manifest in store.list()} == {"named", "child"}
        assert StoreRoom(store).used() <= bound
        with pytest.raises(StoreBoundError, match="--store-bytes is"):
            client.generate(**ask, text="It snowed for days. " * 40, keep=Keep("longer")).read()
        assert client.server_status().decode_tokens <= 3
        client.generate(**ask, text="More.", keep=Keep("renamed")).read()  # which is there
    assert {manifest.name for manifest in store.list()} == {"named", "renamed"}


def test_an_order_beyond_the_bound_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    library = make_library(tmp_path_factory.mktemp("small"))
    library.prefill("first")
    held = StoreRoom(Store(library.store)).used()
    with loaded(library.config(store_bytes=held + 1000)) as server, Client(server.address) as client:
        with pytest.raises(StoreBoundError, match="--store-bytes is"):
            client.create_context("It rained. " * 40, wait=False)
        (there,) = client.list_contexts()
        assert client.update_context(there.name, labels={"a": "b"}).labels == {"a": "b"}
    assert [manifest.name for manifest in Store(library.store).list()] == ["first"]
