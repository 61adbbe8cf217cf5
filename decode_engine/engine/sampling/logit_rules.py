"""Logits changed before a token is chosen: penalties for tokens that came before, biases, and ends that come too early.

In this order: the repetition penalty, the frequency and presence penalties, the biases, and the ban of ends.

Shape legend: V vocabulary, K tokens that are changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from decode_engine.engine.sampling.parameters import LogitRules


class RuledLogits:
    """The rules over one answer, and the tokens that it has so far."""

    def __init__(self, rules: LogitRules, prompt: Sequence[int], end_ids: Collection[int]) -> None:
        """end_ids: tokens that end the answer."""
        self._rules = rules
        self._end_ids = sorted(end_ids) if rules.min_tokens else []
        self._repeated = set(prompt) if rules.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()

    def take(self, token: int) -> None:
        """The answer goes on with this token."""
        self._counts[token] += 1

    def apply(self, logits_V: Tensor) -> Tensor:
        """Logits [V] changed, float32, in a tensor of their own."""
        rules, changed_V = self._rules, logits_V.float().clone()
        if rules.repetition_penalty != 1.0:
            ids_K = _ids(self._repeated | self._counts.keys(), changed_V)
            logits_K = changed_V[ids_K]
            penalty = rules.repetition_penalty
            changed_V[ids_K] = torch.where(logits_K > 0, logits_K / penalty, logits_K * penalty)
        if self._counts and (rules.frequency_penalty or rules.presence_penalty):
            penalties = [
                count * rules.frequency_penalty + rules.presence_penalty for count in self._counts.values()
            ]
            changed_V[_ids(self._counts, changed_V)] -= changed_V.new_tensor(penalties)
        if rules.logit_bias:
            changed_V[_ids(rules.logit_bias, changed_V)] += changed_V.new_tensor([*rules.logit_bias.values()])
        if self._end_ids and self._counts.total() < rules.min_tokens:
            changed_V[_ids(self._end_ids, changed_V)] = -torch.inf
        return changed_V


def _ids(tokens: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor([*tokens], dtype=torch.int64, device=like.device)
