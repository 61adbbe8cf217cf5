"""Logits changed before a token is chosen: penalties for tokens that came before, biases, and ends that come too early.

In this order: the repetition penalty, the frequency and presence penalties, the biases, and the ban of ends.

Shape legend: V vocabulary, K tokens that are changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode_engine.settings.request_bounds import (
    MAX_BIASED_TOKENS,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from index_store.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class LogitRules:
    """How logits are changed.

    presence_penalty: is taken from every token of the answer so far, frequency_penalty as often as it came.
    repetition_penalty: divides positive logits of all tokens of prompt and answer, and multiplies negative ones; the
    stored context does not count. logit_bias: is added, by token id. min_tokens: so many tokens come before an end.
    Raises InvalidArgumentError for a value out of range.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -MAX_PENALTY <= value <= MAX_PENALTY:
                raise InvalidArgumentError(
                    f"{name} is {value:g}, expected -{MAX_PENALTY:g} to {MAX_PENALTY:g}", field=name
                )
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidArgumentError(
                f"repetition_penalty is {self.repetition_penalty:g}, expected {MIN_REPETITION_PENALTY:g} to "
                f"{MAX_REPETITION_PENALTY:g} (1 changes nothing)",
                field="repetition_penalty",
            )
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidArgumentError(
                f"logit_bias has {len(self.logit_bias)} tokens, expected at most {MAX_BIASED_TOKENS}",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise InvalidArgumentError(
                    f"logit_bias of token {token} is {bias:g}, expected -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
                    field="logit_bias",
                )
        if not 0 <= self.min_tokens <= MAX_INT32:
            raise InvalidArgumentError(
                f"min_tokens is {self.min_tokens}, expected 0 to {MAX_INT32}", field="min_tokens"
            )

    @property
    def neutral(self) -> bool:
        """Whether nothing is changed."""
        return self == _NEUTRAL


_NEUTRAL = LogitRules()


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
