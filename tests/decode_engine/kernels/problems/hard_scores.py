"""Keys and queries whose scores are hard to cut: flat, tied, or dwarfed by one key; with tables of the keys.

Shape legend: H KV heads, G query heads per KV head, N keys, m subspaces, C centroids, W slice width, d
head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode_engine.kernels.tables.reference import TableSequence
from decode_engine.kernels.tables.sizes import TableContext, TableSizes, padded_rows, table_shape
from tests.decode_engine.kernels.problems.table_problems import DEVICE

SCORES = ("normal", "flat", "nothing", "repeated", "few", "equal", "sink", "sinks")
HEADS, GROUP, HEAD_DIM = 4, 2, 64


def make_scores(name: str, keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries [1, H, G, d] and keys [H, N, d], float32.

    normal: both at random. flat: short queries; nothing: queries are 0. repeated: 64 keys again and again; few: two
    keys, at random places; equal: one key. sink: key 2, which is searched, is 200 times as long; sinks: one of a
    thousand is.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, HEADS, GROUP, HEAD_DIM, generator=generator)
    k = torch.randn(HEADS, keys, HEAD_DIM, generator=generator)
    places = torch.arange(keys)
    if name == "flat":
        q *= 0.05
    elif name == "nothing":
        q *= 0.0
    elif name == "repeated":
        k = k[:, places % 64]
    elif name == "few":
        k = k[:, torch.randint(0, 2, (keys,), generator=generator)]
    elif name == "equal":
        k = k[:, places * 0]
    elif name == "sink":
        k[:, 2] *= 200.0
    elif name == "sinks":
        k[:, torch.rand(keys, generator=generator) < 0.001] *= 200.0
    return q.to(DEVICE), k.to(DEVICE)


def slices(vectors: Tensor, subspaces: int) -> Tensor:
    """Strided slices of vectors [..., d]: [..., m, W]."""
    return vectors.unflatten(-1, (-1, subspaces)).transpose(-1, -2)


def table_problem(k_HND: Tensor, share: float, pooled: bool) -> tuple[TableSizes, TableSequence]:
    """Every key but the last 64 is searched. Tables are of directions at random, as an index would score them."""
    heads, keys, head_dim = k_HND.shape
    subspaces = 8
    generator = torch.Generator().manual_seed(1)
    centroids = torch.randn(heads, subspaces, 16, head_dim // subspaces, generator=generator)
    centroids_HMCW = torch.nn.functional.normalize(centroids, dim=-1).to(k_HND.device)
    scores_HMCN = torch.einsum("hmcw,hnmw->hmcn", centroids_HMCW, slices(k_HND, subspaces))
    scales_HM = scores_HMCN.abs().amax((2, 3)) / 127.0
    tables = padded_rows((scores_HMCN / scales_HM[..., None, None]).round().to(torch.int8))
    kv = torch.stack([k_HND, k_HND], 2).half().contiguous()
    tail = torch.zeros(heads, 1, 2, head_dim).to(kv)
    sequence = TableSequence(
        TableContext(kv, tables, centroids_HMCW.contiguous(), scales_HM),
        tail,
        0,
        keys - 64,
        0,
        round(share * keys),
    )
    shape = table_shape(keys, heads)
    return TableSizes(heads, GROUP, head_dim, subspaces, 16, keys, pooled, shape=shape), sequence
