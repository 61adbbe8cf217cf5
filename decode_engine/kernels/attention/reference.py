"""The eager reference of attention to lists, and the sequences that it works on.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, N keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.attention.shared_attention import attend_dense_reference
from index_store.attention.attention_state import AttentionState


@dataclass(frozen=True, slots=True)
class ListedSequence:
    """One sequence of a batch, as tensors. Fields as in `records`.

    kv_HN2D: [H, N, 2, d]. tail_HT2D: [H, capacity, 2, d], of which tail_keys rows count.
    """

    kv_HN2D: Tensor
    tail_HT2D: Tensor
    tail_keys: int
    first: int
    end: int
    keep: int

    def fields(self) -> dict[int, int]:
        """The record's fields but those of a searched index."""
        return {
            records.KV: self.kv_HN2D.data_ptr(),
            records.KV_HEAD: self.kv_HN2D.stride(0) * self.kv_HN2D.element_size(),
            records.TAIL: self.tail_HT2D.data_ptr(),
            records.TAIL_HEAD: self.tail_HT2D.stride(0) * self.tail_HT2D.element_size(),
            records.KEYS: self.kv_HN2D.shape[1],
            records.FIRST: self.first,
            records.END: self.end,
            records.TAIL_KEYS: self.tail_keys,
            records.KEEP: self.keep,
        }

    def always(self) -> Tensor:
        """Ids of the context's keys that are always attended, [count] int64."""
        return torch.tensor([*range(self.first), *range(self.end, self.kv_HN2D.shape[1])], dtype=torch.int64)


def attend_lists_reference(
    q_RGD: Tensor, sequences: Sequence[ListedSequence | None], lists: KeyLists, scale: float
) -> AttentionState:
    """Attention [R, G, d] to listed keys, to those always attended, and to the tail; float32."""
    states = []
    heads = len(q_RGD) // len(sequences)
    for row, q_GD in enumerate(q_RGD):
        sequence = sequences[row // heads]
        if sequence is None:
            states.append(AttentionState.empty(q_GD.shape[:1], q_GD.shape[1], q_GD.device))
            continue
        kv = sequence.kv_HN2D[row % heads]
        ids = torch.cat([sequence.always(), lists.of_row(row).cpu()]).to(kv.device)
        chosen = torch.cat([kv[ids], sequence.tail_HT2D[row % heads, : sequence.tail_keys].to(kv)])
        state = attend_dense_reference(q_GD[None].to(kv.device), chosen[None], scale)
        states.append(AttentionState(state.out[0], state.lse[0]))
    return stacked(states, q_RGD.device)


def stacked(states: Sequence[AttentionState], device: torch.device) -> AttentionState:
    return AttentionState(
        torch.stack([state.out.to(device) for state in states]),
        torch.stack([state.lse.to(device) for state in states]),
    )
