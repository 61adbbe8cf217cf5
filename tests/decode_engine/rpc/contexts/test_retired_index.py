"""A stored context with an index that was retired opens and serves all other methods; the index is refused by name."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.contexts.defaults import default_method, supported_methods
from index_store.cli.console import LineReporter
from index_store.errors import ContextCorruptError, InvalidArgumentError, MethodUnsupportedError
from index_store.memory.arena import Arena
from index_store.methods.method import INDEX_SPECS
from index_store.methods.presets import METHODS, get_method
from index_store.store.catalog import Store, TunedDefault
from index_store.store.description.manifest import Manifest
from index_store.store.zarr_io import chunk_path
from prefill_worker.build.index_choice import choose_indexes
from prefill_worker.config import AddIndexConfig
from prefill_worker.jobs.added_indexes import run_add_index
from prefill_worker.jobs.children import _specs
from tests.decode_engine.conftest import Library, make_library
from tests.support.serving.service import loaded
from tests.support.store import RETIRED_INDEXES, add_index, flip

METHOD_OF = {"product_codes": "pq", "coarse_codes": "refined-codes"}
WORDS = {
    name: f"the index {name} and the method {method} were retired on 2026-11-2[78]; take refined"
    for name, method in METHOD_OF.items()
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("retired"))


@pytest.fixture(scope="module", params=METHOD_OF)
def retired(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def manifest(library: Library, retired: str) -> Manifest:
    """Made for the retired method first, and tuned to it."""
    id_ = library.prefill(retired, text=f"{retired} once.", method=("quest",), index=("coarse_rows",))
    store = Store(library.store)
    present, (kind, parameters) = store.manifest(id_), RETIRED_INDEXES[retired]
    methods = (METHOD_OF[retired], "quest")
    found, _ = add_index(store, present, retired, kind=kind, parameters=parameters, methods=methods)
    tuned = TunedDefault(found.id, methods[0], 0.01, None, None, "mass", 0.9, {}, datetime.now(UTC))
    store.set_default_method(found.id, tuned)
    return found


def test_all_other_methods_are_served(library: Library, manifest: Manifest, retired: str) -> None:
    name = f"contexts/{manifest.id}"
    with loaded(library.config()) as server, Client(server.address) as client:
        shown = client.get_context(name)
        assert shown.default_method == "quest"
        for method in (None, "quest", "refined"):
            generation = client.generate(name, text="Who?", max_tokens=3, method=method)
            generation.read()
            assert generation.summary.completion_tokens == 3
        for remainder in ("", "+dropped", "@recent=9"):
            with pytest.raises(MethodUnsupportedError, match=WORDS[retired]):
                client.generate(
                    name, text="Who?", max_tokens=3, method=f"{METHOD_OF[retired]}{remainder}"
                ).read()


def test_the_index_is_refused_by_name(library: Library, manifest: Manifest, retired: str) -> None:
    words = WORDS[retired]
    with (
        Arena(1 << 28).acquire(Store(library.store), manifest.id) as context,
        pytest.raises(InvalidArgumentError, match=words),
    ):
        context.index(retired, 1)
    over = replace(METHODS["refined"], index=replace(INDEX_SPECS["coarse_rows"], name=retired))
    with pytest.raises(InvalidArgumentError, match=words):
        over.on(manifest)
    method = METHOD_OF[retired]
    with pytest.raises(MethodUnsupportedError, match=f"method is '{method}@recent=9': .*{words}"):
        get_method(f"{method}@recent=9")
    for index in (retired, f"{retired}:key_bits=4"):
        with pytest.raises(InvalidArgumentError, match=f"--index is '{index}': .*{words}"):
            choose_indexes([], [index])


def test_a_context_that_is_made_whole_goes_without_it(manifest: Manifest, retired: str) -> None:
    told = io.StringIO()
    kept = [spec.name for spec in _specs(manifest, LineReporter(told))]
    assert kept == ["pages", "coarse_rows"]
    assert f"index {retired} is left out: product codes" in told.getvalue()


def test_another_index_may_be_added(library: Library, manifest: Manifest, retired: str) -> None:
    config = AddIndexConfig(manifest.id, Path(library.store), method=("refined-3",))
    added = run_add_index(config, LineReporter(io.StringIO())).manifest
    assert [index.name for index in added.indexes] == ["pages", "coarse_rows", retired, "coarse_rows_3"]
    assert Store(library.store).verify(manifest.id) == []


def test_its_arrays_are_verified_as_all_others(library: Library, manifest: Manifest, retired: str) -> None:
    store = Store(library.store)
    entry = next(index for index in manifest.indexes if index.name == retired)
    chunk = chunk_path(store.path / "contexts" / manifest.id, entry.arrays[0], (0, 1))
    flip(chunk, 1, 6)
    assert [retired in str(each) for each in store.verify(manifest.id)] == [True]
    with pytest.raises(ContextCorruptError), Arena(1 << 28).acquire(store, manifest.id):
        pass


DIPOLE = "the remainder dipole and the index dipole_clusters were retired on 2026-11-28"


def test_without_the_dipole_all_else_goes_on(tmp_path: Path) -> None:
    library = make_library(tmp_path)
    store = Store(library.store)
    present = store.manifest(library.prefill("old", method=("quest",)))
    parameters = {**INDEX_SPECS["remainder_clusters"].parameters, "moments": "full"}
    methods = ("quest+dipole", "quest")
    found, _ = add_index(
        store, present, "dipole_clusters", kind="key_clusters", parameters=parameters, methods=methods
    )
    assert default_method(found, None).expression == "quest"
    assert "quest" in supported_methods(found)
    with Arena(1 << 28).acquire(store, found.id) as context:
        assert context.index("pages", 1) is not None
        with pytest.raises(InvalidArgumentError, match=DIPOLE):
            context.index("dipole_clusters", 1)
    told = io.StringIO()
    assert [spec.name for spec in _specs(found, LineReporter(told))] == ["pages"]
    assert f"index dipole_clusters is left out: {DIPOLE}" in told.getvalue()
