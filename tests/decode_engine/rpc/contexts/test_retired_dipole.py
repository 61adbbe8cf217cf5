"""A stored context with dipole clusters opens, and goes on without them; they are refused by name."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from decode_engine.rpc.contexts.defaults import default_method, supported_methods
from index_store.cli.console import LineReporter
from index_store.errors import InvalidArgumentError
from index_store.memory.arena import Arena
from index_store.methods.method import INDEX_SPECS
from index_store.store.catalog import Store
from prefill_worker.jobs.children import _specs
from tests.decode_engine.conftest import make_library
from tests.support.store import add_index

WORDS = "the remainder dipole and the index dipole_clusters were retired on 2026-11-28"


def test_all_else_goes_on(tmp_path: Path) -> None:
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
        with pytest.raises(InvalidArgumentError, match=WORDS):
            context.index("dipole_clusters", 1)
    told = io.StringIO()
    assert [spec.name for spec in _specs(found, LineReporter(told))] == ["pages"]
    assert f"index dipole_clusters is left out: {WORDS}" in told.getvalue()
