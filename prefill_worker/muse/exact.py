"""Exact causal attention of a block to itself by torch's fused kernels, which tell the log-sum-exp as well.

The backward pass takes output and log-sum-exp of the whole softmax that the block is a part of, which yields the part's
share of the gradient.

Shape legend: B batch, H heads, T tokens, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_EFFICIENT_ALIGNMENT = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this."""


def attend_block(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out [B, H, T, D] and log-sum-exp [B, H, T], causal; all inputs are [B, H, T, D]."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)  # type: ignore[no-any-return]
    if query.dtype not in _HALVES:
        out, lse = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, True, scale=scale
        )[:2]
    elif by_cudnn(query, key, value):
        out, lse = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scale
        )[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)[
            :2
        ]
    return out, lse.reshape(*query.shape[:2], -1)[..., : query.shape[2]]


def attend_block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value. out, lse: of the whole softmax."""
    aten = torch.ops.aten
    tokens = query.shape[2]
    found: Any
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, True, scale=scale
        )
        return found  # type: ignore[no-any-return]
    state = torch.zeros((), dtype=torch.int64, device=query.device)  # of the dropout, of which there is none
    if query.dtype not in _HALVES:
        padded = torch.nn.functional.pad(lse, (0, -tokens % _EFFICIENT_ALIGNMENT))
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            query,
            key,
            value,
            None,
            out,
            padded,
            state,
            state,
            0.0,
            [True, True, True, False],
            True,
            scale=scale,
        )[:3]
    elif by_cudnn(query, key, value):
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse.contiguous()[..., None],
            state,
            state,
            None,
            None,
            None,
            tokens,
            tokens,
            0.0,
            True,
            scale=scale,
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            None,
            None,
            tokens,
            tokens,
            0.0,
            True,
            state,
            state,
            scale=scale,
        )
    return found  # type: ignore[no-any-return]


def by_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN's kernel takes these, which is the fastest where it does."""
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))
