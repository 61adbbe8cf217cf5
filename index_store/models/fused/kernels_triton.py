"""Norms, rotations and gates of a model's layers as one launch each.

A model's own modules round to the dtype of their tensors wherever they write one; so do these, so that the bits are the
same but where sums are added up in another order, or a device's exponential is another one.

Shape legend: B texts, H query heads, K KV heads, T tokens, D head dim, R dimensions that are rotated.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu, silu

MOST_CHANNELS = 2**15
"""Of a norm: a program holds a whole row."""

_BLOCK = 1024
_HEADS = 4  # that a program turns


class Gate(IntEnum):
    """What a gate's values go through."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool, late: bool) -> Tensor:
    """x [..., D] over the root of the mean of its squares, times a weight [D], or that and one (`offset`).

    late: the weight is applied to what has been rounded to x's dtype, which is rounded again.
    """
    channels = x.shape[-1]
    rows = x.reshape(-1, channels)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    size = triton.next_power_of_2(channels)
    if len(rows):
        norm_kernel[(len(rows),)](
            rows, weight, out, rows.stride(0), eps, channels,
            SIZE=size, OFFSET=offset, LATE=late, num_warps=max(1, min(16, size // 512)),
        )  # fmt: skip
    return out.view(x.shape)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: bool, late: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    factor = weight.float() + 1 if offset else weight.float()
    return ((normed.to(x.dtype).float() if late else normed) * factor).to(x.dtype)


def gated(both: Tensor, kind: Gate) -> Tensor:
    """both [..., 2 I]: what goes through a gate, and what it is multiplied with then; contiguous. [..., I]."""
    width = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], width, dtype=both.dtype, device=both.device)
    rows = both.numel() // (2 * width)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        gate_kernel[grid](both, out, width, KIND=int(kind), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def gated_reference(both: Tensor, kind: Gate) -> Tensor:
    gate, up = both.chunk(2, -1)
    if kind is Gate.SILU:
        return silu(gate) * up
    return gelu(gate, approximate="tanh" if kind is Gate.GELU_TANH else "none") * up


def rotate(q_BHTD: Tensor, k_BKTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with their first R dimensions turned in halves; the others stay.

    cos_BTR, sin_BTR: of one dtype; one text's may be those of all.
    """
    texts, heads, tokens, dim = q_BHTD.shape
    kv_heads, rotated = k_BKTD.shape[1], cos_BTR.shape[-1]
    q, k = (each if each.stride(3) == 1 else each.contiguous() for each in (q_BHTD, k_BKTD))
    cos_BTR, sin_BTR = (each.expand(texts, tokens, rotated) for each in (cos_BTR, sin_BTR))
    # As tokens have them: what follows turns them back.
    q_out, k_out = (
        torch.empty(texts, tokens, each.shape[1], dim, dtype=each.dtype, device=each.device).transpose(1, 2)
        for each in (q, k)
    )
    if texts * tokens:
        grid = (texts * tokens, triton.cdiv(heads, _HEADS) + triton.cdiv(kv_heads, _HEADS))
        rotate_kernel[grid](
            q, k, cos_BTR, sin_BTR, q_out, k_out,
            *q.stride()[:3], *k.stride()[:3], *cos_BTR.stride(), *sin_BTR.stride(),
            *q_out.stride()[:3], *k_out.stride()[:3], tokens, heads, kv_heads,
            HALF=rotated // 2, DIM=dim, SIZE=triton.next_power_of_2(rotated // 2),
            REST=triton.next_power_of_2(dim - rotated) if dim > rotated else 0, HEADS=_HEADS,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


def rotate_reference(
    q_BHTD: Tensor, k_BKTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor
) -> tuple[Tensor, Tensor]:
    cos_B1TR, sin_B1TR = cos_BTR[:, None], sin_BTR[:, None]
    rotated = cos_BTR.shape[-1]

    def turned(x_BHTD: Tensor) -> Tensor:
        part = x_BHTD[..., :rotated]
        low, high = part.chunk(2, -1)
        return torch.cat(
            [part * cos_B1TR + torch.cat([-high, low], -1) * sin_B1TR, x_BHTD[..., rotated:]], -1
        )

    return turned(q_BHTD), turned(k_BKTD)


@triton.jit
def norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    channels: tl.tensor,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    LATE: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, SIZE)
    there = channel < channels
    weight = tl.load(weight_ptr + channel, mask=there, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride + channel, mask=there, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x) / channels + eps)
    if LATE:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    if OFFSET:
        weight += 1.0
    tl.store(out_ptr + row * channels + channel, (x * weight).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def gate_kernel(
    both_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A block of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < width
    gate = tl.load(both_ptr + row * 2 * width + place, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + (row * 2 + 1) * width + place, mask=there, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        # tanh by a sigmoid: 1 + tanh(x) is 2 sigmoid(2x)
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + place, (gate * up).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def rotate_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    q_text: tl.tensor,
    q_head: tl.tensor,
    q_token: tl.tensor,
    k_text: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    cos_text: tl.tensor,
    cos_token: tl.tensor,
    cos_channel: tl.tensor,
    sin_text: tl.tensor,
    sin_token: tl.tensor,
    sin_channel: tl.tensor,
    q_out_text: tl.tensor,
    q_out_head: tl.tensor,
    q_out_token: tl.tensor,
    k_out_text: tl.tensor,
    k_out_head: tl.tensor,
    k_out_token: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Some heads of one token: of its queries, or behind those of its keys."""
    text = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    number = tl.program_id(1)
    of_queries = tl.cdiv(heads, HEADS)
    if number < of_queries:
        head = number * HEADS + tl.arange(0, HEADS)
        turn_heads(
            q_ptr + text * q_text + token * q_token, q_head,
            q_out_ptr + text * q_out_text + token * q_out_token, q_out_head, head, heads,
            cos_ptr + text * cos_text + token * cos_token, cos_channel,
            sin_ptr + text * sin_text + token * sin_token, sin_channel, HALF, DIM, SIZE, REST,
        )  # fmt: skip
    else:
        head = (number - of_queries) * HEADS + tl.arange(0, HEADS)
        turn_heads(
            k_ptr + text * k_text + token * k_token, k_head,
            k_out_ptr + text * k_out_text + token * k_out_token, k_out_head, head, kv_heads,
            cos_ptr + text * cos_text + token * cos_token, cos_channel,
            sin_ptr + text * sin_text + token * sin_token, sin_channel, HALF, DIM, SIZE, REST,
        )  # fmt: skip


@triton.jit
def turn_heads(
    x_ptr: tl.tensor,
    x_head: tl.tensor,
    out_ptr: tl.tensor,
    out_head: tl.tensor,
    head: tl.tensor,
    heads: tl.tensor,
    cos_ptr: tl.tensor,
    cos_channel: tl.tensor,
    sin_ptr: tl.tensor,
    sin_channel: tl.tensor,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Every product is rounded, and then their sum."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.arange(0, SIZE)
    turned = channel < HALF
    there = (head < heads)[:, None] & turned[None, :]
    x_ptrs = x_ptr + head[:, None] * x_head + channel[None, :]
    out_ptrs = out_ptr + head[:, None] * out_head + channel[None, :]
    low = tl.load(x_ptrs, mask=there, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF, mask=there, other=0.0).to(tl.float32)
    cos_low = tl.load(cos_ptr + channel * cos_channel, mask=turned, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + (channel + HALF) * cos_channel, mask=turned, other=0.0).to(tl.float32)[
        None, :
    ]
    sin_low = tl.load(sin_ptr + channel * sin_channel, mask=turned, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + (channel + HALF) * sin_channel, mask=turned, other=0.0).to(tl.float32)[
        None, :
    ]
    first = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
    second = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    tl.store(out_ptrs, first.to(dtype), mask=there)
    tl.store(out_ptrs + HALF, second.to(dtype), mask=there)
    if REST > 0:
        other = 2 * HALF + tl.arange(0, REST)
        kept = (head < heads)[:, None] & (other < DIM)[None, :]
        rest = tl.load(x_ptr + head[:, None] * x_head + other[None, :], mask=kept, other=0.0)
        tl.store(out_ptr + head[:, None] * out_head + other[None, :], rest, mask=kept)
