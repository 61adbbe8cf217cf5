"""Windowed RoPE: keys as if at position 0, queries as if a fixed number of tokens later.

The rotary embedding turns equal keys at distant positions apart, so they do not cluster. With it undone they do; a
query is then compared at one relative position, `window`, with all of them (Multipole Attention section 3.1).

The embedding turns dimensions i and i + d/2 at position p by the angle p * inverse_frequencies[i].

Shape legend: H KV heads, T positions, G group heads, F = d/2 frequencies, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError


def check_frequencies(frequencies_F: Tensor | None, head_dim: int) -> Tensor:
    """The frequencies; raises InvalidArgumentError unless there is one for every pair of dimensions."""
    if frequencies_F is None:
        raise InvalidArgumentError(
            "windowed RoPE needs one rotary embedding of all dimensions in every layer, and this model's keys are "
            "turned otherwise, or not in all layers; build the index with window 0"
        )
    if tuple(frequencies_F.shape) != (head_dim // 2,) or head_dim % 2:
        raise InvalidArgumentError(
            f"windowed RoPE needs one inverse frequency for every two of the {head_dim} dimensions, "
            f"got {tuple(frequencies_F.shape)}; build the index with window 0"
        )
    return frequencies_F


def undo_rotary(keys_HTD: Tensor, first_position: int, frequencies_F: Tensor) -> Tensor:
    """Keys [H, T, d] at positions first_position.. turned back to position 0: [H, T, d] float32."""
    end = first_position + keys_HTD.shape[1]
    positions_T = torch.arange(first_position, end, device=keys_HTD.device)
    return _turn(keys_HTD, _angles(-positions_T, frequencies_F))


def move_queries(queries_HTGD: Tensor, position: int, window: int, frequencies_F: Tensor) -> Tensor:
    """Queries [H, T, G, d] at positions position.. turned to position `window`: [H, T, G, d] float32."""
    end = position + queries_HTGD.shape[1]
    positions_T = torch.arange(position, end, device=queries_HTGD.device)
    return _turn(queries_HTGD, _angles(window - positions_T, frequencies_F)[:, None])


def _angles(positions_T: Tensor, frequencies_F: Tensor) -> Tensor:
    # float32 resolves the angle of the fastest dimension to 0.06 rad at a million tokens.
    return positions_T.double()[:, None] * frequencies_F.to(positions_T.device).double()


def _turn(vectors: Tensor, angles: Tensor) -> Tensor:
    """Vectors [..., d] with dimensions i and i + d/2 turned by angles [..., F]."""
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = vectors.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
