"""Coded rows under queries: which loops compute their logits and the attention to their values.

Shape legend: H KV heads, T query positions, G group heads, R = T*G rows of queries of a KV head, X keys, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line import RowsInLine
from index_store.compiled.launch import on_host
from index_store.indexes.coarse_rows.scalars.coded_passes_numba import CodedPass
from index_store.indexes.coarse_rows.scalars.key_scores_numba import score_keys
from index_store.indexes.coarse_rows.scalars.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.scalars.value_sums_numba import attend_values
from index_store.selection.pieces import ScoredRows


@dataclass(frozen=True, slots=True)
class ScoredCodes(ScoredRows):
    """Consecutive coded rows, of which row `first` is key `first_id`."""

    rows: ScalarRows
    first: int

    def part(self, heads: slice, positions: slice) -> ScoredCodes:
        return ScoredCodes(
            self.logits_HTGX[heads, positions], self.first_id, self.rows.heads(heads), self.first
        )

    def remainder_bytes(self, moments: str, searched: bool) -> float:
        count = self.logits_HTGX.shape[-1]
        return self.rows.value_bytes(count) + (0.0 if searched else self.rows.key_bytes(count))

    def attend(self, logits_HTGX: Tensor, elsewhere_HTG: Tensor) -> AttentionState:
        logits, rest = logits_HTGX.flatten(1, 2), elsewhere_HTG.flatten(1, 2)
        if on_host(self.rows.key_codes_HNC):
            state = attend_values(self.rows, RowsInLine.of([logits]), self.first, rest)
        else:
            state = attend_values_reference(self.rows, logits, self.first, rest)
        shape = logits_HTGX.shape[:3]
        return AttentionState(state.out.reshape(*shape, -1), state.lse.reshape(shape))


def score_rows(rows: ScalarRows, queries_HTGD: Tensor, first: int, out_HTGX: Tensor) -> ScoredCodes:
    """Scores rows from `first` on, as many as there are columns, into these columns of a contiguous tensor."""
    queries = queries_HTGD.flatten(1, 2)
    out = out_HTGX.view(len(queries), queries.shape[1], -1)
    if on_host(rows.key_codes_HNC):
        score_keys([CodedPass(rows, first, range(queries.shape[1]))], queries, RowsInLine.of([out]))
    else:
        score_keys_reference(rows, queries, first, first + out.shape[2], out)
    return ScoredCodes(out_HTGX, rows.first_id + first, rows, first)
