"""Whatever JSON a stored file holds: it is accepted and can be used, or refused by name. It hides no other context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from index_store.errors import (
    ContextCorruptError,
    ContextNotFoundError,
    FormatVersionError,
    ManifestError,
)
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from index_store.store.description.manifest import MANIFESTS
from index_store.store.description.sealed import render_document
from index_store.store.listing import BrokenContext
from tests.support.serving.many_contexts import write_manifests
from tests.support.store import SyntheticContext, synthetic_context

BAD = {"empty": b"", "newer": render_document({"format_version": 2**40})}


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_context_hides_no_other(tmp_path: Path, context: SyntheticContext, kind: str) -> None:
    store = Store(tmp_path / "store", create=True)
    context.write(store)
    (bad,) = write_manifests(store.path, 1)
    path = store.path / "contexts" / bad / "manifest.json"
    path.write_bytes(BAD[kind])
    entry, broken = store.entries()
    assert entry == context.manifest
    assert isinstance(broken, BrokenContext)
    assert (broken.id, str(path) in broken.error.message) == (bad, True)
    assert store.resolve("handbook") == context.id
    assert store.resolve(bad[:10]) == bad
    assert clean_up(store) == []
    assert store.verify(context.id) == []
    with pytest.raises((ContextCorruptError, FormatVersionError)):
        store.manifest(bad)
    store.delete(bad)
    with pytest.raises(ContextNotFoundError):
        store.manifest(bad)
    assert store.entries() == [context.manifest]


def test_a_manifest_of_absurd_size_is_not_read(stored: Store, context: SyntheticContext) -> None:
    path = stored.path / "contexts" / context.id / "manifest.json"
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole, which takes no space
    with pytest.raises(ManifestError, match="a file of more than 67108864 bytes"):
        stored.manifest(context.id)


def test_sizes_that_no_memory_holds_are_not_allocated(store: Store) -> None:
    """Verifying what claims to be immense says which file is too short."""
    context = synthetic_context()
    document = json.loads(MANIFESTS.render(context.manifest))
    del document["checksum"]
    tokens = 2**40
    document["model"]["max_positions"] = document["token_count"] = tokens
    document["tokens"].update(shape=[tokens], chunks=[tokens])
    for field in ("shape", "chunks"):
        document["kv"][field][2] = tokens
    context.write(store)
    path = store.path / "contexts" / context.id / "manifest.json"
    path.write_bytes(render_document(document))
    errors = store.verify(context.id)
    assert {"CHUNK_TRUNCATED", "ARRAY_METADATA_INVALID"} == {error.reason for error in errors}
