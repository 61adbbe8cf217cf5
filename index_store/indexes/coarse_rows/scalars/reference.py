"""What the loops over coded rows do, eagerly: on any device, and what they are compared with.

Shape legend: H KV heads, R rows of queries of a KV head, G group heads, X keys, S spans of keys, d head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.scalars.spans import SPAN

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


def weigh_reference(logits_HRX: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials [H, R, X] of logits, each relative to its span's peak, and these peaks and totals [H, R, S].

    shift: positions of the first span that lie before the first logit.
    """
    spans = [
        logits_HRX[..., max(0, begin) : begin + SPAN] for begin in range(-shift, logits_HRX.shape[2], SPAN)
    ]
    peaks = torch.stack([span.amax(-1) for span in spans], dim=-1)
    bases = peaks.masked_fill(torch.isneginf(peaks), 0.0)
    weights = [(span - bases[..., number, None]).exp() for number, span in enumerate(spans)]
    totals = torch.stack([span.sum(-1) for span in weights], dim=-1)
    return torch.cat(weights, dim=-1), peaks, totals


def take_best_reference(
    weights_HGX: Tensor, peaks_HGS: Tensor, totals_HGS: Tensor, shift: int, keep: int
) -> tuple[Tensor, Tensor]:
    """Column ids [H, keep] int32, ascending, of the best keys of a group, and the weights without theirs."""
    shares = totals_HGS.log().add(peaks_HGS).softmax(-1) / totals_HGS
    span_X = (shift + torch.arange(weights_HGX.shape[2])) // SPAN
    sums = (weights_HGX * shares[..., span_X]).sum(1)
    ids = sums.sort(dim=-1, descending=True, stable=True).indices[:, :keep].sort(-1).values
    left = weights_HGX.scatter(2, ids[:, None].expand(-1, weights_HGX.shape[1], -1), 0.0)
    return ids.to(torch.int32), left


def _tiles(rows: DecodedRows, beside_HRx: Tensor, first: int, end: int) -> list[tuple[int, int]]:
    """First and end of the rows that are decoded at a time."""
    most = _TILE_BYTES if beside_HRx.device.type == "cpu" else _DEVICE_TILE_BYTES
    step = max(1, most // (4 * rows.head_dim * beside_HRx.shape[0]))
    return [(begin, min(begin + step, end)) for begin in range(first, end, step)]
