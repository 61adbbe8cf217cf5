"""Attention on a host to lists of keys, which are read where they are: neither gathered nor converted before.

Shape legend: H KV heads, T query positions, G group heads, N context tokens, t tail tokens, K listed keys, d head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.exponentials_numba import exponentiate, largest
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import add_weighted, dot, make_widening
from index_store.launch import launch, njit, on_host, prange

_AT_ONCE = 64  # keys, whose rows stay in the second-level cache
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_widen_bfloats, _widen_halves, _copy_floats = (
    make_widening(kind) for kind in ("bfloat16", "float16", "float32")
)


def attend_row_lists(
    queries_HTGD: Tensor, context_HN2D: Tensor, tail_Ht2D: Tensor, ids_HTK: Tensor, counts_HT: Tensor
) -> AttentionState:
    """Attention to keys and values [H, N, 2, d] of the context and, from id N on, [H, t, 2, d] of the tail.

    queries: float32, scaled by 1/sqrt(d). ids: int32, of which the first `counts` of a row count. Returns out [H, T, G,
    d] and lse [H, T, G], float32; 0 and -inf where no key is listed. A query's result does not depend on others.
    """
    if not _readable(queries_HTGD, context_HN2D, tail_Ht2D):
        return attend_row_lists_reference(queries_HTGD, context_HN2D, tail_Ht2D, ids_HTK, counts_HT)
    state = AttentionState.empty(queries_HTGD.shape[:3], queries_HTGD.shape[3])
    launch(
        _attend_lists,
        queries_HTGD.contiguous().numpy(),
        *_table(context_HN2D),
        context_HN2D.shape[1],
        *_table(tail_Ht2D),
        _KINDS[context_HN2D.dtype],
        ids_HTK.to(torch.int32).contiguous().numpy(),
        counts_HT.to(torch.int32).contiguous().numpy(),
        state.out.numpy(),
        state.lse.numpy(),
    )
    return state


def attend_row_lists_reference(
    queries_HTGD: Tensor, context_HN2D: Tensor, tail_Ht2D: Tensor, ids_HTK: Tensor, counts_HT: Tensor
) -> AttentionState:
    """The same by gathering rows, on any device."""
    heads, device = torch.arange(len(ids_HTK), device=ids_HTK.device)[:, None, None], queries_HTGD.device
    rows = torch.cat([context_HN2D.to(device), tail_Ht2D.to(device)], dim=1)[heads, ids_HTK.long()].float()
    logits = queries_HTGD @ rows[:, :, :, 0].transpose(2, 3)
    counts = torch.arange(ids_HTK.shape[2], device=device) < counts_HT[..., None]
    logits.masked_fill_(~counts[:, :, None], -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return AttentionState(weights @ rows[:, :, :, 1], logits.logsumexp(-1))


def _readable(queries_HTGD: Tensor, context_HN2D: Tensor, tail_Ht2D: Tensor) -> bool:
    """Whether the loop takes these rows as they are."""
    both = (context_HN2D, tail_Ht2D)
    return (
        all(on_host(tensor) for tensor in (queries_HTGD, *both))
        and context_HN2D.dtype == tail_Ht2D.dtype
        and context_HN2D.dtype in _KINDS
        and queries_HTGD.shape[3] % LANES == 0
        and all(_is_table(rows) for rows in both)
    )


def _is_table(rows_HN2D: Tensor) -> bool:
    head_dim = rows_HN2D.shape[3]
    return rows_HN2D.stride()[1:] == (2 * head_dim, head_dim, 1) and rows_HN2D.stride(0) % (2 * head_dim) == 0


def _table(rows_HN2D: Tensor) -> tuple[NDArray[np.generic], int]:
    """All heads' rows as one table [., 2 d], and how many of its rows lie between the first ones of two heads."""
    heads, count, _, head_dim = rows_HN2D.shape
    stride = rows_HN2D.stride(0) // (2 * head_dim) if heads > 1 else count
    size = ((heads - 1) * stride + count if count else 0, 2 * head_dim)
    table = rows_HN2D.as_strided(size, (2 * head_dim, 1), rows_HN2D.storage_offset())
    return (table if table.dtype == torch.float32 else table.view(torch.int16)).numpy(), stride


@njit(cache=True, nogil=True, parallel=True)
def _attend_lists(
    queries: NDArray[np.float32],
    context: NDArray[np.generic],
    context_stride: int,
    context_count: int,
    tail: NDArray[np.generic],
    tail_stride: int,
    kind: int,
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    heads, positions, group, dim = queries.shape
    for task in prange(heads * positions):
        head, position = task // positions, task % positions
        # A chunk's keys and values, its logits, weights, and what a row's tail of logits is padded in.
        rows, logits = np.empty((_AT_ONCE, 2 * dim), np.float32), np.empty((group, _AT_ONCE), np.float32)
        weights, scratch = np.empty((1, _AT_ONCE), np.float32), np.empty((1, LANES), np.float32)
        peaks, totals = np.full(group, np.float32(-np.inf)), np.zeros(group, np.float32)
        listed, sums = ids[head, position, : counts[head, position]], out[head, position]
        for first in range(0, listed.shape[0], _AT_ONCE):
            count = min(_AT_ONCE, listed.shape[0] - first)
            for n in range(count):
                key = listed[first + n]
                if key < context_count:
                    _read_row(context, head * context_stride + key, kind, rows, n)
                else:
                    _read_row(tail, head * tail_stride + key - context_count, kind, rows, n)
            _attend_rows(queries[head, position], rows, count, logits, weights, scratch, peaks, totals, sums)
        for g in range(group):
            if peaks[g] > -np.inf:
                lse[head, position, g] = peaks[g] + np.log(totals[g])
                for c in range(dim):
                    sums[g, c] /= totals[g]


@njit(cache=True, nogil=True, _nrt=False)
def _attend_rows(
    queries: NDArray[np.float32],
    rows: NDArray[np.float32],
    count: int,
    logits: NDArray[np.float32],
    weights: NDArray[np.float32],
    scratch: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Adds some keys to the sums, which are relative to the peaks so far."""
    group, dim = queries.shape
    vectors = dim // LANES
    for g in range(group):
        for n in range(count):
            logits[g, n] = dot(queries, g, 0, rows, n, 0, vectors)
        peak = max(peaks[g], largest(logits, g, 0, count))
        if peak == -np.inf:
            continue
        if peak > peaks[g]:
            share = np.exp(peaks[g] - peak)
            totals[g] *= share
            for c in range(dim):
                sums[g, c] *= share
            peaks[g] = peak
        totals[g] += exponentiate(logits, g, 0, count, peak, scratch, weights)
        for n in range(count):
            add_weighted(weights[0, n], rows, n, dim, sums, g, vectors)


@njit(cache=True, nogil=True, _nrt=False)
def _read_row(
    table: NDArray[np.generic], row: int, kind: int, rows: NDArray[np.float32], to_row: int
) -> None:  # pragma: no cover - compiled
    vectors = table.shape[1] // LANES
    if kind == 0:
        _widen_bfloats(table, row, 0, rows, to_row, 0, vectors)
    elif kind == 1:
        _widen_halves(table, row, 0, rows, to_row, 0, vectors)
    else:
        _copy_floats(table, row, 0, rows, to_row, 0, vectors)
