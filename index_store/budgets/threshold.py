"""The budget of Squeezed Attention: every item whose estimated attention weight exceeds one global threshold.

Shape legend: H KV heads, T query positions, G group heads, M ranked items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from index_store.budgets.base import (
    Budget,
    Selection,
    Step,
    check_fraction,
    check_group_rule,
    take_in_order,
)
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Threshold(Budget):
    """Keep the keys of every item with S_i > T (Squeezed Attention sections 3.2 and 4.1, eq. 1).

    One T serves all layers and heads, so heads with flat attention keep more keys than peaked ones. All positions of a
    prompt share one selection, made from the average of their S_i; a decode step has its own.

    keep: wanted fraction of the keys, turned into T by what was calibrated for the context's index.
    threshold: T itself. Exactly one of the two is given.
    group: S_i is the `average` or `max` over the group's heads; with `union` an item is kept when it exceeds T for any
        head by itself, in a decode step the same as `max`. Calibration is by the average: at the same `keep` the other
        two keep more keys.

    Raises InvalidArgumentError unless one of keep and threshold is given, above 0 and at most 1, and the rule is known.
    """

    keep: float | None = None
    threshold: float | None = None
    group: str = "average"

    needs_logits: ClassVar[bool] = True
    per_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.threshold is None):
            raise InvalidArgumentError(
                f"keep ratio is {self.keep} and threshold is {self.threshold}, expected one of the two"
            )
        if self.keep is not None:
            check_fraction("keep ratio", self.keep, keep_ratio=self.keep)
        if self.threshold is not None:
            check_fraction("threshold", self.threshold, threshold=self.threshold)
        check_group_rule(self.group)

    @property
    def label(self) -> str:
        return f"S > {self.threshold:.3g}" if self.threshold is not None else f"{self.keep:.2%} by threshold"

    def cut(self, ranking: Ranking, step: Step) -> Selection:
        """Cuts at the threshold, which may leave nothing.

        Raises MethodUnsupportedError when a keep ratio is wanted of a context without calibration, and
        InvalidArgumentError when the ratio is outside of what was calibrated.
        """
        threshold = self._find_threshold(step)
        weights_H1GM = self._weights(ranking).mean(1, keepdim=True)
        above_H1GM = weights_H1GM > threshold
        groups = ranking.items.groups
        kept_H1GM: Tensor = above_H1GM
        if groups:
            kept_H1GM = above_H1GM * torch.cat([group.sizes_HM for group in groups], dim=1)[:, None, None]
        scores_H1GM = weights_H1GM.masked_fill(~above_H1GM, -torch.inf)
        shared = take_in_order(ranking, scores_H1GM, kept_H1GM.sum(-1))
        positions = ranking.logits_HTGM.shape[1]
        return Selection(shared.ids_HTK.expand(-1, positions, -1), shared.counts_HT.expand(-1, positions))

    def _find_threshold(self, step: Step) -> float:
        if self.threshold is not None:
            return self.threshold
        if step.thresholds is None or self.keep is None:
            raise MethodUnsupportedError(
                f"a keep ratio of {self.keep} was asked of a threshold budget, but this context's index has no "
                "calibrated thresholds; prefill the document again, or give the threshold itself",
                keep_ratio=self.keep,
            )
        return step.thresholds(self.keep)

    def _weights(self, ranking: Ranking) -> Tensor:
        """[H, T, 1, M], with `union` [H, T, G, M]."""
        if self.group == "union":
            return ranking.log_weights_HTGM().exp_()
        return ranking.weights(self.group)[:, :, None]
