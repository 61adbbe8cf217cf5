"""Children that are made whole answer as before, without their parents."""

from __future__ import annotations

import io

import pytest

from decode_engine.rpc.client import Client, Keep
from decode_engine.rpc.server import DecodeServer
from index_store.cli.progress import LineReporter
from index_store.errors import ContextNotFoundError, InvalidArgumentError
from prefill_worker.config import AddIndexConfig, DetachConfig
from prefill_worker.jobs.added_indexes import run_add_index
from prefill_worker.jobs.detached import run_detach
from tests.decode_engine.conftest import Library, make_library

MORE = "Every winter the harbour froze, and the keeper walked over the ice to the ships. "


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("detached"))


def tokens(client: Client, context: str, method: str) -> list[int]:
    with client.generate(context, text="The lamp", max_tokens=12, method=method) as generation:
        return [token for piece in generation for token in piece.token_ids]


def test_a_child_made_whole_needs_nobody(library: Library) -> None:
    root = "contexts/" + library.prefill("root", method=("csattention", "quest", "multipole"))
    with DecodeServer(library.config(warm_up=False)) as server, Client(server.address) as client:
        server.load()
        keep = Keep(name="long", prompt_only=True)
        with client.generate(root, text=MORE * 4, method="full", keep=keep) as generation:
            generation.read()
        child = generation.summary.kept_context
        expected = tokens(client, child, "full")
        with pytest.raises(InvalidArgumentError, match="continues; add them there"):
            run_add_index(AddIndexConfig(child, library.store, index=("pages",)), LineReporter(io.StringIO()))
        report = run_detach(DetachConfig("long", library.store, device="cpu"), LineReporter(io.StringIO()))
        with pytest.raises(ContextNotFoundError):
            client.get_context(child)
        whole = client.find_context("long")
        assert whole.name == f"contexts/{report.manifest.id}" != child
        assert (whole.parent, whole.token_count) == ("", client.get_context(root).token_count + 81 * 4)
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
