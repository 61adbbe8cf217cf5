"""Product codes, built on the device (on the host: `index_store.indexes.product_codes.index`).

Shape legend: H KV heads, N keys, S subspaces, W codewords, B = d/S slice width, Y = H*S problems of k-means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.kmeans.kmeans_triton import fill_rows, find_clusters

_BYTES_AT_ONCE = 2**30  # of keys' slices, gathered subspace by subspace


def build_device_codes(
    keys_HND: Tensor, dims_SB: Tensor, *, codewords: int, iterations: int, seed: int
) -> dict[str, Tensor]:
    """`codes` [H, N, S] uint8 and `codebooks` [H, S, W, B] float32 on the device of the keys.

    k-means of the keys' slices, all subspaces of as many heads at once as fit into a GiB. Codebooks have values of the
    keys' dtype, as they are compared. Keys must be finite.
    """
    heads, count, _ = keys_HND.shape
    dims = dims_SB.to(keys_HND.device, non_blocking=True)
    subspaces, width = dims.shape
    blocks = [(0, count, 0, codewords)]
    slice_bytes = max(16, width) * keys_HND.element_size() * subspaces * count
    together = max(1, _BYTES_AT_ONCE // slice_bytes)
    codes, codebooks = [], []
    for first in range(0, heads, together):
        slices = fill_rows(keys_HND[first : first + together][..., dims]).transpose(1, 2)
        own = len(slices)
        slices_YNB = slices.reshape(own * subspaces, count, -1)
        assignment, centroids = find_clusters(slices_YNB, blocks, iterations, "euclidean", seed + first)
        codes.append(assignment.view(own, subspaces, count).to(torch.uint8).transpose(1, 2))
        codebooks.append(centroids[..., :width].reshape(own, subspaces, codewords, width).float())
    return {"codes": torch.cat(codes).contiguous(), "codebooks": torch.cat(codebooks).contiguous()}
