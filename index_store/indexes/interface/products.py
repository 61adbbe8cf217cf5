"""Searches for many queries at once on a device, as products of matrices: what a prompt's tokens ask.

Sums of table entries that are looked up query by query read every key's entries once for each query. As products of
matrices they read them once for all queries, and a device multiplies faster than it looks up. All of it is float32.

Shape legend: H KV heads, T query positions, G group heads, Q = T*G queries, K rows or dimensions of a product, M keys
that are scored, n keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from index_store.compiled.launch import on_host

MANY = 64
"""Queries of a KV head from which on tables and codes are multiplied and not looked up, on a device."""

_TILE_BYTES = 256 * 2**20  # of one tile's numbers as float32


def are_many(queries_HTG_: Tensor) -> bool:
    """Whether so many queries [H, T, G, ...] on a device are searched for by products."""
    return not on_host(queries_HTG_) and queries_HTG_.shape[1] * queries_HTG_.shape[2] >= MANY


def by_tiles(
    queries_HQK: Tensor, tile: Callable[[int, int], Tensor], first: int, end: int, width: int
) -> Tensor:
    """[H, Q, M] float32: products of the queries with keys first..end-1, which come as tiles [H, K, n] float32."""
    heads, queries, _ = queries_HQK.shape
    out = torch.empty(heads, queries, max(0, end - first), device=queries_HQK.device)
    step = max(1, _TILE_BYTES // (heads * width * 4))
    for begin in range(first, end, step):
        stop = min(begin + step, end)
        out[..., begin - first : stop - first] = torch.bmm(queries_HQK, tile(begin, stop))
    return out
