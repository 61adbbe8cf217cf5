"""Exact scores of every key: the oracle that other searches are measured against. Stores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from index_store.indexes.coarse_rows.two_planes import TwoPlanes
from index_store.indexes.interface.layer_index import AppendedKeys, Asked, LayerIndex, LayerSource, check_keys
from index_store.indexes.registry import ExactKind
from index_store.selection.ranking import Items, Ranking
from index_store.store.description.json_fields import Scalar


class AppendedExact(AppendedKeys):
    """Plain float32 copies of the appended keys."""

    def __init__(self, heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(heads, head_dim)
        self.keys_HTD = torch.empty(heads, 0, head_dim, device=device)

    def _extend(self, kv_HT2D: Tensor) -> None:
        new_HTD = kv_HT2D[:, :, 0].float()
        self.keys_HTD = torch.cat([self.keys_HTD.to(new_HTD.device), new_HTD], dim=1)

    @property
    def nbytes(self) -> int:
        return self.keys_HTD.numel() * self.keys_HTD.element_size()


class ExactIndex(ExactKind, LayerIndex):
    """Ranks by the true attention weight. Keys in another memory than the queries are copied for every search."""

    def __init__(self, keys: Tensor | TwoPlanes) -> None:
        """keys: [H, N, d], or rows in 8 bits."""
        super().__init__({}, keys.shape[1])
        self._rows = keys

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        cls.check_options(parameters, {})
        check_keys(source.keys_HND)
        return cls(source.keys_HND)

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        cls.check_options(parameters, {})
        return cls(kv_HN2D[:, :, 0])

    def start_appending(self) -> AppendedExact:
        shape = self._rows.shape
        return AppendedExact(shape[0], shape[-1], self._rows.device)

    def _score(self, asked: Asked) -> Ranking:
        heads, positions, group, head_dim = asked.queries_HTGD.shape
        own = self._own(asked.appended, AppendedExact)
        count = self.key_count
        keys = self._keys(asked.first_key, min(asked.end_key, count)).to(asked.queries_HTGD.device).float()
        if asked.end_key > count:
            keys = torch.cat(
                [keys, own.keys_HTD[:, max(asked.first_key - count, 0) : asked.end_key - count]], dim=1
            )
        flat = asked.queries_HTGD.reshape(heads, positions * group, head_dim)
        logits = torch.bmm(flat, keys.transpose(1, 2)).view(heads, positions, group, -1)
        searched = float(asked.end_key - asked.first_key)
        row_bytes = head_dim * self._rows.element_size()
        return Ranking(
            logits,
            Items(asked.first_key, asked.end_key),
            vectors_read=searched,
            bytes_read=searched * row_bytes,
        )

    def _keys(self, first: int, end: int) -> Tensor:
        """Keys first..end-1 of the context, [H, n, d]."""
        if isinstance(self._rows, TwoPlanes):
            return self._rows.decode(first, end)[:, :, 0]
        return self._rows[:, first:end]
