"""Coded rows under queries: which loops compute their logits and the attention to their values.

Shape legend: H KV heads, T query positions, G group heads, R = T*G rows of queries of a KV head, X keys, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.kernels_numba import attend_values, score_keys
from index_store.indexes.coarse_rows.product_rows import ProductRows
from index_store.indexes.coarse_rows.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.selection.pieces import ScoredRows

CodedRows = ScalarRows | ProductRows


@dataclass(frozen=True, slots=True)
class ScoredCodes(ScoredRows):
    """Consecutive coded rows, of which row `first` is key `first_id`."""

    rows: CodedRows
    first: int

    def part(self, heads: slice, positions: slice) -> ScoredCodes:
        return ScoredCodes(
            self.logits_HTGX[heads, positions], self.first_id, self.rows.heads(heads), self.first
        )

    def remainder_bytes(self, moments: str, searched: bool) -> float:
        count = self.logits_HTGX.shape[-1]
        return self.rows.value_bytes(count) + (0.0 if searched else self.rows.key_bytes(count))

    def attend(self, logits_HTGX: Tensor) -> AttentionState:
        heads, positions, group, count = logits_HTGX.shape
        logits_HRX = logits_HTGX.reshape(heads, positions * group, count)
        if isinstance(self.rows, ScalarRows):
            state = attend_values(self.rows, logits_HRX, self.first)
        else:
            state = attend_values_reference(self.rows, logits_HRX, self.first)
        return AttentionState(
            state.out.view(heads, positions, group, -1), state.lse.view(heads, positions, group)
        )


def score_rows(rows: CodedRows, queries_HTGD: Tensor, first: int, end: int, out_HTGX: Tensor) -> ScoredCodes:
    """Rows first..end-1, scored into `out`, which may be columns of a larger tensor [H, T, G, M]."""
    heads, positions, group, head_dim = queries_HTGD.shape
    queries_HRD = queries_HTGD.reshape(heads, positions * group, head_dim)
    out_HRX = out_HTGX.view(heads, positions * group, -1)
    if isinstance(rows, ScalarRows):
        score_keys(rows, queries_HRD, first, end, out_HRX)
    else:
        score_keys_reference(rows, queries_HRD, first, end, out_HRX)
    return ScoredCodes(out_HTGX, rows.first_id + first, rows, first)
