"""Chooses the next token from logits: greedy, temperature, top-k, top-p.

Shape legend: V vocabulary, K candidates.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, SparseKVError

MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are drawn.

    temperature: 0 takes the likeliest token. top_k: 0 keeps all tokens. top_p: 1 keeps all tokens.
    seed: None draws a fresh one.
    Raises InvalidArgumentError for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidArgumentError(
                f"temperature is {self.temperature:g}, expected 0 (greedy) to {MAX_TEMPERATURE:g}",
                field="temperature",
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError(
                f"top_p is {self.top_p:g}, expected a number above 0 and at most 1", field="top_p"
            )
        if self.top_k < 0:
            raise InvalidArgumentError(
                f"top_k is {self.top_k}, expected 0 (all tokens) or more", field="top_k"
            )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidArgumentError(f"seed is {self.seed}, expected 0 to 2^64 - 1", field="seed")


class Sampler:
    """One session's sampler: the same parameters, seed and logits give the same tokens.

    Tokens are drawn on the CPU from the session's own generator, so that neither the device nor what other sessions
    sample changes the result.
    """

    def __init__(self, parameters: SamplingParameters) -> None:
        self.parameters = parameters
        self.greedy = parameters.temperature == 0.0 or parameters.top_k == 1
        if self.greedy:
            self.seed = 0
        else:
            self.seed = secrets.randbits(63) if parameters.seed is None else parameters.seed
        self._generator = torch.Generator()
        # torch takes seeds up to 2^64 - 1 but reads those from 2^63 on as negative numbers
        self._generator.manual_seed(self.seed)

    def sample(self, logits_V: Tensor) -> int:
        """Draws a token from float logits [V]. Raises SparseKVError when they are not finite."""
        logits_V = logits_V.detach().to("cpu", torch.float32)
        best = int(logits_V.argmax())
        if not math.isfinite(float(logits_V[best])):  # argmax of a row with a NaN is that NaN
            raise SparseKVError("the model's logits are not finite")
        if self.greedy:
            return best
        p = self.parameters
        values_K, ids_K = self._candidates(logits_V)
        weights_K = torch.softmax((values_K - logits_V[best]).double() / p.temperature, dim=0)
        if p.top_p < 1.0:
            # a token stays while those before it have not reached top_p, so that the likeliest always stays
            weights_K = weights_K.masked_fill(weights_K.cumsum(0) - weights_K >= p.top_p, 0.0)
        choice = int(torch.multinomial(weights_K, 1, generator=self._generator))
        return choice if ids_K is None else int(ids_K[choice])

    def _candidates(self, logits_V: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits and ids [K] of the tokens that top_k leaves, likeliest first where top_p needs that.

        Ids of None mean the whole vocabulary in its own order.
        """
        p = self.parameters
        if 0 < p.top_k < logits_V.numel():
            values_K, ids_K = torch.topk(logits_V, p.top_k)
            return values_K, ids_K
        if p.top_p < 1.0:
            values_K, ids_K = torch.sort(logits_V, descending=True, stable=True)
            return values_K, ids_K
        return logits_V, None
