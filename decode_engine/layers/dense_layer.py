"""Layers that attend to everything, or to a sliding window of the last keys; and the tails of all layers.

Of a layer with a window only the last keys of the context are there, all in memory of the device that computes. Its
tail holds all that the session added, of which as much as the window reaches back is attended to.

Shape legend: H KV heads, T query positions, G group heads, N context tokens, W of them kept, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import torch
from torch import Tensor
from torch.nn.functional import pad

from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import attend_shared, attend_streamed
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.fused import attend_recent
from index_store.attention.listed_keys_numba import Listed, attend_context, attend_listed, readable
from index_store.attention.selected_keys import attend_selected
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes
from index_store.indexes.interface.layer_index import GrowingRows

_FIRST_CAPACITY = 128


class Tail(GrowingRows):
    """Tail of one layer: rows [H, t, 2, d] in the context's dtype.

    Rows are written at their position, so a step that failed half way can be run again.
    """

    def __init__(
        self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(heads, 2, head_dim, dtype=dtype, room=_FIRST_CAPACITY, device=device)

    def write(self, start: int, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        """Stores T rows as tail rows start..start+T-1 and makes start+T their count.

        Rows below 0 are those of the context's last tokens, read again, which it has. Raises InvalidArgumentError when
        rows before `start` are missing.
        """
        known = max(0, -start)
        self.put(start + known, torch.stack((keys_HTD[:, known:], values_HTD[:, known:]), dim=2))

    def adopt(self, other: Tail) -> None:
        """Takes over the other tail's rows, in a copy."""
        self.put(0, other.rows)

    @property
    def address(self) -> int:
        """Of the first row of KV head 0, for kernels that write rows themselves and then set `count`."""
        return self.buffer.data_ptr()

    @property
    def head_bytes(self) -> int:
        """From the rows of one KV head to those of the next."""
        return self.buffer.stride(0) * self.buffer.element_size()


class DenseLayer:
    """Attends to everything.

    device: of the queries and the tail where keys and values of the context are in host memory; None where all are in
    one place. tail: one that another layer adds to as well; its own if None.
    """

    def __init__(
        self,
        kv_HN2D: ContextRows,
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

    def rows(self, end: int) -> Sequence[Tensor]:
        """Keys and values [H, n, 2, d] of all positions before that one: those of the context, and of the tail."""
        if isinstance(self._kv_HN2D, TwoPlanes):
            raise TypeError("rows in two planes are no rows of one dtype")
        return self._kv_HN2D[:, :end], self.tail.rows[:, : max(0, end - self._kv_HN2D.shape[1])]

    def attend_selected(
        self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int, ids_TK: Tensor
    ) -> Tensor:
        """As `attend`, of queries that have lists of positions, which a model selected by an index of its own."""
        begin = perf_counter_ns()
        heads, count, _ = keys_HTD.shape
        self.tail.write(position - self._kv_HN2D.shape[1], keys_HTD, values_HTD)
        state = attend_selected(q_HTGD, self.rows(position + count), ids_TK, position, self._form)
        seen = keys_in_window(position, count, ids_TK.shape[1])  # no list has the same one twice
        self._figures.count_dense(heads * seen, heads * visible_keys(position, count))
        self.count_time(perf_counter_ns() - begin)
        return state.out

    def read_context(self, q_HTGD: Tensor, rows: bool) -> AttentionState:
        """Attention to the context alone, for queries of any sessions on it. rows: see `attend_dense_together`."""
        if self._on_host or isinstance(self._kv_HN2D, TwoPlanes):
            return attend_streamed(q_HTGD, self._kv_HN2D, self._form.cap)
        if rows and self._form.cap is None and readable(q_HTGD, self._kv_HN2D, ()):
            return attend_context(self._kv_HN2D, q_HTGD)
        return attend_shared(q_HTGD, self._kv_HN2D, causal=False, cap=self._form.cap)

    def add(self, keys_HTD: Tensor, values_HTD: Tensor, position: int) -> None:
        """Adds the session's new keys to its tail, and counts what their queries see."""
        heads, count = self._kv_HN2D.shape[:2]
        self.tail.write(position - count, keys_HTD, values_HTD)
        self._figures.count_dense(heads * visible_keys(position, keys_HTD.shape[1]))

    def read_tails(self, tails_HT2D: Tensor, q_HTGD: Tensor) -> AttentionState:
        """Causal attention to tails alone, for the last tokens of any sessions, whose heads stand beside each other."""
        return attend_shared(q_HTGD, tails_HT2D, causal=True, cap=self._form.cap)

    def add_tails(
        self, q_HSGD: Tensor, tails: Sequence[Tensor], context: AttentionState
    ) -> AttentionState | None:
        """Attention of any sessions' single tokens to the context, which is known, and to their own tails, in one loop.

        On a CPU a call of torch's for each takes longer than the attention. None for rows that the loop cannot read.
        """
        kv_HN2D = self._kv_HN2D
        if isinstance(kv_HN2D, TwoPlanes) or self._form.cap is not None:
            return None
        if not readable(q_HSGD, kv_HN2D, tails):
            return None
        return attend_listed(kv_HN2D, Listed.of_tails(q_HSGD, tails, context, kv_HN2D.shape[1]))

    def add_sink(self, state: AttentionState) -> AttentionState:
        """Adds the layer's sink, if it has one."""
        return self._form.add_sink(state)

    def adopt(self, other: DenseLayer) -> None:
        """Goes on, with a tail of its own, where the other session's layer is."""
        self.tail.adopt(other.tail)

    def count_time(self, nanoseconds: int) -> None:
        """Notes time spent on this session's attention."""
        self._figures.attend_ns += nanoseconds


def attend_dense_together(
    calls: Sequence[tuple[DenseLayer, Tensor, Tensor, Tensor, int]], *, rows: bool = False
) -> list[Tensor]:
    """`DenseLayer.attend` of several sessions on one context, which is read once for all of them.

    rows: on a CPU each token gets the bits that it gets when tokens are added one by one. The time counts in full for
    every session, as that of any batched work.
    """
    begin = perf_counter_ns()
    queries = [q_HTGD for _, q_HTGD, _, _, _ in calls]
    layers = [layer for layer, *_ in calls]
    first = layers[0]
    for layer, _, keys_HTD, values_HTD, position in calls:
        layer.add(keys_HTD, values_HTD, position)
    rows = rows or all(q_HTGD.shape[1] == 1 for q_HTGD in queries)
    context = first.read_context(_joined(queries), rows)
    out_HTGD = first.add_sink(_with_tails(layers, queries, context, rows)).out
    spent = perf_counter_ns() - begin
    for layer in layers:
        layer.count_time(spent)
    return list(out_HTGD.split_with_sizes([q_HTGD.shape[1] for q_HTGD in queries], dim=1))


def _with_tails(
    layers: Sequence[DenseLayer], queries: Sequence[Tensor], context: AttentionState, rows: bool
) -> AttentionState:
    """Attention of each session's last tokens to the context, which is known, and to its own tail."""
    first, q_HTGD = layers[0], _joined(queries)
    if rows:
        tails = [tail for layer, own in zip(layers, queries, strict=True) for tail in _tails_seen(layer, own)]
        state = first.add_tails(q_HTGD, tails, context)
        if state is not None:
            return state
        if not q_HTGD.is_cuda:
            each = zip(tails, q_HTGD.split_with_sizes([1] * len(tails), dim=1), strict=True)
            return context.merge(AttentionState.concatenate([first.read_tails(*one) for one in each], dim=1))
    return context.merge(_read_tails(layers, queries))


def _tails_seen(layer: DenseLayer, q_HTGD: Tensor) -> list[Tensor]:
    """What each of a session's last tokens sees of its tail."""
    rows, before = layer.tail.rows, layer.tail.count - q_HTGD.shape[1] + 1
    return [rows[:, : before + number] for number in range(q_HTGD.shape[1])]


def _read_tails(layers: Sequence[DenseLayer], queries: Sequence[Tensor]) -> AttentionState:
    """Attention of each session's last tokens to its own tail, one session behind the other.

    Prompts at their beginning go in one call, padded at the end, where no query of the shorter ones looks: on a GPU a
    call for each takes longer than the attention. Others stay apart, and so keep their bits on a CPU.
    """
    states: dict[int, AttentionState] = {}
    counts = [q_HTGD.shape[1] for q_HTGD in queries]
    fresh = [row for row, count in enumerate(counts) if 1 < count == layers[row].tail.count]
    for rows in [fresh, *([row] for row in range(len(layers)) if row not in fresh)]:
        if len(rows) == 1:
            states[rows[0]] = layers[rows[0]].read_tails(layers[rows[0]].tail.rows, queries[rows[0]])
        elif rows:
            longest = max(counts[row] for row in rows)
            padded_q = torch.cat([_padded(queries[row], longest) for row in rows])
            tails = torch.cat([_padded(layers[row].tail.rows, longest) for row in rows])
            state = layers[rows[0]].read_tails(tails, padded_q)
            outs, lses = state.out.chunk(len(rows)), state.lse.chunk(len(rows))
            for row, out, lse in zip(rows, outs, lses, strict=True):
                states[row] = AttentionState(out[:, : counts[row]], lse[:, : counts[row]])
    own = [states[row] for row in range(len(layers))]
    return AttentionState(_joined([state.out for state in own]), _joined([state.lse for state in own]))


def _padded(rows_HTXD: Tensor, length: int) -> Tensor:
    return pad(rows_HTXD, (0, 0, 0, 0, 0, length - rows_HTXD.shape[1]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[H, T, ...] of several sessions, along T."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def visible_keys(position: int, positions: int) -> int:
    """Keys seen by `positions` causal queries, the first of which sits at `position`."""
    return positions * (position + 1) + positions * (positions - 1) // 2


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
        self, q_HTGD: Tensor, keys_HTD: Tensor, values_HTD: Tensor, position: int, *, shared: bool = False
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
