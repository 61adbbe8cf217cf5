"""Queries, keys and values that lie in clusters."""

from __future__ import annotations

import torch
from torch import Tensor


def make_points(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 0.4, centres: int = 8
) -> Tensor:
    """[B, H, N, D] around centres of their own per head."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, count, dim = shape
    middles = torch.randn(batch, heads, centres, dim, generator=generator, dtype=torch.float64)
    own = torch.randint(0, centres, (batch, heads, count, 1), generator=generator)
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (middles.gather(2, own.expand(-1, -1, -1, dim)) + spread * noise).to(dtype)


def make_inputs(
    batch: int, heads: int, kv_heads: int, count: int, dim: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; values have no centres."""
    query = make_points(batch, heads, count, dim, dtype=dtype, seed=1)
    key = make_points(batch, kv_heads, count, dim, dtype=dtype, seed=2)
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(batch, kv_heads, count, dim, generator=generator, dtype=torch.float64)
    return query, key, value.to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, as a ratio of norms."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-12))
