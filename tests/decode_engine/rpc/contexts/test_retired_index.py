"""A stored context with an index that was retired opens and serves all other methods; the index is refused by name."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.cli.console import LineReporter
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.memory.arena import Arena
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS, get_method
from index_store.store.catalog import Store, TunedDefault
from index_store.store.description.manifest import Manifest
from prefill_worker.build.index_choice import choose_indexes
from prefill_worker.jobs.children import _specs
from tests.decode_engine.conftest import Library, make_library
from tests.support.store import RETIRED_INDEX, add_index

WORDS = (
    "the index coarse_codes and the method refined-codes were retired on 2026-11-27; take refined over a copy"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("retired"))


@pytest.fixture(scope="module")
def manifest(library: Library) -> Manifest:
    """Made for the retired method first, and tuned to it."""
    id_ = library.prefill("old", method=("quest",), index=("coarse_rows",))
    store = Store(library.store)
    present = store.manifest(id_)
    found, _ = add_index(
        store,
        present,
        RETIRED_INDEX.name,
        kind=RETIRED_INDEX.kind,
        parameters=RETIRED_INDEX.parameters,
        methods=("refined-codes", "quest"),
    )
    tuned = TunedDefault(found.id, "refined-codes", 0.01, None, None, "mass", 0.9, {}, datetime.now(UTC))
    store.set_default_method(found.id, tuned)
    return found


def test_all_other_methods_are_served(library: Library, manifest: Manifest) -> None:
    name = f"contexts/{manifest.id}"
    server = DecodeServer(library.config())
    server.load()
    with server, Client(server.address) as client:
        shown = client.get_context(name)
        assert shown.default_method == "quest"
        for method in (None, "quest", "refined"):
            generation = client.generate(name, text="Who?", max_tokens=3, method=method)
            generation.read()
            assert generation.summary.completion_tokens == 3
        for expression in ("refined-codes", "refined-codes+dropped"):
            with pytest.raises(MethodUnsupportedError, match=WORDS):
                client.generate(name, text="Who?", max_tokens=3, method=expression).read()


def over(index: str) -> Method:
    return replace(METHODS["refined"], index=replace(INDEX_SPECS["coarse_rows"], name=index))


def test_the_index_is_refused_by_name(library: Library, manifest: Manifest) -> None:
    with (
        Arena(1 << 28).acquire(Store(library.store), manifest.id) as context,
        pytest.raises(InvalidArgumentError, match=WORDS),
    ):
        context.index(RETIRED_INDEX.name, 1)
    with pytest.raises(InvalidArgumentError, match=WORDS):
        over(RETIRED_INDEX.name).on(manifest)
    with pytest.raises(MethodUnsupportedError, match=f"method is 'refined-codes@recent=9': .*{WORDS}"):
        get_method("refined-codes@recent=9")
    for index in ("coarse_codes", "coarse_codes:key_bits=4"):
        with pytest.raises(InvalidArgumentError, match=f"--index is '{index}': .*{WORDS}"):
            choose_indexes([], [index])


def test_a_context_that_is_made_whole_goes_without_it(manifest: Manifest, tmp_path: Path) -> None:
    told = io.StringIO()
    kept = [spec.name for spec in _specs(manifest, LineReporter(told))]
    assert kept == ["pages", "coarse_rows"]
    assert "index coarse_codes is left out: product codes of coarse rows" in told.getvalue()
