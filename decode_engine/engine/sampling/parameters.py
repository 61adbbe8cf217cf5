"""How tokens are drawn, as the sampler reads it. No torch here: who checks a request needs none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from decode_engine.orders.fields import Sampling, check_drawn
from decode_engine.settings.request_bounds import MAX_SEED

if TYPE_CHECKING:
    from decode_engine.engine.sampling.grammar import Grammar  # brings torch

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of one request's answers: seeds that people count up by hand meet none of them."""


class SamplingParameters(Sampling, frozen=True):
    """What an order says of it, checked. grammar: what the answer must be; None lets it be anything.

    Raises InvalidArgumentError, which names the field, for a value out of range.
    """

    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_drawn(self)

    @classmethod
    def of(cls, sampling: Sampling, grammar: Grammar | None = None) -> SamplingParameters:
        """What an order says, with its grammar."""
        return cls(**asdict(sampling), grammar=grammar)

    def for_answer(self, index: int) -> SamplingParameters:
        """How the answer of that number draws, of several to one prompt: the first one by the seed itself."""
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + index * _SEED_STRIDE) % (MAX_SEED + 1))
