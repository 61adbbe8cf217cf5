"""Entries of arrays: their checksums, and paths that stay inside of a context's folder."""

from __future__ import annotations

import google_crc32c
import pytest
import torch

from index_store.errors import (
    ManifestError,
)
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import MANIFESTS
from tests.index_store.store.manifest_documents import WHERE
from tests.support.store import SyntheticContext


def test_checksums_follow_the_chunks(context: SyntheticContext) -> None:
    kv = context.manifest.kv
    assert kv.layout == context.draft.kv
    assert kv.layout.checksums is None
    assert len(kv.checksums or "") == 8 * 3 * 2
    for layer, head, *_ in kv.chunk_indices():
        raw = context.kv[layer, head].view(torch.int16).numpy().tobytes()
        assert kv.checksum((layer, head)) == kv.checksum((layer, head, 0, 0, 0)) == google_crc32c.value(raw)
    assert kv.checksum((1,)) == kv.checksum((1, 0))
    assert MANIFESTS.parse(MANIFESTS.render(context.manifest), WHERE).kv.checksums == kv.checksums


@pytest.mark.parametrize("path", ["", "/kv", "a//b", "../x", "a/../b", "a/.hidden", "a\\b", "a b", "ä"])
def test_array_paths_stay_inside(path: str) -> None:
    with pytest.raises(ManifestError, match="'path'"):
        ArrayEntry(path, (1,), (1,), "int8")
