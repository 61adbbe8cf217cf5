"""Manifests of newer and older versions: read, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from index_store.errors import (
    FormatVersionError,
    ManifestError,
)
from index_store.store.description.manifest_json import parse_manifest, render_document, render_manifest
from tests.index_store.store.manifest_documents import WHERE, document
from tests.support.store import SyntheticContext


def test_newer_version(context: SyntheticContext) -> None:
    newer = document(context) | {"format_version": 6, "something_new": [1]}
    with pytest.raises(
        FormatVersionError, match=f"{WHERE}.*version 6.*reads versions 2 to 5; update sparsekv"
    ) as caught:
        parse_manifest(render_document(newer), WHERE)
    assert caught.value.metadata == {"found": "6", "expected": "5", "path": WHERE}


def test_the_version_before(context: SyntheticContext) -> None:
    """Which had the salt in clear text; nothing but the version remains of it."""
    older = document(context) | {"format_version": 2, "salt": "owner\n7"}
    read = parse_manifest(render_document(older), WHERE)
    assert read == replace(context.manifest, format_version=2)
    assert render_manifest(read) == render_manifest(context.manifest)
    with pytest.raises(ManifestError, match="'salt' is missing"):
        parse_manifest(render_document(document(context) | {"format_version": 2}), WHERE)
    with pytest.raises(ManifestError, match="'salt' is 'owner', expected no such field"):
        parse_manifest(render_document(document(context) | {"salt": "owner"}), WHERE)


def test_newer_version_without_our_checksum(context: SyntheticContext) -> None:
    newer = document(context) | {"format_version": 6}
    with pytest.raises(FormatVersionError, match="version 6"):
        parse_manifest(json.dumps(newer).encode(), WHERE)


def test_contexts_of_the_version_before_are_read(context: SyntheticContext) -> None:
    """Without windows it was written in the same way."""
    older = document(context) | {"format_version": 2, "salt": ""}
    manifest = parse_manifest(render_document(older), WHERE)
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
        match=f"{WHERE}.*version 1, .* reads versions 2 to 5; the context was made by an older sparsekv: prefill",
    ):
        parse_manifest(render_document(older), WHERE)
