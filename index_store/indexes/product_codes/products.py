"""Product codes scored for many queries at once on a device, as products of matrices.

Shape legend: H KV heads, T query positions, G group heads, S subspaces, B width of a slice, W codewords, N keys of the
context, A appended keys, M keys that are scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.interface.products import by_tiles


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
    return by_tiles(queries, tile, first, end, subspaces * width).view(heads, positions, group, -1)
