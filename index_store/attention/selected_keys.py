"""Exact attention to keys that a model selects by an index of its own: every query has a list that all heads share.

Shape legend: H KV heads, G query heads per KV head, T queries, N keys, K keys of a list, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm

_ROW_BYTES = 64 * 2**20
"""Of the rows that are gathered at a time, in float32."""


def attend_selected(
    q_HTGD: Tensor, parts: Sequence[Tensor], ids_TK: Tensor, position: int, form: LogitForm = PLAIN
) -> AttentionState:
    """Attention of scaled queries [H, T, G, d] float32 to those of their lists that are not behind them.

    parts: keys and values [H, N, 2, d] of consecutive positions from 0 on, on any device. ids_TK: positions, in any
    order; one that no list should have, of a later token, is passed over. position: of the first query. Returns out
    [H, T, G, d] and lse [H, T, G], float32.
    """
    heads, count, _, dim = q_HTGD.shape
    ids_TK = ids_TK.long()
    behind_TK = ids_TK > torch.arange(position, position + count, device=ids_TK.device)[:, None]
    step = max(1, _ROW_BYTES // (heads * ids_TK.shape[1] * 2 * dim * 4))
    states = []
    for first in range(0, count, step):
        some = slice(first, first + step)
        rows_HTK2D = _gathered(parts, ids_TK[some]).float()
        logits = form.capped(torch.einsum("htgd,htkd->htgk", q_HTGD[:, some], rows_HTK2D[:, :, :, 0]))
        logits = logits.masked_fill(behind_TK[some, None], -torch.inf)
        lse = logits.logsumexp(-1)
        weights = torch.exp(logits - lse[..., None])
        states.append(AttentionState(torch.einsum("htgk,htkd->htgd", weights, rows_HTK2D[:, :, :, 1]), lse))
    return form.add_sink(AttentionState.concatenate(states, dim=1))


def _gathered(parts: Sequence[Tensor], ids_TK: Tensor) -> Tensor:
    """Rows [H, T, K, 2, d] of these positions."""
    found: Tensor | None = None
    start = 0
    for rows_HN2D in parts:
        count = rows_HN2D.shape[1]
        if count:
            places = (ids_TK - start).clamp(0, count - 1).flatten().to(rows_HN2D.device)
            own = rows_HN2D[:, places].to(ids_TK.device)
            own = own.view(len(own), *ids_TK.shape, *own.shape[2:])
            mine = (ids_TK >= start)[None, :, :, None, None]
            found = own if found is None else torch.where(mine, own, found)
        start += count
    if found is None:
        raise ValueError(f"there are no keys for lists of {ids_TK.shape[1]}")
    return found
