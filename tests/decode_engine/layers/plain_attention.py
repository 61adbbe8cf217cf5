"""Rows of a small layer at random, and full attention to them in float64."""

from __future__ import annotations

import torch
from torch import Tensor

H, G, D = 2, 3, 16


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, T, G, D] scaled, keys and values [H, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(H, count, n, D, generator=generator) for n in (G, 1, 1))
    return q * 2 / D**0.5, k[:, :, 0], v[:, :, 0]


def context(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(H, count, 2, D, generator=torch.Generator().manual_seed(count)).to(dtype)


def reference(q: Tensor, kv: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Full causal attention of the queries at position.. over context and tail, in float64."""
    k = torch.cat([kv[:, :, 0].double(), keys.double()], dim=1)
    v = torch.cat([kv[:, :, 1].double(), values.double()], dim=1)
    logits = torch.einsum("htgd,hnd->htgn", q.double(), k)
    hidden = torch.arange(k.shape[1]) > position + torch.arange(q.shape[1])[:, None]
    weights = logits.masked_fill(hidden[None, :, None], -torch.inf).softmax(-1)
    return torch.einsum("htgn,hnd->htgd", weights, v).float()
