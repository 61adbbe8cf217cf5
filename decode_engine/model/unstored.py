"""Contexts that were never stored: keys and values in memory, and a manifest that says as much about them."""

from __future__ import annotations

from datetime import UTC, datetime

import torch

from index_store.memory.resident import ResidentContext
from index_store.store.description.array_entry import (
    kv_entry,
    plane_entry,
    state_entry,
    tokens_entry,
    window_entry,
)
from index_store.store.description.context_id import UNSTORED, ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8, stored_dtype
from index_store.store.description.manifest import IndexEntry, Manifest


def unstored_manifest(
    model: ModelIdentity,
    dtype: str,
    tokens: int,
    method: str = "full",
    indexes: tuple[IndexEntry, ...] = (),
    rows: str = AS_DTYPE,
) -> Manifest:
    """Of a context of so many tokens, perhaps none, that is nowhere on disk. rows: one of `ROW_CODINGS`."""
    described = max(1, tokens)
    return Manifest(
        id=UNSTORED,
        name="unstored",
        created_at=datetime.now(UTC),
        expires_at=None,
        model=model,
        dtype=dtype,
        token_count=tokens,
        methods=(method,),
        dense_layers=(),
        selection_errors=(),
        tokens=tokens_entry(described),
        kv=plane_entry(model, described) if rows == INT8 else kv_entry(model, described, dtype),
        window=window_entry(model, described, dtype),
        state=state_entry(model, dtype),
        indexes=indexes,
        prefill={},
        seconds={},
    )


def no_context(model: ModelIdentity, dtype: str, device: torch.device) -> ResidentContext:
    """The context of no tokens, on which sessions of prompts run that continue none. It takes no memory."""
    like = stored_dtype(dtype).torch_dtype
    shapes = {layer: model.shape(layer) for layer in range(model.layers)}
    return ResidentContext(
        unstored_manifest(model, dtype, 0),
        torch.zeros(0, dtype=torch.int64, device=device),
        {
            layer: torch.zeros(shape.kv_heads, 0, 2, shape.head_dim, dtype=like, device=device)
            for layer, shape in shapes.items()
        },
        {},
        device=device,
    )
