"""Host kernels of the query-table search, each beside its eager reference.

Shape legend: H KV heads, R query rows (positions x group heads), J table rows read per query row, S stored table rows
(subspaces x centroids), N keys, L list capacity, M ranked columns, T query positions, G group heads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from index_store.kernels.launch import launch

_TILE = 2048  # keys per tile: float32 sums and eight int8 rows stay in the first-level cache
_TILES_PER_TASK = 8
_LOG2E = np.float32(1.4426950408889634)


def score_tables(
    tables_HSN: Tensor,
    rows_HRJ: Tensor,
    weights_HRJ: Tensor,
    first: int,
    end: int,
    out_HRM: Tensor,
    column: int,
) -> None:
    """out[h, r, column + i] = sum_j weights[h, r, j] * tables[h, rows[h, r, j], first + i], i < end - first.

    tables int8 (any stride between rows, unit stride along N), rows int32, weights and out float32.
    """
    if end > first and rows_HRJ.numel() > 0:
        launch(
            _score_tables,
            tables_HSN.numpy(),
            rows_HRJ.numpy(),
            weights_HRJ.numpy(),
            first,
            end,
            out_HRM.numpy(),
            column,
        )


def score_tables_reference(
    tables_HSN: Tensor,
    rows_HRJ: Tensor,
    weights_HRJ: Tensor,
    first: int,
    end: int,
    out_HRM: Tensor,
    column: int,
) -> None:
    """The same by gathering whole rows."""
    for head in range(tables_HSN.shape[0]):
        picked = tables_HSN[head, rows_HRJ[head].long(), first:end].float()
        out_HRM[head, :, column : column + end - first] = (picked * weights_HRJ[head, ..., None]).sum(1)


def softmax_sum(scores_HTGM: Tensor) -> Tensor:
    """Sum over the group of softmaxed rows: [H, T, G, M] float32 logits -> [H, T, M] float32. Overwrites its input.

    exp is a cubic polynomial per octave (relative error below 2e-4), enough for a ranking.
    """
    heads, positions, group, columns = scores_HTGM.shape
    out = torch.empty(heads, positions, columns)
    if columns > 0:
        rows = scores_HTGM.view(heads * positions, group, columns).numpy()
        launch(_softmax_sum, rows, out.view(heads * positions, columns).numpy())
    return out


def softmax_sum_reference(scores_HTGM: Tensor) -> Tensor:
    """The same by torch's softmax."""
    return scores_HTGM.softmax(-1).sum(2)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"}, parallel=True)
def _score_tables(
    tables: NDArray[np.int8],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    first: int,
    end: int,
    out: NDArray[np.float32],
    column: int,
) -> None:  # pragma: no cover - compiled
    heads, queries, picks = rows.shape
    span = _TILE * _TILES_PER_TASK
    tasks = (end - first + span - 1) // span
    for task in prange(heads * queries * tasks):
        head = task // (queries * tasks)
        query = (task // tasks) % queries
        begin = first + (task % tasks) * span
        for low in range(begin, min(begin + span, end), _TILE):
            high = min(low + _TILE, end)
            acc = out[head, query, column + low - first : column + high - first]
            count = high - low
            acc[:] = np.float32(0)
            pick = 0
            while pick + 4 <= picks:
                row0 = tables[head, rows[head, query, pick], low:high]
                row1 = tables[head, rows[head, query, pick + 1], low:high]
                row2 = tables[head, rows[head, query, pick + 2], low:high]
                row3 = tables[head, rows[head, query, pick + 3], low:high]
                w0 = weights[head, query, pick]
                w1 = weights[head, query, pick + 1]
                w2 = weights[head, query, pick + 2]
                w3 = weights[head, query, pick + 3]
                for i in range(count):
                    acc[i] += (
                        w0 * np.float32(row0[i])
                        + w1 * np.float32(row1[i])
                        + w2 * np.float32(row2[i])
                        + w3 * np.float32(row3[i])
                    )
                pick += 4
            while pick < picks:
                row = tables[head, rows[head, query, pick], low:high]
                w = weights[head, query, pick]
                for i in range(count):
                    acc[i] += w * np.float32(row[i])
                pick += 1


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _exp_tile(
    x: NDArray[np.float32], peak: np.float32, octave: NDArray[np.int32], factor: NDArray[np.float32]
) -> float:  # pragma: no cover - compiled
    """Overwrites x by exp(x - peak), x <= peak, and returns its sum. `factor` is a float view of `octave`."""
    for i in range(x.shape[0]):
        y = (x[i] - peak) * _LOG2E
        y = y if y > np.float32(-126.0) else np.float32(-126.0)
        whole = np.floor(y)
        rest = y - whole
        octave[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        # 2**rest on [0, 1): minimax cubic
        x[i] = np.float32(0.99992522) + rest * (
            np.float32(0.69583354) + rest * (np.float32(0.22606716) + rest * np.float32(0.078024523))
        )
    total = np.float32(0)
    for i in range(x.shape[0]):
        x[i] *= factor[i]
        total += x[i]
    return float(total)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _softmax_sum_row(
    scores: NDArray[np.float32], out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    group, columns = scores.shape
    octave = np.empty(_TILE, np.int32)
    factor = octave.view(np.float32)
    for g in range(group):
        row = scores[g]
        peak = np.float32(-np.inf)
        for i in range(columns):
            peak = row[i] if row[i] > peak else peak
        total = 0.0
        for low in range(0, columns, _TILE):
            tile = row[low : low + _TILE]
            total += _exp_tile(tile, peak, octave[: tile.shape[0]], factor[: tile.shape[0]])
        share = np.float32(1.0 / total)
        if g == 0:
            for i in range(columns):
                out[i] = row[i] * share
        else:
            for i in range(columns):
                out[i] += row[i] * share


@njit(cache=True, nogil=True, parallel=True)
def _softmax_sum(
    scores: NDArray[np.float32], out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    for row in prange(scores.shape[0]):
        _softmax_sum_row(scores[row], out[row])
