"""Stored contexts over the real server: described, listed, warmed, deleted."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import Any

import grpc
import pytest

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.status import error_info
from index_store.errors import (
    ContextNotFoundError,
    MethodUnsupportedError,
    StoreUnavailableError,
)
from index_store.store.catalog import Store
from sparsekv.v1 import context_pb2
from tests.decode_engine.conftest import Library, Stubs
from tests.support.serving.service import wait_until


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
