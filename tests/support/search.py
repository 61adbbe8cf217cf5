"""What searches and budgets need around them in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import LayerSource
from index_store.selection.ranking import Step
from index_store.store.stored_context import QuerySample


def source(keys_HND: Tensor, queries: QuerySample, frequencies: Tensor | None = None) -> LayerSource:
    """What an index is built from, the values being the keys again."""
    return LayerSource(rows(keys_HND), queries, frequencies)


def rows(keys_HTD: Tensor) -> Tensor:
    """[H, T, 2, d]: keys that are their own values."""
    return torch.stack([keys_HTD, keys_HTD], dim=2)


def step(length: int) -> Step:
    """A step that tells a budget nothing but the length."""

    def refuse(ids_HTGK: Tensor) -> Tensor:
        raise AssertionError("this budget measures nothing")

    return Step(length, None, refuse, torch.empty(0))
