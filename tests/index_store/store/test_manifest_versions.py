"""Manifests of newer and older versions: read, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from index_store.errors import (
    FormatVersionError,
    ManifestError,
)
from index_store.store.description.manifest import MANIFESTS
from index_store.store.description.sealed import render_document
from tests.index_store.store.manifest_documents import WHERE, document
from tests.support.store import SyntheticContext


def test_the_version_before(context: SyntheticContext) -> None:
    """Which had the salt in clear text; nothing but the version remains of it."""
    older = document(context) | {"format_version": 2, "salt": "owner\n7"}
    read = MANIFESTS.parse(render_document(older), WHERE)
    assert read == replace(context.manifest, format_version=2)
    assert MANIFESTS.render(read) == MANIFESTS.render(context.manifest)
    with pytest.raises(ManifestError, match="'salt' is None, expected a text"):
        MANIFESTS.parse(render_document(document(context) | {"format_version": 2}), WHERE)
    with pytest.raises(ManifestError, match="'salt' is 'owner', expected no such field"):
        MANIFESTS.parse(render_document(document(context) | {"salt": "owner"}), WHERE)


def test_contexts_of_the_version_before_are_read(context: SyntheticContext) -> None:
    """Without windows it was written in the same way."""
    older = document(context) | {"format_version": 2, "salt": ""}
    manifest = MANIFESTS.parse(render_document(older), WHERE)
    assert manifest == replace(context.manifest, format_version=2)
    assert manifest.model.full_layers == (0, 1, 2)


def test_older_version(context: SyntheticContext) -> None:
    """As version 1 wrote it: without the fields that came later."""
    older = document(context) | {"format_version": 1}
    del older["queries"], older["query_positions"]
    for index in older["indexes"]:
        del index["thresholds"]
    with pytest.raises(
        FormatVersionError,
        match=f"{WHERE}.*version 1, .* reads versions 2 to 6; it was made by an older sparsekv: delete",
    ):
        MANIFESTS.parse(render_document(older), WHERE)
