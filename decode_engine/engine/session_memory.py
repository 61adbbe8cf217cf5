"""How much memory a request may come to hold, estimated before it is admitted, and how much there is for all.

A session holds its tail in every layer, and what it appends to the indexes in layers that search. Both grow by
doubling, and so does the estimate, which is for the whole prompt and for all tokens that the request allows, of which
fewer may be generated. What one step computes with and gives back at once is not in it.
"""

from __future__ import annotations

import torch

from decode_engine.layers.tail import Tail
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import FittedMethod
from index_store.store.dtypes import stored_dtype

SHARE = 4
"""Sessions may hold one part in this many of the memory that is free when the model has been loaded."""

_LEAST_ROWS = 64  # of what grows in an index's extension
_LEAST_ENTRIES = 16  # of what is inserted into a list
_USUAL_PIECE = 256  # keys appended at once


def session_bytes(fitted: FittedMethod, tokens: int) -> int:
    """Bytes that a session of the method over its context may come to hold when it adds `tokens`."""
    model = fitted.manifest.model
    dtype = stored_dtype(fitted.manifest.dtype).torch_dtype
    total = model.layers * _tail_bytes(model.kv_heads, model.head_dim, dtype, tokens)
    for spec in (fitted.method.index, fitted.partition):
        if spec is not None:
            total += len(fitted.searching) * model.kv_heads * _extension_bytes(spec, model.head_dim, tokens)
    return total


def _tail_bytes(heads: int, head_dim: int, dtype: torch.dtype, tokens: int) -> int:
    tail = Tail(heads, head_dim, dtype, device="meta")
    while tail.capacity < tokens:
        tail.reserve(tail.capacity + 1)
    return tail.nbytes


def _extension_bytes(spec: IndexSpec, head_dim: int, tokens: int) -> int:
    """Of one layer and KV head: what joins the index takes as much as what is in it, and clusters keep more."""
    kind = INDEX_KINDS[spec.kind]
    rows = _grown(tokens, _LEAST_ROWS)
    if not spec.stored:
        return 4 * head_dim * tokens  # float32 copies of the keys themselves
    total = rows * kind.bytes_per_token(spec.parameters, head_dim)
    if kind.partitions:
        block = int(spec.parameters["block"])
        open_keys = min(rows, block + block // 2) if block else rows
        total += open_keys * 2 * 4 * head_dim  # float32 keys and values of the block that is still clustered
    if spec.parameters.get("layout") == "lists":
        lists = int(spec.parameters["subspaces"]) * int(spec.parameters["centroids"])
        piece = _grown(
            min(tokens, _USUAL_PIECE), _LEAST_ENTRIES
        )  # each list makes room for all keys of one append
        total = max(total, 6 * lists * piece) + 8 * lists
    return int(total)


def _grown(rows: int, least: int) -> int:
    """What doubling makes of `least` until all rows have room."""
    while least < rows:
        least *= 2
    return least
