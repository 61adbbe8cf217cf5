"""Offline calibration of thresholds: one for all layers and heads that keeps a wanted fraction of the keys on average.

Squeezed Attention section 3.2: estimated attention weights are normalised, so one threshold keeps more keys where
attention is flat and fewer where it is peaked. The queries are the context's last ones.

Shape legend: H KV heads, T query positions, M items.
"""

from __future__ import annotations

import math

import torch

from index_store.selection.budgets import KEEP_GRID
from index_store.selection.collect_numba import searchable_members
from index_store.selection.ranking import Items, Ranking

CALIBRATION_QUERIES = 100
"""How many of a context's last queries are used (Squeezed Attention section 3.2)."""

_LOWEST, _BINS_PER_UNIT = -40.0, 200
_BINS = round(-_LOWEST * _BINS_PER_UNIT)


class ThresholdCalibrator:
    """Gathers how many keys have which estimated weight, over layers, heads and queries.

    Memory does not depend on how much is added: a histogram of log S in steps of 1/200.
    """

    def __init__(self) -> None:
        self._keys_B = torch.zeros(_BINS, dtype=torch.float64, device="cpu")
        self._searched = 0

    def add(self, ranking: Ranking) -> None:
        """Counts the keys of every item in the searched range at its weight, averaged over the group.

        Weights are normalised over the searched range alone: what the queries' own neighbourhood outside of it
        takes of the attention is elsewhere when a request comes.
        """
        items = ranking.items
        heads, positions, _, columns = ranking.logits_HTGM.shape
        inside = searchable_members(items, heads, columns, ranking.logits_HTGM.device)
        searched = Ranking(ranking.logits_HTGM, Items(items.first_key, items.end_key, (inside,)))
        weights_HTM = searched.weights().nan_to_num_(nan=0.0)
        sizes_HM = inside.sizes_HM
        bins_HTM = ((weights_HTM.log() - _LOWEST) * _BINS_PER_UNIT).clamp_(0, _BINS - 1).long()
        keys_HTM = sizes_HM[:, None].expand(-1, positions, -1).double()
        # Items that were not retrieved are never kept, whatever the threshold.
        keys_HTM = keys_HTM.masked_fill(weights_HTM == 0.0, 0.0)
        added_B = torch.bincount(bins_HTM.flatten(), weights=keys_HTM.flatten(), minlength=_BINS)
        self._keys_B += added_B.cpu()
        self._searched += heads * positions * max(0, items.end_key - items.first_key)

    @property
    def counts(self) -> tuple[torch.Tensor, int]:
        """All that was added, to be added elsewhere: keys by weight, float64 [bins], and how many were searched."""
        return self._keys_B.clone(), self._searched

    def add_counts(self, keys_B: torch.Tensor, searched: int) -> None:
        """Adds what another one gathered. Raises ValueError for counts of another shape."""
        if keys_B.shape != self._keys_B.shape or keys_B.dtype != self._keys_B.dtype or searched < 0:
            raise ValueError(f"counts are {tuple(keys_B.shape)} {keys_B.dtype}, expected {_BINS} in float64")
        self._keys_B += keys_B
        self._searched += searched

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The threshold for each of KEEP_GRID; empty when nothing was added.

        Where not even all items together hold that fraction (a tree prunes some), one that keeps every item.
        """
        if not self._searched:
            return ()
        kept = (self._keys_B.flip(0).cumsum(0) / self._searched).tolist()
        found: list[float] = []
        bin_ = 0
        for fraction in KEEP_GRID:
            while bin_ < _BINS and kept[bin_] < fraction:
                bin_ += 1
            if bin_ == _BINS:
                found.append(math.exp(_LOWEST))
                continue
            before = kept[bin_ - 1] if bin_ else 0.0
            inside = (fraction - before) / (kept[bin_] - before)
            found.append(math.exp(-(bin_ + inside) / _BINS_PER_UNIT))
        return tuple(found)
