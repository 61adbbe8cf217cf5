"""Stored contexts over the real server: described, listed, filtered, changed, warmed, deleted."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import grpc
import pytest

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import Client
from decode_engine.rpc.contexts.listing import fits
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.status import error_info
from index_store.errors import (
    ContextBusyError,
    ContextCorruptError,
    ContextNotFoundError,
    FormatVersionError,
    MethodUnsupportedError,
    NameTakenError,
    StoreUnavailableError,
)
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.listing import BrokenContext, Entry, state_of
from sparsekv.v1 import context_pb2
from tests.decode_engine.conftest import Library, Stubs
from tests.support.serving.service import fails, wait_until
from tests.support.store import CREATED, synthetic_context


def test_a_context_is_found_by_what_people_call_it(library: Library, client: Client, stubs: Stubs) -> None:
    """In one call, whatever the number of contexts."""
    id_ = library.prefill("found", method=("full",))
    other = library.prefill("found-other", method=("full",))
    for reference in (id_, id_.upper(), id_[:9], f"contexts/{id_[:9].upper()}", f"contexts/{id_}", "found"):
        assert client.find_context(reference).name == f"contexts/{id_}"
    assert client.get_context(f"contexts/{id_.upper()}").name == f"contexts/{id_}"
    for absent in ("foun", id_[:5], "0" * 64, "x" * 600):
        with pytest.raises(ContextNotFoundError, match="or a name"):
            client.find_context(absent)
    same = library.prefill("second", method=("full",), text="Another text under the same name. " * 8)
    Store(library.store).update(
        same, lambda manifest: replace(manifest, name="found")
    )  # as after a killed move
    assert client.find_context("found").name == f"contexts/{same}"
    for bad in ({}, {"name": f"contexts/{other}", "reference": "found"}, {"reference": "x" * 601}):
        with pytest.raises(grpc.RpcError) as caught:
            stubs.contexts.GetContext(context_pb2.GetContextRequest(**bad))
        info = error_info(caught.value)
        assert info.reason == "INVALID_ARGUMENT"


def test_a_context_that_cannot_be_read_now(
    library: Library, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not called damaged: who deletes what is damaged would lose it."""
    id_ = library.prefill("passing", method=("full",))
    original = os.open

    def open_file(path: Any, *args: Any, **kwargs: Any) -> int:
        if id_ in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return original(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_file)
        context = client.get_context(f"contexts/{id_}")
        assert (context.state, "Too many open files" in context.state_message) == ("UNAVAILABLE", True)
        assert "delete" not in context.state_message
        assert id_ in [listed.name.removeprefix("contexts/") for listed in client.list_contexts()]
        with pytest.raises(StoreUnavailableError, match="cannot be read now"):
            client.generate(context.name, text="x").read()
    assert client.get_context(f"contexts/{id_}").state == "READY"


def test_pages_cover_the_list_once(library: Library, client: Client, stubs: Stubs) -> None:
    for number in range(3):
        library.prefill(f"page-{number}", method=("full",))
    whole = [context.name for context in client.list_contexts()]
    assert len(whole) >= 4
    assert [context.name for context in client.list_contexts(page_size=1)] == whole
    first = stubs.contexts.ListContexts(context_pb2.ListContextsRequest(page_size=2))
    # what is created or deleted meanwhile does not shift the pages
    library.prefill("page-new", method=("full",))
    client.delete_context(whole[1])
    second = stubs.contexts.ListContexts(
        context_pb2.ListContextsRequest(page_size=1000, page_token=first.next_page_token)
    )
    assert [context.name for context in (*first.contexts, *second.contexts)] == whole
    assert second.next_page_token == ""


def test_deleting_a_context_in_use_lets_its_generation_finish(
    library: Library, server: DecodeServer, client: Client
) -> None:
    name = "contexts/" + library.prefill("doomed")
    expected = client.generate(name, text="Who?", max_tokens=60, temperature=1.0, seed=1).read()
    generation = client.generate(name, text="Who?", max_tokens=60, temperature=1.0, seed=1)
    pieces = iter(generation)
    begun = next(pieces).text
    client.delete_context(name)
    with pytest.raises(ContextNotFoundError):
        client.generate(name, text="Who?").read()
    assert begun + "".join(piece.text for piece in pieces) == expected
    wait_until(lambda: name.removeprefix("contexts/") not in server.backend.arena.ids())


def test_an_index_that_is_added_is_served_by_the_next_request(library: Library, client: Client) -> None:
    """Also while a request that began before holds the context as it was."""
    id_ = library.prefill("growing", method=("csattention",))
    name = "contexts/" + id_
    with pytest.raises(MethodUnsupportedError, match="needs index 'pages'"):
        client.generate(name, text="Who?", method="quest", max_tokens=2).read()
    earlier = client.generate(name, text="Who?", max_tokens=1500)
    pieces = iter(earlier)
    next(pieces)
    assert library.prefill("growing", method=("quest",)) == id_
    with client.generate(name, text="Who?", method="quest", max_tokens=2) as generation:
        generation.read()
        assert generation.summary.completion_tokens == 2
    assert {index.name for index in client.get_context(name).indexes} == {
        "query_tables",
        "remainder_clusters",
        "pages",
    }
    assert client.get_context(name).methods == ("full", "exact", "oracle", "csattention", "quest")
    next(pieces)
    earlier.cancel()
    with pytest.raises(CancelledError):
        list(pieces)


def test_a_name_that_another_context_has_is_taken_by_wish_alone(library: Library, client: Client) -> None:
    old, new = (
        "contexts/" + library.prefill(name, text=f"{name}. " * 30) for name in ("edition 1", "edition 2")
    )
    client.update_context(old, display_name="the handbook")
    with pytest.raises(NameTakenError, match="belongs to context"):
        client.update_context(new, display_name="the handbook")
    assert client.update_context(old, display_name="the handbook").name == old
    assert client.find_context("the handbook").name == old
    assert client.update_context(new, display_name="the handbook", move_name=True).name == new
    assert client.find_context("the handbook").name == new
    assert client.get_context(old).display_name.startswith("the handbook ")
    for name in (old, new):
        client.delete_context(name)


def test_a_pinned_context_does_not_expire(library: Library, client: Client) -> None:
    name = "contexts/" + library.prefill("pinned", ttl="1h")
    passed = datetime(2020, 1, 1, tzinfo=UTC)
    assert client.update_context(name, pinned=True, expire_time=passed).state == "READY"
    store = Store(library.store)
    assert not [item for item in clean_up(store, dry_run=True) if item.kind == "expired"]
    with client.generate(name, text="The", max_tokens=2) as generation:
        generation.read()
    assert client.update_context(name, pinned=False).state == "EXPIRED"
    assert [item.path.name for item in clean_up(store) if item.kind == "expired"] == [
        name.removeprefix("contexts/")
    ]
    with pytest.raises(ContextNotFoundError):
        client.update_context(name, pinned=True)


def test_updates_at_once_all_take_effect(library: Library, client: Client, lamp: str) -> None:
    def note(number: int) -> None:
        client.update_context(lamp, labels={f"k{number}": str(number)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(16)))
    assert client.get_context(lamp).labels == {f"k{number}": str(number) for number in range(16)}
    client.update_context(lamp, labels={f"k{number}": None for number in range(16)})
    assert not list(library.store.glob("contexts/.tmp-*"))


def test_an_update_waits_for_no_job(
    library: Library,
    client: Client,
    lamp: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does the client's library repeat it, three times after ten seconds each."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("decode_engine.rpc.context_service._BUSY_S", 0.1)
    with (
        Store(library.store).lock(lamp.removeprefix("contexts/")),
        pytest.raises(
            ContextBusyError, match=r"a job changes context .*; try again when it is done"
        ) as caught,
    ):
        client.update_context(lamp, pinned=True)
    wait_until(lambda: any(getattr(record, "rpc", "") == "UpdateContext" for record in caplog.records))
    assert [getattr(record, "rpc", "") for record in caplog.records].count("UpdateContext") == 1
    assert caught.value.retry_after_s == 10


def test_lists_of_some_contexts_come_page_by_page(library: Library, client: Client, stubs: Stubs) -> None:
    names = [f"contexts/{library.prefill(f'sorted{number}')}" for number in (2, 0, 1)]
    for name in names:
        client.update_context(name, labels={"kind": "sorted"})
    found = list(client.list_contexts(1, labels={"kind": "sorted"}, state="READY", name_prefix="sort"))
    assert [context.display_name for context in found] == ["sorted1", "sorted0", "sorted2"]
    for wanted in ({"labels": {"kind": "other"}}, {"labels": {"sort": "kind"}}, {"name_prefix": "sorted3"}):
        assert not list(client.list_contexts(**wanted)), wanted  # type: ignore[arg-type]
    first = stubs.contexts.ListContexts(
        context_pb2.ListContextsRequest(page_size=1, labels={"kind": "sorted"})
    )
    other = context_pb2.ListContextsRequest(page_size=1, page_token=first.next_page_token)
    _, info, details = fails(lambda: [stubs.contexts.ListContexts(other)])
    assert (info.metadata["field"], "of a list of other contexts" in details) == (
        "page_token",
        True,
    )
    for field, value in (("filter", "state = READY"), ("order_by", "display_name"), ("state", 9)):
        wrong = context_pb2.ListContextsRequest(**{field: value})
        _, info, details = fails(partial(stubs.contexts.ListContexts, wrong))
        assert (info.metadata["field"], "expected " in details) == (field, True)
    for name in names:
        client.delete_context(name)


def made(name: str, **changes: object) -> Entry:
    return replace(synthetic_context(name=name).draft, **changes)  # type: ignore[arg-type]


PAST = CREATED + timedelta(days=3)
ENTRIES: Mapping[str, Entry] = {
    "law": made("Tax law", labels={"team": "law", "year": "2026"}),
    "novel": made("Tales", labels={"team": "arts"}),
    "old": made("old", labels={"team": "law"}, expires_at=PAST),
    "corrupt": BrokenContext("b" * 64, ContextCorruptError("damaged")),
    "unsupported": BrokenContext("c" * 64, FormatVersionError("new")),
    "unavailable": BrokenContext("d" * 64, StoreUnavailableError("away")),
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, " ".join(ENTRIES)),
        ({"name_prefix": "Ta"}, "law novel"),
        ({"name_prefix": "ta"}, ""),
        ({"labels": {"team": "law"}}, "law old"),
        ({"labels": {"team": "law", "year": "2026"}}, "law"),
        ({"labels": {"year": ""}}, ""),
        ({"state": "READY"}, "law novel"),
        ({"state": "EXPIRED", "labels": {"team": "law"}}, "old"),
        ({"state": "CORRUPT"}, "corrupt"),
        ({"state": "UNSUPPORTED"}, "unsupported"),
        ({"state": "UNAVAILABLE"}, "unavailable"),
    ],
)
def test_lists_hold_what_fits(wanted: Mapping[str, object], found: str) -> None:
    request = context_pb2.ListContextsRequest(**wanted)  # type: ignore[arg-type]
    states = {name: state_of(entry, expired=name == "old") for name, entry in ENTRIES.items()}
    assert " ".join(name for name, entry in ENTRIES.items() if fits(entry, request, states[name])) == found
