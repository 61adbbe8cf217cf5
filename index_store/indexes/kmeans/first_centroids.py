"""Where k-means of blocks of vectors starts.

Shape legend: H heads, N vectors, T blocks, C clusters, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

METRICS = ("cosine", "euclidean")
"""What k-means of keys compares: directions only, or the vectors as they are."""

Blocks = Sequence[tuple[int, int, int, int]]
"""Vectors first..end-1 and their clusters first..end-1, per block."""


def first_centroids(vectors_HND: Tensor, table_TX: Tensor, blocks: Blocks, seed: int) -> Tensor:
    """[H, C, D] float32: one vector out of every stretch of a block, at random."""
    clusters = blocks[-1][3]
    sizes_T = table_TX[:, 3] - table_TX[:, 2]
    own_CX = table_TX.repeat_interleave(sizes_T, dim=0, output_size=clusters).double()
    first_C, end_C, begin_C, stop_C = own_CX.unbind(1)
    generator = torch.Generator(table_TX.device).manual_seed(seed)
    shape = (len(vectors_HND), clusters)
    drawn_HC = torch.rand(shape, generator=generator, dtype=torch.float64, device=table_TX.device)
    number_C = torch.arange(clusters, device=table_TX.device) - begin_C
    size_C, own_C = end_C - first_C, stop_C - begin_C
    spread_HC = (number_C + drawn_HC) * size_C / own_C
    # As many clusters as vectors: each vector once.
    places_HC = first_C + torch.where(size_C > own_C, spread_HC, torch.minimum(number_C, size_C - 1))
    places_HC = places_HC.long().clamp_(min=0, max=max(0, vectors_HND.shape[1] - 1))
    return vectors_HND.gather(1, places_HC[..., None].expand(-1, -1, vectors_HND.shape[2])).float()
