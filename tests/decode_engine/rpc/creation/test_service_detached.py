"""Children that are made whole answer as before, without their parents."""

from __future__ import annotations

import io

import pytest

from decode_engine.rpc.client import Client, Keep
from index_store.cli.console import LineReporter
from index_store.errors import InvalidArgumentError
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from prefill_worker.config import AddIndexConfig, DetachConfig
from prefill_worker.jobs.added_indexes import run_add_index
from prefill_worker.jobs.children import run_detach
from tests.decode_engine.conftest import Library, make_library
from tests.support.serving.service import loaded

MORE = "Every winter the harbour froze, and the keeper walked over the ice to the ships. "


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("detached"))


def tokens(client: Client, context: str, method: str) -> list[int]:
    with client.generate(context, text="The lamp", max_tokens=12, method=method) as generation:
        return [token for piece in generation for token in piece.token_ids]


def test_a_child_made_whole_needs_nobody(library: Library) -> None:
    root = "contexts/" + library.prefill("root", method=("csattention", "quest", "multipole"))
    with loaded(library.config()) as server, Client(server.address) as client:
        keep = Keep(name="long", prompt_only=True)
        with client.generate(root, text=MORE * 4, method="full", keep=keep) as generation:
            generation.read()
        child = generation.summary.kept_context
        expected = tokens(client, child, "full")
        with pytest.raises(InvalidArgumentError, match="continues; add them there"):
            run_add_index(AddIndexConfig(child, library.store, index=("pages",)), LineReporter(io.StringIO()))
        running = client.generate(child, text="The lamp", max_tokens=400, method="full")
        pieces = iter(running)
        begun = [*next(pieces).token_ids]
        changed = client.update_context(child, labels={"team": "sea"})
        report = run_detach(DetachConfig("long", library.store, device="cpu"), LineReporter(io.StringIO()))
        whole = client.find_context("long")
        assert whole.name == f"contexts/{report.manifest.id}" == child
        assert (whole.parent, whole.labels) == ("", {"team": "sea"})
        assert (whole.token_count, whole.create_time) == (changed.token_count, changed.create_time)
        assert Store(library.store).verify(report.manifest.id) == []
        again = client.generate(root, text=MORE * 4, method="full", keep=keep)
        again.read()
        assert again.summary.kept_context == child
        assert client.get_context(child).parent == ""
        (replaced,) = {left.kind for left in clean_up(Store(library.store))}
        assert (replaced, Store(library.store).verify(report.manifest.id)) == ("array", [])
        begun += [token for piece in pieces for token in piece.token_ids]
        assert (len(begun), begun[:12]) == (400, expected)
        client.delete_context(root)
        assert tokens(client, whole.name, "full") == expected
        for method in ("csattention", "quest", "multipole"):
            assert method in whole.methods
            assert len(tokens(client, whole.name, method)) == 12
            with client.generate(
                whole.name, text="The lamp", max_tokens=12, method=method, keep_ratio=1.0
            ) as generation:
                found = [token for piece in generation for token in piece.token_ids]
            assert found == expected, method
    with pytest.raises(InvalidArgumentError, match="stands alone already"):
        run_detach(DetachConfig("long", library.store), LineReporter(io.StringIO()))
