"""Exact causal attention of one chunk of queries to everything before it, in memory linear in the chunk.

Scores are never materialised: fused kernels return each part's output with its log-sum-exp, and the parts (blocks of
the past, which need no mask, and the chunk itself, which is causal) merge exactly. On a CPU this is also about half
the time of one call with an explicit [T, S] mask.

Shape legend: H KV heads, G query heads per KV head, T queries of the chunk, S keys before the chunk, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from index_store.attention_state import AttentionState

PAST_BLOCK = 65_536
"""Keys of the past that are converted to the compute dtype at a time."""


def attend_causally(
    queries_HGTD: Tensor, pasts_HS2D: Sequence[Tensor], chunk_HT2D: Tensor, past_block: int = PAST_BLOCK
) -> Tensor:
    """Attention of T queries to all earlier tokens and, causally, to themselves.

    queries_HGTD: [H, G, T, d], after RoPE, not scaled. pasts_HS2D, chunk_HT2D: keys and values, pieces of the past
    [H, S, 2, d] and the queries' own [H, T, 2, d], in any float dtype; they are converted to the queries' dtype, one
    block at a time. Returns [H, G, T, d] in the queries' dtype.
    """
    state = _attend_to_chunk(queries_HGTD, chunk_HT2D)
    for past_HS2D in pasts_HS2D:
        for start in range(0, past_HS2D.shape[1], past_block):
            state = state.merge(_attend_to_past(queries_HGTD, past_HS2D[:, start : start + past_block]))
    return state.out.to(queries_HGTD.dtype)


def _attend_to_past(queries_HGTD: Tensor, past_HS2D: Tensor) -> AttentionState:
    """All queries see all keys, so the group's heads are just more queries of the one KV head."""
    heads, group, count, dim = queries_HGTD.shape
    past = past_HS2D.to(queries_HGTD.dtype)
    out, lse = _fused_attention(
        queries_HGTD.reshape(1, heads, group * count, dim),
        past[None, :, :, 0],
        past[None, :, :, 1],
        causal=False,
    )
    return AttentionState(out.view(heads, group, count, dim).float(), lse.view(heads, group, count).float())


def _attend_to_chunk(queries_HGTD: Tensor, chunk_HT2D: Tensor) -> AttentionState:
    heads, group, count, dim = queries_HGTD.shape
    chunk = chunk_HT2D.to(queries_HGTD.dtype).repeat_interleave(group, dim=0)
    out, lse = _fused_attention(
        queries_HGTD.reshape(1, heads * group, count, dim),
        chunk[None, :, :, 0],
        chunk[None, :, :, 1],
        causal=True,
    )
    return AttentionState(
        out.reshape(heads, group, count, dim).float(), lse.reshape(heads, group, count).float()
    )


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(output [1, heads, T, d], log-sum-exp [1, heads, T]) of torch's fused kernel for the device and dtype."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    elif query.dtype in (torch.float16, torch.bfloat16):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal
        )[:2]
        lse = lse[..., : query.shape[2]]  # the kernel pads it to a multiple of 32
    return out, lse
