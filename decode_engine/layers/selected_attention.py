"""Attention to selected keys, and to what is left of the clusters or coarse rows that they were taken from.

Shape legend: H KV heads, T query positions, G group heads, K kept keys, N context tokens, t tail tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import attend_logits, pick_rows
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.attention.listed_keys_numba import Listed, attend_listed, readable
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes
from index_store.selection.budgets import Remainder
from index_store.selection.ranking import Piece, Selection
from index_store.selection.remainder_states import ExactKeys, remainder_state

GATHER_BYTES = 16 * 2**20
"""Gathered rows in float32 at a time; larger blocks gain nothing and cost page faults."""

DEVICE_GATHER_BYTES = 256 * 2**20
"""Gathered rows in device memory, where every block costs launches and a wait."""


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Keys and values of the context and, from id N on, of the session's tail.

    context_HN2D: [H, N, 2, d], on the tail's device or, with `on_host`, in host memory beside it. tail_Ht2D:
    [H, t, 2, d], same dtype, on the device of the ids that are asked for.
    """

    context_HN2D: ContextRows
    tail_Ht2D: Tensor
    on_host: bool = False

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

    def attend_in_place(self, q_HTGD: Tensor, ids_HTK: Tensor, counts_HT: Tensor) -> AttentionState | None:
        """Attention to listed rows without a copy of them, on a CPU; None where no loop can read them so.

        Lists may be [H, 1, K] and [H, 1], the same for all positions.
        """
        context, tail, positions = self.context_HN2D, self.tail_Ht2D, q_HTGD.shape[1]
        if self.on_host or not isinstance(context, Tensor) or not readable(q_HTGD, context, [tail]):
            return None
        lists = ids_HTK.expand(-1, positions, -1), counts_HT.expand(-1, positions)
        end = context.shape[1] + tail.shape[1]
        return attend_listed(context, Listed.of_positions(q_HTGD, tail, end, *lists))

    def heads(self, part: slice) -> KeyRows:
        """The same for some KV heads."""
        context = self.context_HN2D
        some = context.heads(part) if isinstance(context, TwoPlanes) else context[part]
        return KeyRows(some, self.tail_Ht2D[part], self.on_host)

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

    def attend_in_place(self, q_HTGD: Tensor, ids_HTK: Tensor, counts_HT: Tensor) -> AttentionState | None:
        """None: they are a copy, which products of matrices take."""
        return None

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


@dataclass(frozen=True, slots=True)
class Observation:
    """One search and what came of it, for whoever measures (`SparseLayer.observer`).

    q_HTGD: queries, float32 scaled by 1/sqrt(d), the first at `position`. search_end: end of the range that the
    selection was chosen from, beginning at `sinks`. out_HTGD: the layer's attention output. vectors_read, bytes_read:
    of the index, per KV head and position, over all searches made meanwhile; 0 when there was none. remainder_bytes:
    read for the remainder besides, likewise. form: what the layer does to logits.
    """

    q_HTGD: Tensor
    position: int
    sinks: int
    search_end: int
    selection: Selection
    rows: KeyRows
    out_HTGD: Tensor
    vectors_read: float
    bytes_read: float
    remainder_bytes: float = 0.0
    form: LogitForm = PLAIN


def attend_listed_rows(context: ContextRows, keys: Listed) -> AttentionState:
    """Attention [H, S, G, d] of sessions on one context to the keys that each lists, on a host."""
    if not isinstance(context, TwoPlanes):
        return attend_listed(context, keys)
    each_alone = (keys.of(number) for number in range(len(keys.tails)))
    states = [attend_listed(*decode_listed_keys(context, own)) for own in each_alone]
    return AttentionState.concatenate(states, dim=1)


def decode_listed_keys(planes: TwoPlanes, keys: Listed) -> tuple[Tensor, Listed]:
    """A context of those rows alone that a session attends to, in float32, and the same keys listed in it.

    Its rows: sinks, listed keys, and all of the context's from `begin` on.
    """
    heads, count = planes.shape[:2]
    [tail_Ht2D], [sinks], [begin] = keys.tails, keys.sinks, keys.begins
    ids_HK = keys.ids_HSK[:, 0]
    listed, recent = ids_HK.shape[1], max(0, count - begin)
    ends = torch.cat([torch.arange(sinks), torch.arange(count - recent, count)]).to(torch.int32)
    fixed = ends.expand(heads, -1)
    # Lists are as wide as the widest: what lies behind the others may be no key.
    ids = ids_HK.clamp(0, count - 1)
    rows = planes.pick(torch.cat([fixed[:, :sinks], ids, fixed[:, sinks:]], dim=1))
    if bool((ids_HK >= count).any()):  # keys of the tail that were searched
        head, column = (ids_HK >= count).nonzero(as_tuple=True)
        of_tail = (ids_HK[head, column] - count).long().clamp_(max=tail_Ht2D.shape[1] - 1)
        rows[head, sinks + column] = tail_Ht2D[head, of_tail].float()
    places = torch.arange(sinks, sinks + listed, dtype=torch.int32).expand(heads, 1, -1)
    tail = tail_Ht2D[:, max(0, begin - count) :].float()
    return rows, replace(keys, tails=[tail], ids_HSK=places, begins=[sinks + listed])


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
    heads_of = [AttentionState.concatenate(parts, dim=1) for parts in states]
    return AttentionState.concatenate(heads_of, dim=0)


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
    queries = block.of(q_HTGD)
    counts = block.of(selection.counts_HT.unsqueeze(-1)).squeeze(-1)
    ids = block.of(selection.ids_HTK)[..., : int(counts.max())]
    figures.count_kept(int(counts.sum()) * (queries.shape[1] // counts.shape[1]))
    rows = rows.heads(block.heads)
    plain = left.form.cap is None and not left.remainder.takes_out_rows
    begin = perf_counter_ns()
    state = rows.attend_in_place(queries, ids, counts) if plain else None
    if state is None:
        state, exact = _attend_gathered(queries, rows, ids, counts, left.form, figures)
    else:  # ids suffice
        nothing = queries.new_empty(0)
        exact = ExactKeys(ids, _counted(ids, counts), nothing, nothing)
        figures.attend_ns += perf_counter_ns() - begin
    begin = perf_counter_ns()
    taken_out = [exact]
    if left.elsewhere is not None:
        taken_out.append(block.of_keys(left.elsewhere))
    pieces = [piece.part(block.heads, block.positions) for piece in left.pieces]
    approximate = remainder_state(left.remainder, pieces, taken_out, left.form)
    if approximate is not None:
        state = state.merge(approximate)
    figures.attend_ns += perf_counter_ns() - begin
    return state


def _attend_gathered(
    queries: Tensor, rows: KeyRows | HeldRows, ids: Tensor, counts: Tensor, form: LogitForm, figures: Figures
) -> tuple[AttentionState, ExactKeys]:
    """Attention to the listed rows, which are gathered; and these keys, to be taken out of a remainder."""
    begin = perf_counter_ns()
    gathered = rows.gather(ids)
    gathered_at = perf_counter_ns()
    figures.gather_ns += gathered_at - begin
    keys, values = gathered[:, :, :, 0], gathered[:, :, :, 1]
    # Positions that share their rows are as good as more heads of the group.
    together = queries if gathered.shape[1] > 1 else queries.flatten(1, 2).unsqueeze(1)
    logits = together @ keys.transpose(-1, -2)
    valid = _counted(ids, counts)
    seen = form.capped(logits).masked_fill(~valid[:, :, None], -torch.inf)
    state = attend_logits(seen, values)
    state = AttentionState(state.out.view(queries.shape), state.lse.view(queries.shape[:-1]))
    figures.attend_ns += perf_counter_ns() - gathered_at
    return state, ExactKeys(ids, valid, logits.view(*queries.shape[:-1], ids.shape[2]), values)


def _counted(ids: Tensor, counts: Tensor) -> Tensor:
    """[H, T, K] bool: which of the ids count."""
    return torch.arange(ids.shape[2], device=counts.device) < counts.unsqueeze(-1)


def _gather_bytes(beside: Tensor) -> int:
    return GATHER_BYTES if beside.device.type == "cpu" else DEVICE_GATHER_BYTES
