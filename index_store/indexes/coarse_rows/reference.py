"""Scores of coded keys and sums of coded values, decoded tile by tile: on any device, and what kernels compare with.

Shape legend: H KV heads, R rows of queries of a KV head, X keys, d head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState

_TILE_BYTES, _DEVICE_TILE_BYTES = 4 * 2**20, 128 * 2**20  # of one tile's rows in float32


class DecodedRows(Protocol):
    """Coded rows that can be decoded: `ScalarRows`, `ProductRows`."""

    @property
    def head_dim(self) -> int:
        """Channels of a key, d."""

    def decode_keys(self, first: int, end: int) -> Tensor:
        """[H, n, d] float32."""

    def decode_values(self, first: int, end: int) -> Tensor:
        """[H, n, d] float32."""


def score_keys_reference(
    rows: DecodedRows, queries_HRD: Tensor, first: int, end: int, out_HRX: Tensor
) -> None:
    """Writes products of queries [H, R, d] with the keys of rows first..end-1, [H, R, end - first], all float32."""
    for begin, stop in _tiles(rows, queries_HRD, first, end):
        keys = rows.decode_keys(begin, stop)
        out_HRX[..., begin - first : stop - first] = torch.bmm(queries_HRD, keys.transpose(1, 2))


def attend_values_reference(rows: DecodedRows, logits_HRX: Tensor, first: int) -> AttentionState:
    """Attention by logits [H, R, X] float32 to the values of rows first..first+X-1; -inf marks what does not count.

    Returns out [H, R, d] and lse [H, R], float32; 0 and -inf where nothing counts.
    """
    heads, queries, count = logits_HRX.shape
    peak = (
        logits_HRX.amax(-1, keepdim=True) if count else logits_HRX.new_full((heads, queries, 1), -torch.inf)
    )
    base = torch.where(torch.isneginf(peak), 0.0, peak)
    total = torch.zeros_like(base)
    out: Tensor | None = None
    for begin, stop in _tiles(rows, logits_HRX, 0, max(count, 1)):
        weights = (logits_HRX[..., begin:stop] - base).exp_()
        total += weights.sum(-1, keepdim=True)
        part = torch.bmm(weights, rows.decode_values(first + begin, first + min(stop, count)))
        out = part if out is None else out.add_(part)
    if out is None:
        raise ValueError("there is no tile")
    out /= total.clamp(min=torch.finfo(torch.float32).tiny)
    return AttentionState(out, (base + total.log()).squeeze(-1))


def _tiles(rows: DecodedRows, beside_HRx: Tensor, first: int, end: int) -> list[tuple[int, int]]:
    """First and end of the rows that are decoded at a time."""
    most = _TILE_BYTES if beside_HRx.device.type == "cpu" else _DEVICE_TILE_BYTES
    step = max(1, most // (4 * rows.head_dim * beside_HRx.shape[0]))
    return [(begin, min(begin + step, end)) for begin in range(first, end, step)]
