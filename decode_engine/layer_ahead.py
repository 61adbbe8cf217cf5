"""Predicts a layer's queries one layer early, from the hidden state that enters the layer before it.

The residual stream changes little from layer to layer, so layer l + 1's norm, query projection and rotary embedding,
applied to what enters layer l, give nearly its queries. Their search can then run while layer l computes.

Shape legend: B batch rows, T positions, Hq query heads, H KV heads, G group heads, E hidden size, d head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from index_store.errors import MethodUnsupportedError


@contextmanager
def predicted_queries(model: nn.Module, store: dict[int, Tensor]) -> Iterator[None]:
    """While it lasts, every forward of the model puts layer l's predicted queries into store[l], for l >= 1.

    [B, Hq, T, d], in the model's dtype, after the rotary embedding, not scaled. Raises MethodUnsupportedError for a
    model whose layers have other parts than an input norm and a separate query projection with a rotary embedding.
    """
    layers = list(_decoder_layers(model))
    hooks = [
        layer.register_forward_pre_hook(_Predictor(following, number + 1, store), with_kwargs=True)
        for number, (layer, following) in enumerate(itertools.pairwise(layers))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Predictor:
    """Pre-forward hook of one layer."""

    def __init__(self, following: nn.Module, number: int, store: dict[int, Tensor]) -> None:
        self._following, self._number, self._store = following, number, store

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden_BTE = arguments[0] if arguments else keywords["hidden_states"]
        cos, sin = keywords["position_embeddings"]
        attention: Any = self._following.self_attn
        normed = self._following.input_layernorm(hidden_BTE)  # type: ignore[operator]
        query = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, "q_norm", None)
        if norm is not None:
            query = norm(query)
        self._store[self._number] = _rotate(query.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))


def _rotate(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of dimension pairs (i, i + d/2)."""
    low, high = query.chunk(2, dim=-1)
    return query * cos + torch.cat([-high, low], dim=-1) * sin


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    layers = getattr(getattr(model, "model", None), "layers", None)
    if isinstance(layers, nn.ModuleList) and all(map(_is_known, layers)):
        return layers
    raise MethodUnsupportedError(
        f"layer-ahead prediction does not know the layers of {type(model).__name__}; expected decoder layers with "
        "input_layernorm and self_attn.q_proj, such as Llama's, Qwen's or Mistral's"
    )


def _is_known(layer: nn.Module) -> bool:
    attention = getattr(layer, "self_attn", None)
    return (
        hasattr(layer, "input_layernorm") and hasattr(attention, "q_proj") and hasattr(attention, "head_dim")
    )
