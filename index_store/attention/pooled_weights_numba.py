"""Host kernel that pools a group's attention weights: softmax of every head's logits, summed over the heads.

Shape legend: H KV heads, T query positions, G group heads, M keys, Q = H*T.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.exponentials_numba import exponentiate, largest
from index_store.launch import launch, njit, on_host, prange

_TILE = 8192
_PIECE = 1024  # logits that are in the first-level cache while all heads are added up


def pooled_weights(logits_HTGM: Tensor) -> Tensor:
    """[H, T, M] float32: the softmax of logits over M, summed over G; -inf where all of a key's logits are.

    Two passes over the logits, and no copy of them.
    """
    if not on_host(logits_HTGM):
        return pooled_weights_reference(logits_HTGM)
    heads, positions, group, count = logits_HTGM.shape
    out = torch.empty(heads, positions, count, device="cpu")
    if logits_HTGM.numel() > 0:
        queries, tiles = heads * positions, -(-count // _TILE)
        launch(
            _pooled_weights,
            logits_HTGM.reshape(queries, group, count).numpy(),
            out.new_empty(queries, group, tiles).numpy(),
            out.new_empty(queries, group, tiles).numpy(),
            out.view(queries, count).numpy(),
        )
    return out


def pooled_weights_reference(logits_HTGM: Tensor) -> Tensor:
    """The same by torch's softmax, on any device."""
    missing = torch.isneginf(logits_HTGM)
    # A head without any logit has no weights instead of nan.
    weights = logits_HTGM.masked_fill(missing.all(-1, keepdim=True), 0.0).softmax(-1)
    return weights.masked_fill_(missing, 0.0).sum(2).masked_fill_(missing.all(2), -torch.inf)


@njit(cache=True, nogil=True, parallel=True)
def _pooled_weights(
    logits: NDArray[np.float32],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    queries, group, tiles = peaks.shape
    for task in prange(queries * tiles):
        query, tile = task // tiles, task % tiles
        low, high = tile * _TILE, min((tile + 1) * _TILE, out.shape[1])
        _sum_tile(logits[query], low, high, tile, peaks[query], totals[query])
    for row in prange(queries * group):
        query, g = row // group, row % group
        peak, total = peaks[query, g].max(), np.float32(0)
        for tile in range(tiles):
            if peak > -np.inf:
                total += totals[query, g, tile] * np.exp(peaks[query, g, tile] - peak)
        # From here on the first peak of a row is its log-sum-exp.
        peaks[query, g, 0] = peak + np.log(total) if peak > -np.inf else np.float32(0)
    for task in prange(queries * tiles):
        query, tile = task // tiles, task % tiles
        low, high = tile * _TILE, min((tile + 1) * _TILE, out.shape[1])
        _pool_tile(logits[query], low, high, peaks[query], out[query])


@njit(cache=True, nogil=True)
def _sum_tile(
    logits: NDArray[np.float32],
    low: int,
    high: int,
    tile: int,
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Peaks of a tile's logits for every head, and the sums of their exponentials."""
    exponents, exponentials = np.empty(_PIECE, np.int32), np.empty((1, _PIECE), np.float32)
    for g in range(logits.shape[0]):
        peak, total = largest(logits, g, low, high), np.float32(0)
        if peak > -np.inf:
            for begin in range(low, high, _PIECE):
                count = min(_PIECE, high - begin)
                total += exponentiate(logits, g, begin, count, peak, exponents, exponentials)
        peaks[g, tile], totals[g, tile] = peak, total


@njit(cache=True, nogil=True)
def _pool_tile(
    logits: NDArray[np.float32], low: int, high: int, lse: NDArray[np.float32], out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """Weights of a tile's keys; lse: [G, .], the first column counts."""
    exponents, exponentials = np.empty(_PIECE, np.int32), np.empty((1, _PIECE), np.float32)
    for begin in range(low, high, _PIECE):
        count = min(_PIECE, high - begin)
        line = out[begin : begin + count]
        line[:] = 0
        for g in range(logits.shape[0]):
            exponentiate(logits, g, begin, count, lse[g, 0], exponents, exponentials)
            for i in range(count):
                line[i] += exponentials[0, i]
        for i in range(count):
            if line[i] == 0:  # too small for a float, or of a key without logits
                highest = logits[0, begin + i]
                for g in range(1, logits.shape[0]):
                    highest = max(highest, logits[g, begin + i])
                if highest == -np.inf:
                    line[i] = -np.inf
