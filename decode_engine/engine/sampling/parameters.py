"""How tokens are drawn, as the sampler reads it, with the bounds. No torch here: who checks a request needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from decode_engine.orders.fields import Sampling, check_drawn
from decode_engine.settings.request_bounds import MAX_SEED

if TYPE_CHECKING:
    from decode_engine.engine.sampling.grammar import Grammar  # brings torch

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of one request's answers: seeds that people count up by hand meet none of them."""


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
        check_drawn(self)

    @property
    def neutral(self) -> bool:
        """Whether nothing is changed."""
        return self == _NEUTRAL


_NEUTRAL = LogitRules()


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are drawn.

    temperature: 0 takes the likeliest token. top_k: 0 keeps all tokens. top_p: 1 keeps all tokens.
    seed: None draws a fresh one. rules: how logits are changed before. grammar: what the answer must be; None lets it
    be anything. top_logprobs: how many likeliest tokens are told beside each with its log probability; None tells none.
    Raises InvalidArgumentError for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    rules: LogitRules = field(default_factory=LogitRules)
    grammar: Grammar | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_drawn(self)

    def for_answer(self, index: int) -> SamplingParameters:
        """How the answer of that number draws, of several to one prompt: the first one by the seed itself."""
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + index * _SEED_STRIDE) % (MAX_SEED + 1))

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def parameters_of(sampling: Sampling, grammar: Grammar | None = None) -> SamplingParameters:
    """What an order says. Raises InvalidArgumentError, which names the field, for a value out of range."""
    return SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        rules=LogitRules(
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            min_tokens=sampling.min_tokens,
        ),
        grammar=grammar,
        top_logprobs=sampling.top_logprobs,
    )
