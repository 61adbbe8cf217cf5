"""Layers whose queries see a sliding window of the last keys, or those of their own chunk.

Of the context only the last keys are there, and all of them are in memory of the device that computes. The tail holds
all that the session added, of which as much as the window reaches back is attended to.

Shape legend: H KV heads, T query positions, G group heads, W tokens kept of the context, d head dim.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import attend_shared
from decode_engine.layers.tail import Tail
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.fused import attend_recent


class WindowLayer:
    """Attends to the last `window` keys, the query's own included."""

    def __init__(
        self,
        kv_HW2D: Tensor,
        token_count: int,
        window: int,
        figures: Figures,
        form: LogitForm = PLAIN,
        *,
        chunked: bool = False,
    ) -> None:
        """kv_HW2D: the last tokens of the context, which has `token_count`. chunked: see `LayerShape`."""
        heads, kept, _, head_dim = kv_HW2D.shape
        self._kv_HW2D = kv_HW2D
        self._first = token_count - kept
        self._token_count = token_count
        self._window = window
        self._chunked = chunked
        self._figures = figures
        self._form = form
        self.tail = Tail(heads, head_dim, kv_HW2D.dtype, kv_HW2D.device)

    @property
    def nbytes(self) -> int:
        """Bytes that the layer holds besides the shared context."""
        return self.tail.nbytes

    @property
    def exact(self) -> WindowLayer:
        """The same layer: it is never cut."""
        return self

    def adopt(self, other: WindowLayer) -> None:
        """As `DenseLayer.adopt`."""
        self.tail.adopt(other.tail)

    def attend(
        self,
        q_HTGD: Tensor,
        keys_HTD: Tensor,
        values_HTD: Tensor,
        position: int,
        *,
        shared: bool = False,
    ) -> Tensor:
        """As `SparseLayer.attend`; how a selection would be made has no influence."""
        begin = perf_counter_ns()
        self.tail.write(position - self._token_count, keys_HTD, values_HTD)
        heads, count = q_HTGD.shape[:2]
        oldest = max(0, position - self._window + 1)
        if self._chunked:
            oldest = position // self._window * self._window
        if count == 1:
            state = self._attend_runs(q_HTGD, oldest)
        else:
            state = self._attend_rows(q_HTGD, self._rows(oldest, position + count), position)
        seen = keys_in_chunks if self._chunked else keys_in_window
        self._figures.count_dense(heads * seen(position, count, self._window))
        out = self._form.add_sink(state).out
        self._figures.attend_ns += perf_counter_ns() - begin
        return out

    def _attend_runs(self, q_HTGD: Tensor, oldest: int) -> AttentionState:
        """Attention of one position to all keys from `oldest` on, in the context and in the tail."""
        context = self._kv_HW2D[:, max(0, oldest - self._first) :]
        tail = self.tail.rows[:, max(0, oldest - self._token_count) :]
        cap = self._form.cap
        return attend_shared(q_HTGD, context, causal=False, cap=cap).merge(
            attend_shared(q_HTGD, tail, causal=False, cap=cap)
        )

    def _attend_rows(self, q_HTGD: Tensor, rows_HS2D: Tensor, position: int) -> AttentionState:
        """Attention of the last positions of the rows to those up to themselves."""
        queries_HGTD, cap = q_HTGD.transpose(1, 2) * q_HTGD.shape[3] ** 0.5, self._form.cap
        if cap is None:
            queries_HGTD = queries_HGTD.to(_compute_dtype(rows_HS2D))
        state = attend_recent(queries_HGTD, rows_HS2D, self._window, position, chunked=self._chunked, cap=cap)
        return AttentionState(state.out.transpose(1, 2), state.lse.transpose(1, 2))

    def _rows(self, start: int, end: int) -> Tensor:
        """Keys and values of positions start..end-1, which are all there."""
        context = self._kv_HW2D[:, max(0, start - self._first) :]
        tail = self.tail.rows[:, max(0, start - self._token_count) : end - self._token_count]
        return torch.cat([context, tail], dim=1) if start < self._token_count else tail


def _compute_dtype(rows_HS2D: Tensor) -> torch.dtype:
    """Halves on a GPU, where fused kernels take them; queries that the model made lose nothing by it."""
    return rows_HS2D.dtype if rows_HS2D.is_cuda else torch.float32


def keys_in_window(position: int, positions: int, window: int) -> int:
    """Keys seen by `positions` queries, the first of which sits at `position`, through a window."""
    growing = max(0, min(positions, window - 1 - position))
    return growing * (position + 1) + growing * (growing - 1) // 2 + (positions - growing) * window


def keys_in_chunks(position: int, positions: int, size: int) -> int:
    """The same of queries that see the keys of their own chunk."""
    return sum(place % size + 1 for place in range(position, position + positions))
