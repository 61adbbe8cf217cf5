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
from weakref import WeakSet

import torch
from torch import Tensor, nn

from index_store.errors import MethodUnsupportedError
from index_store.models.files.folder import first_line
from index_store.models.self_check import Examination, differ, read_plainly

_foretelling: WeakSet[nn.Module] = WeakSet()


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


def foretell_queries(model: nn.Module) -> None:
    """From now on, a forward of the model that is given `foretell=True` gives every layer's attention `foretold`.

    These are the next layer's predicted queries, as in `predicted_queries`; the last layer gets none. Other forwards
    stay as they are. A second call changes nothing. Raises MethodUnsupportedError as `predicted_queries` does.
    """
    if model in _foretelling:
        return
    for layer, following in itertools.pairwise(_decoder_layers(model)):
        layer.register_forward_pre_hook(_Foreteller(following), with_kwargs=True)
    _foretelling.add(model)


def foreseen_difference(model: Any, seen: Examination) -> str | None:
    """Why predictions of a layer's queries are wrong even from what enters the layer itself, as a clause; None if not.

    The rest of a layer's call is that of the layer before, as it is where predictions are made. seen: the text that the
    model reads meanwhile, and its queries.
    """
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(number: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls[number] = arguments, keywords

        return hook

    try:
        layers = list(_decoder_layers(model))
        hooks = [
            layer.register_forward_pre_hook(note(number), with_kwargs=True)
            for number, layer in enumerate(layers)
        ]
        try:
            read_plainly(model, seen)
        finally:
            for hook in hooks:
                hook.remove()
        with torch.inference_mode():
            for number, layer in enumerate(layers[1:], 1):
                entering = calls[number][0][0] if calls[number][0] else calls[number][1]["hidden_states"]
                keywords = {**calls[number - 1][1], "hidden_states": entering}
                found = _predict(layer, (), keywords)[0]
                expected = seen.plain.queries[number][..., : found.shape[-1]]
                why = differ(expected.transpose(0, 1), found.transpose(0, 1), found.dtype)
                if why is not None:
                    return f"those predicted for layer {number} {why}"
    except MethodUnsupportedError as error:
        return error.message
    except Exception as error:  # parts of layers that are there but work otherwise
        return f"its layers have other parts ({type(error).__name__}: {first_line(error)})"
    return None


class _Foreteller:
    """Pre-forward hook of one layer, which may be compiled."""

    def __init__(self, following: nn.Module) -> None:
        self._following = following

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not keywords.get("foretell", False):
            return None
        return arguments, {**keywords, "foretold": _predict(self._following, arguments, keywords)}


class _Predictor:
    """Pre-forward hook of one layer."""

    def __init__(self, following: nn.Module, number: int, store: dict[int, Tensor]) -> None:
        self._following, self._number, self._store = following, number, store

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._store[self._number] = _predict(self._following, arguments, keywords)


def _predict(following: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """Queries [B, Hq, T, d] of the layer `following`, from what a layer before it is called with."""
    hidden_BTE = arguments[0] if arguments else keywords["hidden_states"]
    cos, sin = keywords["position_embeddings"]
    attention: Any = following.self_attn
    normed = following.input_layernorm(hidden_BTE)  # type: ignore[operator]
    query = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, "q_norm", None)
    if norm is not None:
        query = norm(query)
    return _rotate(query.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))


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
