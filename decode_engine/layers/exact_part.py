"""The keys that a searching layer attends to whatever the search finds: sinks, recent window and tail.

Shape legend: H KV heads, T query positions, G group heads, N context tokens, S keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.dense_layer import visible_keys
from decode_engine.layers.figures import Figures
from decode_engine.layers.host_rows import copy_rows
from decode_engine.layers.partial_attention import attend_shared
from decode_engine.layers.tail import Tail
from index_store.attention.attention_state import AttentionState
from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.indexes.row_planes.two_planes import ContextRows, TwoPlanes
from index_store.selection.clustered_keys import ScoredClusters
from index_store.selection.pieces import Piece
from index_store.selection.remainder_states import ExactKeys


class ExactPart:
    """Sinks, and everything from the end of the searched range on, of one layer of one session.

    kv_HN2D: of the context, on the tail's device or, with `on_host`, in host memory beside it.
    """

    def __init__(
        self,
        kv_HN2D: ContextRows,
        tail: Tail,
        sinks: int,
        figures: Figures,
        on_host: bool,
        form: LogitForm = PLAIN,
    ) -> None:
        self._kv_HN2D = kv_HN2D
        self._tail = tail
        self._sinks = sinks
        self._figures = figures
        self._on_host = on_host
        self._form = form
        self._sinks_clustered: bool | None = None

    def attend(self, q_HTGD: Tensor, position: int, search_end: int) -> AttentionState:
        """Attention to sinks, learnt or not, recent context and the tail up to the last query's own key."""
        begin = perf_counter_ns()
        count, end = self._kv_HN2D.shape[1], position + q_HTGD.shape[1]
        tail = self._tail.rows[:, max(search_end - count, 0) : max(end - count, 0)]
        recent = self._context_rows(min(search_end, count), min(end, count))
        sinks = self._context_rows(0, self._sinks)
        rows = torch.cat([sinks, recent, tail], dim=1)
        state = self._form.add_sink(attend_shared(q_HTGD, rows, causal=True, cap=self._form.cap))
        self._figures.attend_ns += perf_counter_ns() - begin
        return state

    def count(self, position: int, positions: int, search_end: int) -> None:
        """Counts the keys that are always attended, and all there are."""
        heads = self._kv_HN2D.shape[0]
        available = heads * visible_keys(position, positions)
        skipped = heads * positions * (search_end - self._sinks)
        self._figures.count_exact(available - skipped, available)

    def elsewhere(
        self, q_HTGD: Tensor, search_end: int, held: int, pieces: Sequence[Piece]
    ) -> ExactKeys | None:
        """Keys outside of the searched range that are in the pieces; None when there are none.

        Only clusters cross its borders. Sinks may be in them. Keys from search_end to `held` are, which is how many
        the clusters' index holds: those of the context, and those of the tail that were appended after an earlier
        selection was made that is used again.
        """
        clusters = [piece.clusters for piece in pieces if isinstance(piece, ScoredClusters)]
        if not clusters:
            return None
        begin = perf_counter_ns()
        heads, count, device = *self._kv_HN2D.shape[:2], q_HTGD.device
        if self._sinks_clustered is None:
            ids_HS = torch.arange(self._sinks, device=device).expand(heads, -1)
            self._sinks_clustered = any(bool((each.cluster_of(ids_HS) >= 0).any()) for each in clusters)
        sinks = self._sinks if self._sinks_clustered else 0
        context = self._context_rows(min(search_end, count), count)
        tail = self._tail.rows[:, max(search_end - count, 0) : held - count]
        ids_S = torch.cat([torch.arange(sinks, device=device), torch.arange(search_end, held, device=device)])
        if not len(ids_S):
            return None
        kv_HS2D = torch.cat([self._context_rows(0, sinks), context, tail], dim=1).float()
        ids = ids_S.to(torch.int32).expand(heads, 1, -1)
        logits = torch.einsum("htgd,hsd->htgs", q_HTGD, kv_HS2D[:, :, 0])
        self._figures.attend_ns += perf_counter_ns() - begin
        return ExactKeys(ids, torch.ones_like(ids, dtype=torch.bool), logits, kv_HS2D[:, None, :, 1])

    def _context_rows(self, start: int, end: int) -> Tensor:
        """Rows start..end-1 of the context on the device of the queries, copied only where they are not there."""
        if self._on_host or isinstance(self._kv_HN2D, TwoPlanes):
            return copy_rows(self._kv_HN2D, start, end, self._tail.rows.device)
        return self._kv_HN2D[:, start:end]
