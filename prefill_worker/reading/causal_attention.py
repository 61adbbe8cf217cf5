"""Exact causal attention of one chunk of queries to everything before it, in memory linear in the chunk.

Scores are never materialised: fused kernels return each part's output with its log-sum-exp, and the parts (blocks of
the past, which need no mask, and the chunk itself, which is causal) merge exactly. On a CPU this is also about half
the time of one call with an explicit [T, S] mask.

On a GPU cuDNN's kernel takes the blocks of the past: it is about twice as fast as the flash kernel there, but prepares
40 ms for every length that it has not seen, so blocks are a few powers of two and what is left goes to the other.

Shape legend: H KV heads, G query heads per KV head, T queries of the chunk, S keys before the chunk, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

PAST_BLOCK = 65_536
"""Keys of the past that are attended to, and converted to the compute dtype, at a time."""

_CUDNN_BLOCK = 8_192  # the smallest that is worth a length of its own
_CUDNN_QUERIES = 1_024


class Past(Protocol):
    """Keys and values of earlier tokens that are not on the queries' device, and come there block by block."""

    @property
    def count(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def largest(self) -> int:
        """Tokens of a block at most."""
        ...

    def blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """[H, end - start, 2, d] on the queries' device for every range, good until the next one is asked for."""
        ...


def attend_causally(
    queries_HGTD: Tensor, pasts: Sequence[Tensor | Past], chunk_HT2D: Tensor, past_block: int = PAST_BLOCK
) -> Tensor:
    """Attention of T queries to all earlier tokens and, causally, to themselves.

    queries_HGTD: [H, G, T, d], after RoPE, not scaled. pasts, chunk_HT2D: keys and values, pieces of the past
    [H, S, 2, d] or where they come from, and the queries' own [H, T, 2, d], in any float dtype; they are converted to
    the queries' dtype, one block at a time. Blocks that are divided alike give the same bits wherever they come from.
    Returns [H, G, T, d] in the queries' dtype.
    """
    parts = _Parts(_attend_to_chunk(queries_HGTD, chunk_HT2D))
    by_cudnn = _cudnn_takes(queries_HGTD)
    for past in pasts:
        for block_HS2D in _blocks(past, past_block, by_cudnn):
            fast = by_cudnn and block_HS2D.shape[1] >= _CUDNN_BLOCK
            parts.add(*_attend_to_past(queries_HGTD, block_HS2D, fast))
    return parts.out.to(queries_HGTD.dtype)


def _blocks(past: Tensor | Past, largest: int, by_cudnn: bool) -> Iterator[Tensor]:
    if isinstance(past, Tensor):
        count = past.shape[1]
    else:
        count, largest = past.count, min(largest, past.largest)
    ranges = list(divide_past(count, largest, min(_CUDNN_BLOCK, largest) if by_cudnn else largest))
    if isinstance(past, Tensor):
        yield from (past[:, start:end] for start, end in ranges)
    else:
        yield from past.blocks(ranges)


def divide_past(count: int, largest: int, smallest: int) -> Iterator[tuple[int, int]]:
    """First and end of the blocks of the past: as many of the largest as fit, then halves down to the smallest."""
    start, size = 0, largest
    while start < count:
        while size > smallest and count - start < size:
            size = max(smallest, size // 2)
        end = min(start + size, count)
        yield start, end
        start = end


class _Parts:
    """The sum of partial results, each weighted by its share of the softmax, in place."""

    def __init__(self, first: tuple[Tensor, Tensor]) -> None:
        self.out = first[0].float()
        self._lse = first[1].float()

    def add(self, out: Tensor, lse: Tensor) -> None:
        total = torch.logaddexp(self._lse, lse)
        self.out.mul_((self._lse - total).exp_()[..., None])
        self.out.addcmul_(out.to(self.out.dtype), (lse - total).exp_()[..., None])
        self._lse = total


def _cudnn_takes(queries_HGTD: Tensor) -> bool:
    """Whether cuDNN's kernel is there for these queries, and worth its preparations."""
    if not queries_HGTD.is_cuda or queries_HGTD.shape[2] < _CUDNN_QUERIES:
        return False
    if queries_HGTD.dtype not in (torch.float16, torch.bfloat16):
        return False
    sample = queries_HGTD[:1, 0][None]
    parameters = torch.backends.cuda.SDPAParams(sample, sample, sample, None, 0.0, False, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))


def _attend_to_past(queries_HGTD: Tensor, past_HS2D: Tensor, by_cudnn: bool) -> tuple[Tensor, Tensor]:
    """All queries see all keys, so the group's heads are just more queries of the one KV head."""
    heads, group, count, dim = queries_HGTD.shape
    past = past_HS2D.to(queries_HGTD.dtype)
    query = queries_HGTD.reshape(1, heads, group * count, dim)
    key, value = past[None, :, :, 0], past[None, :, :, 1]
    if by_cudnn:
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[:2]
    else:
        out, lse = _fused_attention(query, key, value, causal=False)
    return out.reshape(heads, group, count, dim), lse.reshape(heads, group, count)


def _attend_to_chunk(queries_HGTD: Tensor, chunk_HT2D: Tensor) -> tuple[Tensor, Tensor]:
    heads, group, count, dim = queries_HGTD.shape
    chunk = chunk_HT2D.to(queries_HGTD.dtype).repeat_interleave(group, dim=0)
    out, lse = _fused_attention(
        queries_HGTD.reshape(1, heads * group, count, dim),
        chunk[None, :, :, 0],
        chunk[None, :, :, 1],
        causal=True,
    )
    return out.reshape(heads, group, count, dim), lse.reshape(heads, group, count)


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
