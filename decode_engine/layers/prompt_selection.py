"""One selection for all tokens of a prompt (Squeezed Attention section 4.1, prefill stage).

Every token's estimated attention weights sum to 1, so their average over the tokens says how much an item matters to
the prompt. The average is a ranking like any other, of one query position, and any budget cuts it.

Shape legend: H KV heads, T query positions, G group heads (1 where a search pooled the group's queries), M items,
K keys, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from decode_engine.layers.selected_attention import KeyRows
from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.selection.budgets import Budget
from index_store.selection.cutting import cut
from index_store.selection.ranking import Items, Ranking
from index_store.selection.selected import Selection, Step

_LOGIT_BYTES = 32 * 2**20  # logits held at a time when a budget measures keys


class PromptWeights:
    """Attention weights as a search estimates them, averaged over the positions of a prompt, which come in pieces."""

    def __init__(self) -> None:
        self._sum_H1GM: Tensor | None = None
        self._items = Items(0, 0)
        self._totals: list[Tensor] = []
        self._vectors_read = self._bytes_read = 0.0

    @property
    def positions(self) -> int:
        """How many positions were added."""
        return sum(totals.shape[1] for totals in self._totals)

    @property
    def items(self) -> int:
        """How many items are ranked; 0 before anything was added."""
        return 0 if self._sum_H1GM is None else self._sum_H1GM.shape[-1]

    @property
    def read(self) -> tuple[float, float]:
        """Vectors of the index compared, and bytes of it read, per position on average."""
        return self._vectors_read / self.positions, self._bytes_read / self.positions

    def add(self, ranking: Ranking) -> None:
        """Adds the next positions. All rankings are of the same items."""
        logits = ranking.logits_HTGM
        log_weights = Ranking(logits, ranking.items).log_weights_HTGM()
        # The same for every item: what the logits of a position were normalised by.
        totals = logits.amax(-1) - log_weights.amax(-1)
        self._totals.append(totals.nan_to_num_(0.0))
        added = log_weights.exp_().sum(1, keepdim=True)
        self._sum_H1GM = added if self._sum_H1GM is None else self._sum_H1GM.add_(added)
        self._items = ranking.items
        positions = logits.shape[1]
        self._vectors_read += ranking.vectors_read * positions
        self._bytes_read += ranking.bytes_read * positions

    def cut(
        self,
        budget: Budget,
        q_HTGD: Tensor,
        exact_lse_HTG: Tensor,
        rows: KeyRows,
        length: int,
        thresholds: Callable[[float], float] | None,
        form: LogitForm = PLAIN,
    ) -> Selection:
        """The selection [H, 1, K] of all positions added, whose queries are q_HTGD; see `Step` for the others.

        form: what the layer does to logits.
        """
        totals_HTG = torch.cat(self._totals, dim=1)
        average = torch.logsumexp(exact_lse_HTG - totals_HTG, 1, keepdim=True) - math.log(self.positions)
        step = Step(
            length,
            thresholds,
            lambda ids_H1GK: _average_logits(q_HTGD, totals_HTG, rows, ids_H1GK, form),
            average,
        )
        return cut(budget, self.ranking(), step)

    def ranking(self) -> Ranking:
        """The average as a ranking of one position. Raises ValueError when nothing was added."""
        if self._sum_H1GM is None:
            raise ValueError("no position was added")
        return Ranking((self._sum_H1GM / self.positions).log_(), self._items, (), *self.read)


def _average_logits(
    q_HTGD: Tensor, totals_HTG: Tensor, rows: KeyRows, ids_H1GK: Tensor, form: LogitForm
) -> Tensor:
    """[H, 1, G, K]: logarithm of the keys' exact weights, normalised as estimated ones are, averaged over positions."""
    heads, positions, group, head_dim = q_HTGD.shape
    keys_HGKD = rows.gather(ids_H1GK.flatten(2))[:, 0, :, 0].view(heads, group, -1, head_dim)
    step = max(1, _LOGIT_BYTES // (4 * heads * group * max(1, keys_HGKD.shape[2])))
    summed: Tensor | None = None
    for first in range(0, positions, step):
        part = slice(first, first + step)
        logits = form.capped(torch.einsum("htgd,hgkd->htgk", q_HTGD[:, part], keys_HGKD))
        added = torch.logsumexp(logits - totals_HTG[:, part, :, None], 1, keepdim=True)
        summed = added if summed is None else torch.logaddexp(summed, added)
    if summed is None:
        raise ValueError("no position was given")
    return summed - math.log(positions)


def passes(q_HTGD: Tensor, scored: int, score_bytes: int) -> list[slice]:
    """Positions that are searched at a time, where every one has so many items scored, in about so many bytes."""
    heads, positions, group, _ = q_HTGD.shape
    count = -(-positions // max(1, score_bytes // (heads * max(1, scored) * 4 * (group + 1))))
    step = -(-positions // count)  # about as many in each
    return [slice(first, min(first + step, positions)) for first in range(0, positions, step)]
