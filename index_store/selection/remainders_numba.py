"""Host kernels of remainders: weights of clusters and the weighted sums of their values, in one pass over the clusters.

And logits of listed keys, taken out of those that something else attends to.

Shape legend: H KV heads, T query positions, G group heads, C clusters, R = T*G query rows, d head dim, X columns of
logits, K listed keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from index_store.attention.rows_in_line_numba import row_table
from index_store.compiled.launch import B1, F4, I4, I8, launch, njit, on_host, task_loop

# With more rows, products of matrices are faster.
_MOST_ROWS = 16
_PER_TASK = 256
# Clusters of a smaller weight, relative to the largest, would not change a float32 sum; they are not read.
_NEGLIGIBLE = np.float32(-24.0)


def cluster_sums(
    logits_HTGC: Tensor,
    counts_HTC: Tensor,
    queries_HTGD: Tensor,
    variances_HCD: Tensor | None,
    value_sums_HCD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights w_c of a key [H, T, G, C], sums of counts_c w_c [H, T, G] and of w_c values_c [H, T, G, d]; all float32.

    w_c = exp(logits_c) (1 + v_c / 2) with v_c = q^T diag(variances_c) q, or just exp(logits_c) without variances.
    logits_HTGC: at most 0, -inf for clusters that do not count. counts_HTC: keys of a cluster, for every position.
    variances_HCD, value_sums_HCD: rows of a cluster are contiguous, heads may be farther apart.
    """
    heads, positions, group, count = logits_HTGC.shape
    if positions * group > _MOST_ROWS or count == 0 or not on_host(logits_HTGC):
        return cluster_sums_reference(logits_HTGC, counts_HTC, queries_HTGD, variances_HCD, value_sums_HCD)
    rows, head_dim = positions * group, value_sums_HCD.shape[2]
    tasks = -(-count // _PER_TASK)
    weights = logits_HTGC.new_empty(heads, rows, count)
    totals = logits_HTGC.new_empty(heads, tasks, rows)
    sums = logits_HTGC.new_empty(heads, tasks, rows, head_dim)
    variances = (
        (np.empty((0, head_dim), np.float32), 0) if variances_HCD is None else row_table(variances_HCD)
    )
    launch(
        _cluster_sums,
        heads * tasks,
        logits_HTGC.reshape(heads, rows, count).numpy(),
        counts_HTC.contiguous().numpy(),
        queries_HTGD.square().reshape(heads, rows, -1).numpy(),
        *variances,
        *row_table(value_sums_HCD),
        weights.numpy(),
        totals.numpy(),
        sums.numpy(),
        work=0.16 * weights.numel() * head_dim,
    )
    shape = (heads, positions, group)
    return weights.view(*shape, count), totals.sum(1).view(shape), sums.sum(1).view(*shape, head_dim)


def cluster_sums_reference(
    logits_HTGC: Tensor,
    counts_HTC: Tensor,
    queries_HTGD: Tensor,
    variances_HCD: Tensor | None,
    value_sums_HCD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with products of matrices, on any device."""
    heads, positions, group, count = logits_HTGC.shape
    weights = logits_HTGC.exp().reshape(heads, positions * group, count)
    if variances_HCD is not None:
        squares = queries_HTGD.square().reshape(heads, positions * group, -1)
        one = weights.new_ones(1, 1, 1)
        weights *= torch.baddbmm(one, squares, variances_HCD.transpose(1, 2), alpha=0.5)
    sums = torch.bmm(weights, value_sums_HCD).view(heads, positions, group, -1)
    weights = weights.view(heads, positions, group, count)
    return weights, (weights * counts_HTC[:, :, None]).sum(-1), sums


@task_loop("f4x3 f4x3 f4x3 f4x2 i8 f4x2 i8 f4x3 f4x3 f4x4", fastmath={"reassoc", "contract"})
def _cluster_sums(
    job: int,
    logits: F4,
    counts: F4,
    squares: F4,
    variances: F4,
    variance_stride: int,
    values: F4,
    value_stride: int,
    weights: F4,
    totals: F4,
    sums: F4,
) -> None:
    _, rows, count = logits.shape
    tasks, dim = totals.shape[1], values.shape[1]
    group = rows // counts.shape[1]
    head, task = job // tasks, job % tasks
    added = np.zeros((rows, dim), np.float32)
    total = np.zeros(rows, np.float32)
    for c in range(task * _PER_TASK, min(count, (task + 1) * _PER_TASK)):
        for r in range(rows):
            if logits[head, r, c] < _NEGLIGIBLE:
                weights[head, r, c] = 0
                continue
            weight = np.exp(logits[head, r, c])
            if variance_stride > 0:
                spread = np.float32(0)
                for i in range(dim):
                    spread += squares[head, r, i] * variances[head * variance_stride + c, i]
                weight *= np.float32(1) + np.float32(0.5) * spread
            weights[head, r, c] = weight
            total[r] += weight * counts[head, r // group, c]
            for i in range(dim):
                added[r, i] += weight * values[head * value_stride + c, i]
    for r in range(rows):
        totals[head, task, r] = total[r]
        for i in range(dim):
            sums[head, task, r, i] = added[r, i]


def leave_out(logits_HTGX: Tensor, columns_HTK: Tensor, counted_HTK: Tensor) -> None:
    """Writes -inf to those columns that count, of every head and position, and that there are.

    columns_HTK: int32, may be outside. counted_HTK: bool.
    """
    whole = logits_HTGX.untyped_storage().nbytes() // logits_HTGX.element_size()
    _leave_out(
        logits_HTGX.as_strided((whole,), (1,), 0).numpy(),
        np.array([logits_HTGX.storage_offset(), *logits_HTGX.stride(), *logits_HTGX.shape[2:]], np.int64),
        columns_HTK.contiguous().numpy(),
        counted_HTK.contiguous().numpy(),
    )


def leave_out_reference(logits_HTGX: Tensor, columns_HTK: Tensor, counted_HTK: Tensor) -> None:
    """The same in a tensor, on any device."""
    inside = counted_HTK & (columns_HTK >= 0) & (columns_HTK < logits_HTGX.shape[-1])
    head, position, entry = inside.nonzero(as_tuple=True)
    columns = columns_HTK[head, position, entry].long()
    logits_HTGX.transpose(2, 3)[head, position, columns] = -torch.inf


@njit("f4x1 i8x1 i4x3 b1x3")
def _leave_out(line: F4, places: I8, columns: I4, counted: B1) -> None:
    """places: where logits begin in the line, their four strides, group heads, and columns."""
    heads, positions, count = columns.shape
    group, width = places[5], places[6]
    for head in range(heads):
        for position in range(positions):
            row = places[0] + head * places[1] + position * places[2]
            for k in range(count):
                column = np.int64(columns[head, position, k])
                if counted[head, position, k] and 0 <= column < width:
                    for g in range(group):
                        line[row + g * places[3] + column * places[4]] = -np.inf
