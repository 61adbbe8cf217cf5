"""Searches for many queries at once on a device, as products of matrices: what a prompt's tokens ask.

Sums of table entries that are looked up query by query read every key's entries once for each query. As products of
matrices they read them once for all queries, and a device multiplies faster than it looks up. All of it is float32.

Shape legend: H KV heads, T query positions, G group heads, Q = T*G queries, J table rows read per query, S stored table
rows, or subspaces of product codes, B width of a slice, N keys of the context, A appended keys, n keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from index_store.kernels.launch import on_host
from index_store.kernels.table_search import TableReads

MANY = 64
"""Queries of a KV head from which on tables and codes are multiplied and not looked up, on a device."""

_TILE_BYTES = 256 * 2**20  # of one tile's numbers as float32


def are_many(queries_HTG_: Tensor) -> bool:
    """Whether so many queries [H, T, G, ...] on a device are searched for by products."""
    return not on_host(queries_HTG_) and queries_HTG_.shape[1] * queries_HTG_.shape[2] >= MANY


def sum_rows_by_products(reads: TableReads) -> Tensor:
    """`sum_rows`: [H, T, G, M] float32, the weighted sum of table rows for keys first..end-1."""
    heads, positions, group, _ = reads.rows_HTGJ.shape
    stored = reads.tables_HSN.shape[1]
    weights = torch.zeros(heads, positions * group, stored, device=reads.weights_HTGJ.device)
    weights.scatter_add_(2, reads.rows_HTGJ.flatten(1, 2).long(), reads.weights_HTGJ.flatten(1, 2))

    def tile(begin: int, end: int) -> Tensor:
        count = reads.tables_HSN.shape[2]
        own = reads.appended_HSA[..., max(begin - count, 0) : max(end - count, 0)]
        return torch.cat([reads.tables_HSN[..., begin:end], own], dim=2).float()

    found = _by_tiles(weights, tile, reads.first, reads.end, stored)
    return found.view(heads, positions, group, -1)


def score_codes_by_products(
    codes: tuple[Tensor, Tensor], slices_HTGSB: Tensor, codebooks_HSWB: Tensor, first: int, end: int
) -> Tensor:
    """`score_codes`: [H, T, G, M] float32, the products of queries with keys first..end-1 as their codes have them.

    codes: of the context's keys [H, N, S], and of appended ones [H, A, S]. Keys are put together from their codewords,
    a tile at a time.
    """
    shared_HNS, appended_HAS = codes
    count = shared_HNS.shape[1]
    heads, positions, group, subspaces, width = slices_HTGSB.shape
    head_H11 = torch.arange(heads, device=slices_HTGSB.device)[:, None, None]
    subspace_S1 = torch.arange(subspaces, device=slices_HTGSB.device)[:, None]

    def tile(begin: int, stop: int) -> Tensor:
        own = appended_HAS[:, max(begin - count, 0) : max(stop - count, 0)]
        codes_HSn = torch.cat([shared_HNS[:, begin:stop], own], dim=1).long().transpose(1, 2)
        return codebooks_HSWB[head_H11, subspace_S1, codes_HSn].transpose(2, 3).flatten(1, 2)

    queries = slices_HTGSB.reshape(heads, positions * group, subspaces * width)
    return _by_tiles(queries, tile, first, end, subspaces * width).view(heads, positions, group, -1)


def _by_tiles(
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
