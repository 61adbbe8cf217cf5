"""Partial attention results and their merge.

A softmax over a set of keys splits into parts: each part yields its own normalised output and the logarithm of
its share of the denominator. Parts merge exactly, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionState:
    """A partial attention result over some set of keys.

    out: [..., d] float32, softmax-weighted mean of the values of the set; 0 for an empty set.
    lse: [...] float32, natural logarithm of sum(exp(logit)) over the set; -inf for an empty set.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(shape: Sequence[int], head_dim: int, device: torch.device | str = "cpu") -> AttentionState:
        """State of the empty set of keys for queries of the given leading shape."""
        return AttentionState(
            torch.zeros(*shape, head_dim, dtype=torch.float32, device=device),
            torch.full(tuple(shape), -torch.inf, dtype=torch.float32, device=device),
        )

    def merge(self, other: AttentionState) -> AttentionState:
        """State of the disjoint union of both sets of keys. Associative and commutative."""
        lse = torch.logaddexp(self.lse, other.lse)
        # exp(-inf - -inf) is nan: where both parts are empty, subtract 0 so that both weights become 0.
        base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
        weight_self = torch.exp(self.lse - base).unsqueeze(-1)
        weight_other = torch.exp(other.lse - base).unsqueeze(-1)
        return AttentionState(self.out * weight_self + other.out * weight_other, lse)
