"""Attention of many queries to all keys, without a mask, by the fastest of torch's fused kernels.

Where every processor of a GPU has a tile of queries, cuDNN's kernel is about twice as fast as the flash kernel. But
for shapes and strides that a thread has not given it before it prepares tens of milliseconds, and what it has prepared
is kept for ever. Prompts have any length, contexts too, and the strides of a context's keys and values are its length.
So cuDNN only gets what it has seen: queries in passes of one number of rows, the last one filled up, and keys in
blocks of three lengths, each copied first where it is a part of something longer. What is left of the keys goes to the
flash kernel, and parts merge by their log-sum-exp. All sizes are multiples of 128: with others some versions of cuDNN
are wrong.

Shape legend: H KV heads, R query rows of a KV head, P passes, N keys, X and Y any division of R, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import HALVES, attend_fused, attend_to_all, cudnn_takes

_GENERATIONS = (9, 10)
"""Of GPUs for which cuDNN has kernels of its own, as major compute capabilities: those where torch prefers it, too."""

_TILE = 128
"""Query rows that a processor works on at a time."""

_LEAST_ROWS = 1024
"""Of a KV head, from which on arithmetic outweighs copies of the keys and values."""

_LONGEST = 32_768
_BLOCK_BYTES = 128 * 2**20
"""Of the keys and values of a block at most, which is what copies take of the GPU's memory."""


@dataclass(frozen=True, slots=True)
class Division:
    """How attention of many queries is divided into calls of few shapes.

    rows: of each KV head in a pass. longest, shortest: keys of the blocks, powers of two.
    """

    rows: int
    longest: int
    shortest: int

    @staticmethod
    def of(heads: int, row_bytes: int, processors: int) -> Division:
        """For so many KV heads, bytes of a key and its value, and processors.

        A pass is a tile for each processor, as nearly as KV heads divide them: filling it up costs no time.
        """
        longest = min(_LONGEST, _BLOCK_BYTES // (heads * row_bytes))
        longest = max(4 * _TILE, 1 << (longest.bit_length() - 1))
        return Division(_TILE * max(1, processors // heads), longest, longest // 4)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of blocks, descending."""
        return (self.longest, self.longest // 2, self.shortest)

    def pays(self, rows: int, count: int) -> bool:
        """Whether calls of these shapes are faster than one of the flash kernel for so many query rows and keys."""
        return count >= self.shortest and rows >= max(_LEAST_ROWS, 3 * self.rows // 4)

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        """First and end of blocks of so many keys; all but the last one are of `lengths`."""
        return divide_past(count, self.longest, self.shortest)


def divide_past(count: int, largest: int, smallest: int) -> Iterator[tuple[int, int]]:
    """First and end of blocks of so many keys: as many of the largest as fit, then halves down to the smallest."""
    start, size = 0, largest
    while start < count:
        while size > smallest and count - start < size:
            size = max(smallest, size // 2)
        end = min(start + size, count)
        yield start, end
        start = end


def attend_many(queries_HXYD: Tensor, kv_HN2D: Tensor) -> AttentionState:
    """`attend_to_all` by whichever kernel is the fastest for so many queries and keys on their device.

    Which one, and so the last bits of the result, depends on shapes, dtypes and the device alone. Returns out float32.
    """
    heads, rows_x, rows_y, _ = queries_HXYD.shape
    division = division_on(kv_HN2D, queries_HXYD.dtype)
    if division is None or not division.pays(rows_x * rows_y, kv_HN2D.shape[1]):
        state = attend_to_all(queries_HXYD, kv_HN2D)
        return AttentionState(state.out.float(), state.lse)
    kv = kv_HN2D.to(queries_HXYD.dtype)
    state = attend_divided(queries_HXYD.reshape(heads, rows_x * rows_y, -1), kv, division)
    return AttentionState(state.out.reshape(queries_HXYD.shape), state.lse.reshape(queries_HXYD.shape[:-1]))


def division_on(kv_HN2D: Tensor, dtype: torch.dtype) -> Division | None:
    """How attention in this dtype to such keys and values is divided on their device; None where cuDNN is no gain."""
    if not kv_HN2D.is_cuda or dtype not in HALVES:
        return None
    device = torch.cuda.get_device_properties(kv_HN2D.device)
    heads, _, _, head_dim = kv_HN2D.shape
    sample = kv_HN2D.new_empty((1, 1, _TILE, head_dim), dtype=dtype)
    if device.major not in _GENERATIONS or not cudnn_takes(sample, sample, sample, causal=False):
        return None
    return Division.of(heads, 2 * head_dim * dtype.itemsize, device.multi_processor_count)


def attend_divided(queries_HRD: Tensor, kv_HN2D: Tensor, division: Division) -> AttentionState:
    """Attention of queries [H, R, d] to all keys and values [H, N, 2, d] of their dtype, N > 0, in calls of few shapes.

    Logits are scaled by 1/sqrt(d). Returns out [H, R, d] and lse [H, R], float32.
    """
    heads, rows, head_dim = queries_HRD.shape
    passes = -(-rows // division.rows)
    filled = pad(queries_HRD, (0, 0, 0, passes * division.rows - rows))
    queries_PHRD = _together(filled.view(heads, passes, division.rows, head_dim).transpose(0, 1))
    states: list[AttentionState] = []
    for start, end in division.blocks(kv_HN2D.shape[1]):
        block = kv_HN2D[:, start:end]
        known = end - start in division.lengths
        if known:
            block = _together(block)
        key, value = block[None, :, :, 0], block[None, :, :, 1]
        for number, queries in enumerate(queries_PHRD):
            part = attend_fused(queries[None], key, value, causal=False, cudnn=known)
            part = AttentionState(part.out[0], part.lse[0])
            if start == 0:
                states.append(AttentionState(part.out.float(), part.lse))
            else:
                states[number] = states[number].merge_(part)
    return AttentionState(
        torch.cat([state.out for state in states], dim=1)[:, :rows],
        torch.cat([state.lse for state in states], dim=1)[:, :rows],
    )


def prepare_many(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Has the calling thread's cuDNN prepare everything that `attend_many` gives it for such keys and values.

    Returns how many calls that took.
    """
    division = division_on(torch.empty(heads, 0, 2, head_dim, dtype=dtype, device=device), dtype)
    if division is None:
        return 0
    kv = torch.zeros(heads, division.longest, 2, head_dim, dtype=dtype, device=device)
    queries = torch.zeros(heads, division.rows, head_dim, dtype=dtype, device=device)
    for length in division.lengths:
        attend_divided(queries, kv[:, :length], division)
    return len(division.lengths)


def _together(tensor: Tensor) -> Tensor:
    """The same numbers in one piece of memory, with the strides of one: also where a dimension of size 1 had others."""
    return tensor.contiguous().flatten().view(tensor.shape)
