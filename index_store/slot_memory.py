"""Room on a device for rows of contexts whose keys and values are in host memory: how much a context gets.

Rows that a decode step fetches stay in slots on the device for the steps after it
(`decode_engine/kernels/slot_cache.py`). The slots of a context are part of what it takes of the device's memory from
the beginning, though they are made when its first step comes. Every lane that batches are split into has its own.
"""

from __future__ import annotations

from index_store.dtypes import stored_dtype
from index_store.manifest import Manifest

SHARE = 16
"""One row in so many has a slot: 6.25 %, more than most methods attend to at a step."""

SET = 16
"""Slots come in sets of so many."""

TAG_BYTES = 8
"""Of a slot, besides the row: which key it holds, and when it was used last."""

COUNT_BYTES = 64
"""Of a layer and KV head: what was found and fetched."""


def slots_per_head(keys: int) -> int:
    """Slots of every layer and KV head of a context of so many tokens; at least one set."""
    return -(-keys // (SHARE * SET)) * SET


def slot_bytes(manifest: Manifest) -> int:
    """Bytes that the slots of all layers take, for one lane of batches."""
    model = manifest.model
    row = 2 * model.head_dim * stored_dtype(manifest.dtype).torch_dtype.itemsize
    per_head = slots_per_head(manifest.token_count) * (row + TAG_BYTES) + COUNT_BYTES
    return model.layers * model.kv_heads * per_head
