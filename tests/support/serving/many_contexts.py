"""Stores with thousands of contexts that have a manifest and nothing else: enough to list and to find them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from index_store.store.description.json_fields import render_document
from index_store.store.description.manifest import MANIFESTS
from tests.support.store import CREATED, SyntheticContext, synthetic_context


def write_manifests(
    store: Path, count: int, context: SyntheticContext | None = None, first: int = 0
) -> Sequence[str]:
    """Adds contexts `book 0`, `book 1`, ... to a store, each an hour younger than the one before; returns their ids."""
    document = json.loads(MANIFESTS.render((context or synthetic_context()).manifest))
    del document["checksum"]
    ids = []
    for number in range(first, first + count):
        id_ = f"{number:08x}" + "c" * 56
        created = CREATED + timedelta(hours=number)
        changed = {"id": id_, "name": f"book {number}", "created_at": created.isoformat()}
        folder = store / "contexts" / id_
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(render_document(document | changed))
        ids.append(id_)
    return ids
