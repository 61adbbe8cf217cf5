"""Partial attention results and their merge, and what a layer does to its logits.

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

    out: [..., d] float32, softmax-weighted mean of the values of the set; 0 for an empty set. A fused kernel's is in
        the queries' dtype.
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

    @staticmethod
    def concatenate(states: Sequence[AttentionState], dim: int) -> AttentionState:
        """One state of consecutive KV heads (dim 0), positions or sessions (dim 1), or queries (dim 2)."""
        if len(states) == 1:
            return states[0]
        return AttentionState(
            torch.cat([state.out for state in states], dim), torch.cat([state.lse for state in states], dim)
        )

    def columns(self, wanted: slice | list[int]) -> AttentionState:
        """State of some positions or sessions, which are the second dimension."""
        return AttentionState(self.out[:, wanted], self.lse[:, wanted])

    def merge(self, other: AttentionState) -> AttentionState:
        """State of the disjoint union of both sets of keys. Associative and commutative."""
        lse, own, others = self._weigh(other)
        return AttentionState(self.out * own + other.out * others, lse)

    def merge_(self, other: AttentionState) -> AttentionState:
        """`merge` in the memory of this state's `out`, which has to be float32; other.out may be of any float dtype."""
        lse, own, others = self._weigh(other)
        self.out.mul_(own).addcmul_(other.out.to(self.out.dtype), others)
        return AttentionState(self.out, lse)

    def _weigh(self, other: AttentionState) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exp of the union, and both parts' shares of it, [..., 1]."""
        lse = torch.logaddexp(self.lse, other.lse)
        # exp(-inf - -inf) is nan: where both parts are empty, subtract 0 so that both weights become 0.
        base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
        return lse, torch.exp(self.lse - base).unsqueeze(-1), torch.exp(other.lse - base).unsqueeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class LogitForm:
    """cap: None where logits are not capped. sink_HG: float32 logits, on the queries' device; None without sinks."""

    cap: float | None = None
    sink_HG: Tensor | None = None

    def capped(self, logits: Tensor) -> Tensor:
        """The logits with the cap applied: themselves without one, otherwise a new tensor."""
        return logits if self.cap is None else (logits / self.cap).tanh_().mul_(self.cap)

    def add_sink(self, state: AttentionState) -> AttentionState:
        """State of the same keys and the sink; out [H, T, G, d], lse [H, T, G]."""
        if self.sink_HG is None:
            return state
        lse = torch.logaddexp(state.lse, self.sink_HG[:, None])
        share = torch.exp(state.lse - lse).unsqueeze(-1)
        return AttentionState(state.out * share, lse)


PLAIN = LogitForm()
"""Neither cap nor sink."""
