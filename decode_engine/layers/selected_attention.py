"""Attention to selected keys, and to what is left of the clusters or coarse rows that they were taken from.

Shape legend: H KV heads, T query positions, G group heads, K kept keys, N context tokens, t tail tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.host_rows import pick_rows
from decode_engine.layers.partial_attention import attend_logits
from index_store.attention.attention_state import AttentionState
from index_store.attention.logit_form import PLAIN, LogitForm
from index_store.selection.budgets import Selection
from index_store.selection.pieces import Piece
from index_store.selection.remainders import ExactKeys, Remainder

GATHER_BYTES = 16 * 2**20
"""Gathered rows in float32 at a time; larger blocks gain nothing and cost page faults."""

DEVICE_GATHER_BYTES = 256 * 2**20
"""The same in device memory, where every block costs launches and a wait."""


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Keys and values of the context and, from id N on, of the session's tail.

    context_HN2D: [H, N, 2, d], on the tail's device or in host memory. tail_Ht2D: [H, t, 2, d], same dtype, on the
    device of the ids that are asked for.
    """

    context_HN2D: Tensor
    tail_Ht2D: Tensor

    def gather(self, ids_HTK: Tensor) -> Tensor:
        """Rows [H, T, K, 2, d] float32 at key ids."""
        _, count, _, head_dim = self.context_HN2D.shape
        flat = pick_rows(self.context_HN2D, ids_HTK.clamp(max=count - 1)).float()
        late = ids_HTK >= count
        if self.tail_Ht2D.shape[1] and bool(late.any()):
            heads = torch.arange(len(ids_HTK), device=ids_HTK.device)[:, None, None].expand(ids_HTK.shape)
            tail_rows = self.tail_Ht2D[heads[late], (ids_HTK[late] - count).long()]
            flat[late.flatten()] = tail_rows.flatten(1).float()
        return flat.view(*ids_HTK.shape, 2, head_dim)

    def read_logits(self, queries_HTGD: Tensor, ids_HTGK: Tensor) -> Tensor:
        """Exact logits [H, T, G, K] float32 of other keys for every query head."""
        heads, positions, group, count = ids_HTGK.shape
        out = torch.empty(ids_HTGK.shape, device=ids_HTGK.device)
        step = max(
            1, _gather_bytes(ids_HTGK) // max(1, heads * group * count * 2 * queries_HTGD.shape[-1] * 4)
        )
        for first in range(0, positions, step):
            part = slice(first, first + step)
            rows = self.gather(ids_HTGK[:, part].flatten(2))[:, :, :, 0].contiguous()
            keys = rows.view(heads, rows.shape[1], group, count, -1)
            out[:, part] = torch.matmul(keys, queries_HTGD[:, part].unsqueeze(-1)).squeeze(-1)
        return out

    def heads(self, part: slice) -> KeyRows:
        """The same for some KV heads."""
        return KeyRows(self.context_HN2D[part], self.tail_Ht2D[part])

    def hold(self, selection: Selection) -> HeldRows:
        """The rows of a selection that serves several calls."""
        return HeldRows(self.gather(selection.ids_HTK[..., : max(1, int(selection.counts_HT.max()))]))


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows [H, T, K, 2, d] float32 of one selection, gathered before."""

    rows_HTK2D: Tensor

    def gather(self, ids_HTK: Tensor) -> Tensor:
        """The first of them, as many as there are ids."""
        return self.rows_HTK2D[:, :, : ids_HTK.shape[2]]

    def heads(self, part: slice) -> HeldRows:
        """The same for some KV heads."""
        return HeldRows(self.rows_HTK2D[part])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What stands for the keys that were not selected: a remainder over pieces.

    elsewhere: keys that are attended exactly besides the selection and may be in the pieces. form: what the layer does
    to logits, those of the selection, too.
    """

    remainder: Remainder
    pieces: Sequence[Piece]
    elsewhere: ExactKeys | None
    form: LogitForm = PLAIN


def attend_selection(
    q_HTGD: Tensor, rows: KeyRows | HeldRows, selection: Selection, left: LeftOut, figures: Figures
) -> AttentionState:
    """Attends to the selected rows, and approximately to those that are left out.

    Works in blocks of bounded size over KV heads and positions. A selection [H, 1, K] is one for all positions. Counts
    rows and time.
    """
    heads, positions, group, head_dim = q_HTGD.shape
    width = max(1, selection.ids_HTK.shape[2])
    row_bytes = 2 * head_dim * 4
    most = _gather_bytes(q_HTGD)
    heads_step = max(1, min(heads, most // (width * row_bytes)))
    shared = selection.ids_HTK.shape[1] == 1
    # What grows with the positions: logits where all of them attend to the same rows, otherwise the rows themselves.
    positions_step = max(1, most // (heads_step * width * (4 * group if shared else row_bytes)))
    states = [
        [
            _attend_block(
                _Block(slice(head, head + heads_step), slice(first, first + positions_step)),
                q_HTGD,
                rows,
                selection,
                left,
                figures,
            )
            for first in range(0, positions, positions_step)
        ]
        for head in range(0, heads, heads_step)
    ]
    return concatenate([concatenate(parts, dim=1) for parts in states], dim=0)


def concatenate(states: Sequence[AttentionState], dim: int) -> AttentionState:
    """One state of consecutive positions (dim 1) or KV heads (dim 0)."""
    if len(states) == 1:
        return states[0]
    return AttentionState(
        torch.cat([state.out for state in states], dim), torch.cat([state.lse for state in states], dim)
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Some KV heads and positions."""

    heads: slice
    positions: slice

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.shape[1] == 1:  # one for all positions
            return tensor[self.heads]
        return tensor[self.heads, self.positions]

    def of_keys(self, keys: ExactKeys) -> ExactKeys:
        return ExactKeys(
            self.of(keys.ids_HTK),
            self.of(keys.valid_HTK),
            self.of(keys.logits_HTGK),
            self.of(keys.values_HTKD),
        )


def _attend_block(
    block: _Block,
    q_HTGD: Tensor,
    rows: KeyRows | HeldRows,
    selection: Selection,
    left: LeftOut,
    figures: Figures,
) -> AttentionState:
    begin = perf_counter_ns()
    queries = block.of(q_HTGD)
    counts = block.of(selection.counts_HT.unsqueeze(-1)).squeeze(-1)
    kept = int(counts.max())
    ids = block.of(selection.ids_HTK)[..., :kept]
    gathered = rows.heads(block.heads).gather(ids)
    figures.count_kept(int(counts.sum()) * (queries.shape[1] // counts.shape[1]))
    gathered_at = perf_counter_ns()
    figures.gather_ns += gathered_at - begin
    keys, values = gathered[:, :, :, 0], gathered[:, :, :, 1]
    # Positions that share their rows are as good as more heads of the group.
    together = queries if gathered.shape[1] > 1 else queries.flatten(1, 2).unsqueeze(1)
    logits = together @ keys.transpose(-1, -2)
    valid = torch.arange(kept, device=counts.device) < counts.unsqueeze(-1)
    seen = left.form.capped(logits).masked_fill(~valid[:, :, None], -torch.inf)
    state = attend_logits(seen, values)
    state = AttentionState(state.out.view(queries.shape), state.lse.view(queries.shape[:-1]))
    logits = logits.view(*queries.shape[:-1], kept)
    exact = [ExactKeys(ids, valid, logits, values)]
    if left.elsewhere is not None:
        exact.append(block.of_keys(left.elsewhere))
    pieces = [piece.part(block.heads, block.positions) for piece in left.pieces]
    approximate = left.remainder.state(pieces, exact, left.form)
    if approximate is not None:
        state = state.merge(approximate)
    figures.attend_ns += perf_counter_ns() - gathered_at
    return state


def _gather_bytes(beside: Tensor) -> int:
    return GATHER_BYTES if beside.device.type == "cpu" else DEVICE_GATHER_BYTES
