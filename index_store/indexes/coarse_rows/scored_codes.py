"""Coded rows under queries: which loops compute their logits and the attention to their values.

Shape legend: H KV heads, T query positions, G group heads, R = T*G rows of queries of a KV head, X keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line import RowsInLine
from index_store.compiled.launch import on_host
from index_store.indexes.coarse_rows.product_rows import ProductRows
from index_store.indexes.coarse_rows.scalars.coded_passes_numba import CodedPass
from index_store.indexes.coarse_rows.scalars.key_scores_numba import score_keys
from index_store.indexes.coarse_rows.scalars.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.scalars.value_sums_numba import attend_values
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

    def attend(self, logits_HTGX: Tensor, elsewhere_HTG: Tensor) -> AttentionState:
        return self.attend_together([self], [logits_HTGX], [elsewhere_HTG])[0]

    @classmethod
    def attend_together(
        cls, pieces: Sequence[ScoredCodes], logits: Sequence[Tensor], elsewhere: Sequence[Tensor]
    ) -> list[AttentionState]:
        """Those over the same coded rows are attended in one pass, if their logits are in one piece of memory."""
        together: dict[tuple[int, int, int], list[int]] = {}
        for number, (piece, own) in enumerate(zip(pieces, logits, strict=True)):
            memory = own.untyped_storage().data_ptr()
            together.setdefault((id(piece.rows), piece.first, memory), []).append(number)
        states: dict[int, AttentionState] = {}
        for numbers in together.values():
            some, rest = ([all_of[number] for number in numbers] for all_of in (logits, elsewhere))
            states |= zip(numbers, _attend(pieces[numbers[0]], some, rest), strict=True)
        return [states[number] for number in range(len(pieces))]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows first..end-1 for queries [H, T, G, d]; out: [H, T, G, end - first], columns of a contiguous tensor."""

    queries_HTGD: Tensor
    first: int
    end: int
    out_HTGX: Tensor


def score_rows(rows: CodedRows, wanted: Sequence[Wanted]) -> list[ScoredCodes]:
    """Scores what each wants into its out.

    Those that begin at the same row are scored in one pass, and have to be in one piece of memory.
    """
    together: dict[int, list[Wanted]] = {}
    for each in wanted:
        together.setdefault(each.first, []).append(each)
    for first, some in together.items():
        queries = [each.queries_HTGD.flatten(1, 2) for each in some]
        outs = [
            each.out_HTGX.view(len(own), own.shape[1], -1) for each, own in zip(some, queries, strict=True)
        ]
        if isinstance(rows, ScalarRows) and on_host(rows.key_codes_HNC):
            asked = torch.cat(queries, dim=1)
            score_keys([CodedPass(rows, first, range(asked.shape[1]))], asked, RowsInLine.of(outs))
        else:
            for each, own, out in zip(some, queries, outs, strict=True):
                score_keys_reference(rows, own, first, each.end, out)
    return [ScoredCodes(each.out_HTGX, rows.first_id + each.first, rows, each.first) for each in wanted]


def _attend(
    piece: ScoredCodes, logits: Sequence[Tensor], elsewhere: Sequence[Tensor]
) -> list[AttentionState]:
    """Attention to the values of a piece's rows by several sessions' logits [H, T, G, X], X as many as each has.

    elsewhere: [H, T, G] of each, see `ScoredRows.attend`.
    """
    flat, rest = [each.flatten(1, 2) for each in logits], [each.flatten(1, 2) for each in elsewhere]
    if isinstance(piece.rows, ScalarRows) and on_host(piece.rows.key_codes_HNC):
        state = attend_values(piece.rows, RowsInLine.of(flat), piece.first, torch.cat(rest, dim=1))
        counts = [each.shape[1] for each in flat]
        outs, lses = state.out.split_with_sizes(counts, 1), state.lse.split_with_sizes(counts, 1)
        states = [AttentionState(out, lse) for out, lse in zip(outs, lses, strict=True)]
    else:
        states = [
            attend_values_reference(piece.rows, each, piece.first, own)
            for each, own in zip(flat, rest, strict=True)
        ]
    return [
        AttentionState(state.out.reshape(*each.shape[:3], -1), state.lse.reshape(each.shape[:3]))
        for state, each in zip(states, logits, strict=True)
    ]
