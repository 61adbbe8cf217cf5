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

from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import (
    attend_masked,
    attend_to_all,
    attend_to_themselves,
    cudnn_takes,
    divide_past,
)

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
    queries_HGTD: Tensor,
    pasts: Sequence[Tensor | Past],
    chunk_HT2D: Tensor,
    past_block: int = PAST_BLOCK,
    cap: float | None = None,
) -> AttentionState:
    """Attention of T queries to all earlier tokens and, causally, to themselves.

    queries_HGTD: [H, G, T, d], after RoPE, not scaled. pasts, chunk_HT2D: keys and values, pieces of the past
    [H, S, 2, d] or where they come from, and the queries' own [H, T, 2, d], in any float dtype; they are converted to
    the queries' dtype, one block at a time. Blocks that are divided alike give the same bits wherever they come from.
    cap: see `LogitForm`; capped logits are held in memory, some at a time. Returns out [H, G, T, d] and lse [H, G, T],
    float32.
    """
    by_cudnn = _cudnn_takes(queries_HGTD) and cap is None
    own = _attend_own(queries_HGTD, chunk_HT2D, cap)
    state = AttentionState(own.out.float(), own.lse.float())
    for past in pasts:
        for block_HS2D in _blocks(past, past_block, by_cudnn):
            if cap is None:
                fast = by_cudnn and block_HS2D.shape[1] >= _CUDNN_BLOCK
                state = state.merge_(attend_to_all(queries_HGTD, block_HS2D, cudnn=fast))
            else:
                state = state.merge_(attend_masked(queries_HGTD, block_HS2D, block_HS2D.shape[1], cap=cap))
    return state


def _attend_own(queries_HGTD: Tensor, chunk_HT2D: Tensor, cap: float | None) -> AttentionState:
    if cap is None:
        return attend_to_themselves(queries_HGTD, chunk_HT2D)
    return attend_masked(queries_HGTD, chunk_HT2D, 0, cap=cap)


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


def _cudnn_takes(queries_HGTD: Tensor) -> bool:
    """Whether cuDNN's kernel is there for these queries, and worth its preparations."""
    sample = queries_HGTD[:1, 0][None]
    return queries_HGTD.shape[2] >= _CUDNN_QUERIES and cudnn_takes(sample, sample, sample, causal=False)
