"""Contexts that were never stored: keys and values in memory, and a manifest that says as much about them."""

from __future__ import annotations

from datetime import UTC, datetime

from index_store.store.description.array_shapes import kv_entry, plane_entry, tokens_entry, window_entry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8
from index_store.store.description.manifest import IndexEntry, Manifest


def unstored_manifest(
    model: ModelIdentity,
    dtype: str,
    tokens: int,
    method: str = "full",
    indexes: tuple[IndexEntry, ...] = (),
    rows: str = AS_DTYPE,
) -> Manifest:
    """Of a context of so many tokens that is nowhere on disk. rows: one of `ROW_CODINGS`."""
    return Manifest(
        id="0" * 64,
        name="unstored",
        created_at=datetime.now(UTC),
        expires_at=None,
        model=model,
        dtype=dtype,
        token_count=tokens,
        methods=(method,),
        dense_layers=(),
        selection_errors=(),
        tokens=tokens_entry(tokens),
        kv=plane_entry(model, tokens) if rows == INT8 else kv_entry(model, tokens, dtype),
        window=window_entry(model, tokens, dtype),
        indexes=indexes,
        prefill={},
        seconds={},
    )
