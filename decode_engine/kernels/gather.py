"""Gather of selected keys and values, converted to float32 on the way.

Shape legend: H KV heads, T query positions, K kept keys, N context tokens, t tail tokens, d head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.kernels.launch import launch

_ROWS_PER_TASK = 64
_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}
_HALF_EXPONENT_STEP = np.float32(2.0**112)  # exponent bias of float32 less that of float16, as a factor


def gather_rows(context_HN2D: Tensor, tail_Ht2D: Tensor, ids_HTK: Tensor) -> Tensor:
    """Rows [H, T, K, 2, d] float32 of the keys ids_HTK (int32): ids below N from the context, others from the tail.

    Both sources share one dtype (float32, float16 or bfloat16, finite) and have unit stride in their last two
    dimensions. Every id must be below N + t; other dtypes raise InvalidArgumentError.
    """
    dtype = context_HN2D.dtype
    if dtype not in _BITS or tail_Ht2D.dtype != dtype:
        raise InvalidArgumentError(
            f"keys and values are {dtype} and {tail_Ht2D.dtype}, expected one of float32, float16, bfloat16 for both"
        )
    rows = torch.empty(*ids_HTK.shape, *context_HN2D.shape[2:])
    if rows.numel() > 0:
        launch(
            _gather_rows,
            context_HN2D.flatten(2).view(_BITS[dtype]).numpy(),
            tail_Ht2D.flatten(2).view(_BITS[dtype]).numpy(),
            ids_HTK.flatten(1).numpy(),
            dtype == torch.float16,
            rows.view(ids_HTK.shape[0], -1, rows.shape[-1] * 2).numpy(),
        )
    return rows


def gather_rows_reference(context_HN2D: Tensor, tail_Ht2D: Tensor, ids_HTK: Tensor) -> Tensor:
    """The same by indexing a concatenation of both sources."""
    both = torch.cat([context_HN2D, tail_Ht2D], dim=1)
    heads = torch.arange(len(both))[:, None, None]
    return both[heads, ids_HTK.long()].float()


@njit(cache=True, nogil=True)
def _convert_row(
    source: NDArray[np.uint16], is_half: bool, out: NDArray[np.float32], bits: NDArray[np.uint32]
) -> None:  # pragma: no cover - compiled
    """out = source as float32; `bits` is an integer view of `out`."""
    width = out.shape[0]
    if source.itemsize == 4:
        for i in range(width):
            bits[i] = source[i]
    elif is_half:
        for i in range(width):
            bits[i] = np.uint32(source[i] & np.uint16(0x7FFF)) << np.uint32(13)
        for i in range(width):
            out[i] *= _HALF_EXPONENT_STEP
        for i in range(width):
            bits[i] |= np.uint32(source[i] & np.uint16(0x8000)) << np.uint32(16)
    else:
        for i in range(width):
            bits[i] = np.uint32(source[i]) << np.uint32(16)


@njit(cache=True, nogil=True, parallel=True)
def _gather_rows(
    context: NDArray[np.uint16],
    tail: NDArray[np.uint16],
    ids: NDArray[np.int32],
    is_half: bool,
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    heads, count = ids.shape
    stored = context.shape[1]
    bits = out.view(np.uint32)
    tasks = (count + _ROWS_PER_TASK - 1) // _ROWS_PER_TASK
    for task in prange(heads * tasks):
        head = task // tasks
        start = (task % tasks) * _ROWS_PER_TASK
        for row in range(start, min(start + _ROWS_PER_TASK, count)):
            i = np.int64(ids[head, row])
            source = context[head, i] if i < stored else tail[head, i - stored]
            _convert_row(source, is_half, out[head, row], bits[head, row])
