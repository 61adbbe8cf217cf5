"""What a layer does to attention logits besides scaling them: a soft cap, and a learnt sink.

A cap bounds every logit x smoothly: cap * tanh(x / cap). A sink is one more logit per query head, of no key: it takes
its share of the softmax and adds nothing to the output.

Shape legend: H KV heads, T query positions, G query heads per KV head, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState


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
