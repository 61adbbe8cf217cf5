"""Sums of table rows for many queries at once on a device, as products of matrices.

Shape legend: H KV heads, T query positions, G group heads, J table rows read per query, S stored table rows, N keys of
the context, A appended keys, M keys that are scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.interface.products import by_tiles
from index_store.indexes.query_tables.search_numba import TableReads


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

    found = by_tiles(weights, tile, reads.first, reads.end, stored)
    return found.view(heads, positions, group, -1)
