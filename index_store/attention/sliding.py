"""Causal attention of which every query sees a sliding window of the last keys, exactly.

By fused kernels, which know no windows: for a block of queries no longer than the window, the keys that some of them
see are three runs: the block's own, which are causal; those before it that all of them see; and the oldest, of which
each query sees one less than the query before it. Backwards, that is causal, too.

Shape legend: H KV heads, G query heads per KV head, T queries, S keys, n queries of a block, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import attend_to_all, attend_to_themselves

_LOGIT_BYTES = 64 * 2**20  # of eager attention, at a time


def attend_recent(
    queries_HGTD: Tensor,
    kv_HS2D: Tensor,
    window: int,
    position: int,
    *,
    chunked: bool = False,
    cap: float | None = None,
) -> AttentionState:
    """Attention of the last T of S tokens, the first of which is at `position`, to those that a layer lets them see.

    chunked: the keys of a query's own chunk, which begin at multiples of the window; by default the last ones. cap: of
    the logits. Otherwise as `attend_window`.
    """
    count, keys = queries_HGTD.shape[2], kv_HS2D.shape[1]
    before = keys - count
    if not chunked:
        if cap is not None:
            return attend_masked(queries_HGTD, kv_HS2D, before, window, cap)
        return attend_window(queries_HGTD, kv_HS2D, window)
    parts, first = [], 0
    while first < count:
        start = (position + first) // window * window - position  # of the chunk, by the first of the queries
        end = min(count, start + window)
        rows = kv_HS2D[:, max(0, before + start) : before + end]
        # Within a chunk the window ends nothing.
        own = attend_recent(queries_HGTD[:, :, first:end], rows, window, position + first, cap=cap)
        parts.append(own)
        first = end
    return AttentionState(
        torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2)
    )


def attend_window(queries_HGTD: Tensor, kv_HS2D: Tensor, window: int) -> AttentionState:
    """Attention of the last T of S tokens to those up to themselves, each to `window` keys at most, its own included.

    kv_HS2D: keys and values of the S tokens, in any float dtype; where S - T < window - 1 there are no earlier ones.
    Logits are scaled by 1/sqrt(d). Returns out [H, G, T, d] float32 and lse [H, G, T].
    """
    count = queries_HGTD.shape[2]
    before = kv_HS2D.shape[1] - count
    whole = min(count, max(0, window - before))  # queries that see everything from the first key on
    parts = []
    if whole:
        own = kv_HS2D[:, : before + whole]
        parts.append(_attend_block(queries_HGTD[:, :, :whole], own, before + whole))
    for first in range(whole, count, window):
        end = min(first + window, count)
        oldest = before + first - window + 1
        parts.append(_attend_block(queries_HGTD[:, :, first:end], kv_HS2D[:, oldest : before + end], window))
    if len(parts) == 1:
        return parts[0]
    return AttentionState(
        torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2)
    )


def _attend_block(queries_HGnD: Tensor, kv_HS2D: Tensor, window: int) -> AttentionState:
    """The same for n <= window queries, the first of which sees from the first key on."""
    count, keys = queries_HGnD.shape[2], kv_HS2D.shape[1]
    own = attend_to_themselves(queries_HGnD, kv_HS2D[:, keys - count :])
    state = AttentionState(own.out.float(), own.lse.float())
    oldest = max(0, keys - window)  # keys that not all of the queries see
    if oldest < keys - count:
        state = state.merge_(attend_to_all(queries_HGnD, kv_HS2D[:, oldest : keys - count]))
    if oldest:
        edge = attend_to_themselves(queries_HGnD[:, :, :oldest].flip(2), kv_HS2D[:, :oldest].flip(1))
        seeing = AttentionState(state.out[:, :, :oldest], state.lse[:, :, :oldest])
        merged = seeing.merge(AttentionState(edge.out.flip(2).float(), edge.lse.flip(2).float()))
        rest = AttentionState(state.out[:, :, oldest:], state.lse[:, :, oldest:])
        state = AttentionState(torch.cat([merged.out, rest.out], 2), torch.cat([merged.lse, rest.lse], 2))
    return state


def attend_masked(
    queries_HGTD: Tensor, kv_HS2D: Tensor, first: int, window: int | None = None, cap: float | None = None
) -> AttentionState:
    """Attention of T queries to keys of which query t sees those from first + t - window + 1 to first + t.

    Eager, in float32 and in blocks of keys: for capped logits, which no fused kernel has, and to compare with. cap: see
    `LogitForm`. As `attend_window` otherwise; a query that sees no key gets out 0 and lse -inf.
    """
    heads, group, count, head_dim = queries_HGTD.shape
    queries = queries_HGTD.float().flatten(1, 2) * head_dim**-0.5
    places_X = torch.arange(count, device=queries.device).repeat(group) + first
    step = max(1, _LOGIT_BYTES // (4 * heads * group * count))
    state = AttentionState.empty((heads, group * count), head_dim, queries.device)
    for start in range(0, kv_HS2D.shape[1], step):
        keys, values = kv_HS2D[:, start : start + step].float().unbind(2)
        logits = torch.bmm(queries, keys.transpose(1, 2))
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        ages = places_X[:, None] - torch.arange(start, start + keys.shape[1], device=queries.device)
        logits.masked_fill_((ages < 0) if window is None else (ages < 0) | (ages >= window), -torch.inf)
        peak = logits.amax(-1, keepdim=True)
        peak = torch.where(torch.isneginf(peak), 0.0, peak)
        weights = logits.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.bmm(weights, values) / total.clamp(min=torch.finfo(torch.float32).tiny)
        state = state.merge(AttentionState(out, (peak + total.log()).squeeze(-1)))
    return AttentionState(state.out.view(queries_HGTD.shape), state.lse.view(heads, group, count))
