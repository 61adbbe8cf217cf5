"""Layers that attend to everything.

Shape legend: H KV heads, T query positions, G group heads, N context tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import attend_shared, attend_streamed
from decode_engine.layers.tail import Tail
from index_store.attention.attention_state import AttentionState
from index_store.attention.logit_form import PLAIN, LogitForm


class DenseLayer:
    """Attends to everything.

    device: of the queries and the tail where keys and values of the context are in host memory; None where all are in
    one place. tail: one that another layer adds to as well; its own if None.
    """

    def __init__(
        self,
        kv_HN2D: Tensor,
        figures: Figures,
        device: torch.device | None = None,
        tail: Tail | None = None,
        form: LogitForm = PLAIN,
    ) -> None:
        heads, _, _, head_dim = kv_HN2D.shape
        self._kv_HN2D = kv_HN2D
        self._figures = figures
        self._form = form
        self._on_host = device is not None
        place = kv_HN2D.device if device is None else device
        self.tail = Tail(heads, head_dim, kv_HN2D.dtype, place) if tail is None else tail

    @property
    def nbytes(self) -> int:
        """Bytes that the layer holds besides the shared context."""
        return self.tail.nbytes

    @property
    def exact(self) -> DenseLayer:
        """The same layer and tail, attended to fully."""
        return self

    @property
    def context(self) -> int:
        """Equal for layers that share a context's keys and values."""
        return self._kv_HN2D.data_ptr()

    def attend(self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> Tensor:
        """As `SparseLayer.attend`."""
        return attend_dense_together([(self, q_HTGD, keys_HTD, values_HTD, position)])[0]

    def read_context(self, q_HTGD: Tensor) -> AttentionState:
        """Attention to the context alone, for queries of any sessions on it."""
        if self._on_host:
            return attend_streamed(q_HTGD, self._kv_HN2D, self._form.cap)
        return attend_shared(q_HTGD, self._kv_HN2D, causal=False, cap=self._form.cap)

    def read_tail(
        self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int
    ) -> AttentionState:
        """Adds the new keys and attends to the session's tail, and to the layer's sink."""
        heads, count = self._kv_HN2D.shape[:2]
        self.tail.write(position - count, keys_HTD, values_HTD)
        self._figures.count_dense(heads * visible_keys(position, q_HTGD.shape[1]))
        state = attend_shared(q_HTGD, self.tail.rows, causal=True, cap=self._form.cap)
        return self._form.add_sink(state)

    def adopt(self, other: DenseLayer) -> None:
        """Goes on, with a tail of its own, where the other session's layer is."""
        self.tail.adopt(other.tail)

    def count_time(self, nanoseconds: int) -> None:
        """Notes time spent on this session's attention."""
        self._figures.attend_ns += nanoseconds


def attend_dense_together(
    calls: Sequence[tuple[DenseLayer, Tensor, Tensor, Tensor, int]],
) -> list[Tensor]:
    """`DenseLayer.attend` of several sessions on one context, which is read once for all of them.

    The time counts in full for every session, as that of any batched work.
    """
    begin = perf_counter_ns()
    queries = [q_HTGD for _, q_HTGD, _, _, _ in calls]
    context = calls[0][0].read_context(queries[0] if len(calls) == 1 else torch.cat(queries, dim=1))
    outs: list[Tensor] = []
    first = 0
    for layer, q_HTGD, keys_HTD, values_HTD, position in calls:
        part = slice(first, first + q_HTGD.shape[1])
        own = AttentionState(context.out[:, part], context.lse[:, part])
        outs.append(own.merge(layer.read_tail(q_HTGD, keys_HTD, values_HTD, position)).out)
        first = part.stop
    spent = perf_counter_ns() - begin
    for layer, *_ in calls:
        layer.count_time(spent)
    return outs


def visible_keys(position: int, positions: int) -> int:
    """Keys seen by `positions` causal queries, the first of which sits at `position`."""
    return positions * (position + 1) + positions * (positions - 1) // 2
