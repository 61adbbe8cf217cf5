"""A trained model's queries in place of those of a model with random weights, for contexts with a trained model's keys.

Shape legend: L layers, B sessions, Hq query heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from decode_engine.model.decode_attention import ATTENTION_NAME, decode_attention


@contextmanager
def asked(queries_LBQ1D: Sequence[Tensor]) -> Iterator[None]:
    """Decode steps of B sessions, by any path, ask every layer's keys with these queries, at every step with the same.

    A step still computes its own, which the attention does not get: a choice that only the device knows keeps
    compilers from leaving them out. Queries are unscaled, [B, Hq, 1, d] each, in the model's dtype; rows of a step
    behind them are idle.
    """
    given = torch.ones((), dtype=torch.bool, device=queries_LBQ1D[0].device)

    def attention(module: nn.Module, query: Tensor, *others: Any, **named: Any) -> Any:
        wanted = queries_LBQ1D[int(module.layer_idx)]  # type: ignore[arg-type]
        if (query.shape[1:], query.dtype) != (wanted.shape[1:], wanted.dtype) or len(query) < len(wanted):
            raise ValueError(
                f"a step has queries {tuple(query.shape)} in {query.dtype}, given are {tuple(wanted.shape)} in "
                f"{wanted.dtype}"
            )
        if len(query) > len(wanted):
            wanted = torch.cat([wanted, query[len(wanted) :]])
        return decode_attention(module, torch.where(given, wanted, query), *others, **named)

    AttentionInterface.register(ATTENTION_NAME, attention)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION_NAME, decode_attention)
