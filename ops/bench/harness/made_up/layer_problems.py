"""Keys, values and queries of one attention layer in host memory, random ones or those of the packaged reader.

Shape legend: H KV heads, G query heads per KV head, N keys, d head dim, Q queries that take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.made_up.trained_rows import TrainedRows, record_rows


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention layer."""

    kv_heads: int
    group: int
    head_dim: int


_TRAINED = 31 * 1024  # tokens that the reader takes before prompts
SHAPES = {"llama-3.1-8b": Shape(8, 4, 128), "reader": Shape(2, 2, 64)}


@dataclass(frozen=True, slots=True)
class Problem:
    """Keys and values [H, N, 2, d] bfloat16; queries [Q, H, 1, G, d] float32, scaled by 1/sqrt(d).

    least_share: of the best keys' score that selections hold: rounding changes more where logits spread far.
    """

    kv_HN2D: Tensor
    queries: Tensor
    least_share: float = 0.998

    @property
    def length(self) -> int:
        return self.kv_HN2D.shape[1]


def make_problem(
    shape: Shape, length: int, queries: int, seed: int, trained: TrainedRows | None = None
) -> Problem:
    if trained is not None:
        rows = trained.q(0, shape.kv_heads, queries * shape.group, shape.head_dim)
        q = rows.view(shape.kv_heads, queries, 1, shape.group, shape.head_dim).transpose(0, 1).contiguous()
        kv = trained.kv(0, shape.kv_heads, length, shape.head_dim)
        return Problem(kv.bfloat16(), q * shape.head_dim**-0.5, 0.9)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape.kv_heads, length, 2, shape.head_dim, generator=generator).bfloat16()
    q = torch.randn(queries, shape.kv_heads, 1, shape.group, shape.head_dim, generator=generator)
    return Problem(kv, 2.0 * q * shape.head_dim**-0.5)


def record_problems(longest: int, queries: int) -> TrainedRows:
    """What `make_problem` takes for contexts of up to so many tokens."""
    sessions = queries * max(shape.group for shape in SHAPES.values()) // 2  # of two query heads each
    return record_rows(min(_TRAINED, longest), "cpu", sessions)
