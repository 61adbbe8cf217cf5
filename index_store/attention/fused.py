"""Exact attention by those of torch's fused kernels that tell the log-sum-exp as well: no logits in memory.

Shape legend: B batch, H KV heads, G query heads per KV head, T queries, N keys, X and Y any division of the queries of
one KV head, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState

HALVES = (torch.float16, torch.bfloat16)

_EFFICIENT_ALIGNMENT = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this."""


def attend_to_all(queries_HXYD: Tensor, kv_HN2D: Tensor, *, cudnn: bool = False) -> AttentionState:
    """Attention of every query [H, X, Y, d] to all keys and values [H, N, 2, d] of its KV head.

    Keys and values are converted to the queries' dtype, and logits are scaled by 1/sqrt(d). cudnn: see `attend_fused`.
    Returns out [H, X, Y, d] in the queries' dtype and lse [H, X, Y].
    """
    # The group's heads are just more queries of the one KV head.
    kv = kv_HN2D.to(queries_HXYD.dtype)[None]
    queries = queries_HXYD.flatten(1, 2)[None]
    state = attend_fused(queries, kv[:, :, :, 0], kv[:, :, :, 1], causal=False, cudnn=cudnn)
    return AttentionState(state.out.view(queries_HXYD.shape), state.lse.view(queries_HXYD.shape[:-1]))


def attend_to_themselves(queries_HGTD: Tensor, kv_HT2D: Tensor, *, cudnn: bool = False) -> AttentionState:
    """Causal attention of queries [H, G, T, d] to the keys and values [H, T, 2, d] of the same tokens.

    As `attend_to_all`. Returns out [H, G, T, d] and lse [H, G, T].
    """
    kv = kv_HT2D.to(queries_HGTD.dtype).repeat_interleave(queries_HGTD.shape[1], dim=0)[None]
    queries = queries_HGTD.flatten(0, 1)[None]
    state = attend_fused(queries, kv[:, :, :, 0], kv[:, :, :, 1], causal=True, cudnn=cudnn)
    return AttentionState(state.out.view(queries_HGTD.shape), state.lse.view(queries_HGTD.shape[:-1]))


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    cudnn: bool = False,
) -> AttentionState:
    """Attention of [B, H, T, d] to [B, H, N, d], all of one dtype and device, which choose the kernel.

    causal: query t sees keys 0..t; N is T then. scale: of the logits, 1/sqrt(d) by default. cudnn: by cuDNN's kernel
    where it takes these, which is fast, but prepares long for every length it has not seen. Returns out [B, H, T, d] in
    the queries' dtype and lse [B, H, T].
    """
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    elif query.dtype not in HALVES:
        out, lse = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )[:2]
    elif cudnn and cudnn_takes(query, key, value, causal=causal):
        out, lse = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )[:2]
    return AttentionState(out, lse.reshape(*query.shape[:2], -1)[..., : query.shape[2]])


def attend_fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, state: AttentionState, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value of causal `attend_fused` with cuDNN, all [B, H, T, d]; grad: by `out`.

    state: of the whole softmax that these keys are a part of, which yields the part's share of the gradient.
    """
    aten = torch.ops.aten
    tokens, out, lse = query.shape[2], state.out, state.lse
    found: Any
    none = torch.zeros((), dtype=torch.int64, device=query.device)  # the state of a dropout that is not there
    lengths = (None, None, tokens, tokens, 0.0, True)
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, True, scale=scale
        )
    elif query.dtype not in HALVES:
        lse = torch.nn.functional.pad(lse, (0, -tokens % _EFFICIENT_ALIGNMENT))
        wanted = [True, True, True, False]
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, out, lse, none, none, 0.0, wanted, True, scale=scale
        )[:3]
    elif cudnn_takes(query, key, value, causal=True):
        lse = lse.contiguous()[..., None]
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, lse, none, none, None, *lengths, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), *lengths, none, none, scale=scale
        )
    return found  # type: ignore[no-any-return]


def cudnn_takes(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Whether there is a kernel of cuDNN's for these, [B, H, T, d] and [B, H, N, d]."""
    if not query.is_cuda or query.dtype not in HALVES:
        return False
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))
