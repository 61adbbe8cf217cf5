"""What the loops over coded rows do, eagerly: on any device, and what they are compared with.

Shape legend: H KV heads, R rows of queries of a KV head, G group heads, X keys, S spans of keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.coded_passes_numba import SPAN
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.value_sums_numba import NEGLIGIBLE

_TILE_BYTES, _DEVICE_TILE_BYTES = 4 * 2**20, 128 * 2**20  # of one tile's rows in float32


def score_keys_reference(
    rows: ScalarRows, queries_HRD: Tensor, first: int, end: int, out_HRX: Tensor
) -> None:
    """Writes products of queries [H, R, d] with the keys of rows first..end-1, [H, R, end - first], all float32."""
    for begin, stop in _tiles(rows, queries_HRD, first, end):
        keys = rows.decode_keys(begin, stop)
        out_HRX[..., begin - first : stop - first] = torch.bmm(queries_HRD, keys.transpose(1, 2))


def attend_values_reference(
    rows: ScalarRows, logits_HRX: Tensor, first: int, elsewhere_HR: Tensor | None = None
) -> AttentionState:
    """Attention by logits [H, R, X] float32 to the values of rows first..first+X-1; -inf marks what does not count.

    elsewhere_HR: log-sum-exp of the logits of keys of these rows that count elsewhere. Runs of next to no weight are
    left out (`value_sums_numba`). Returns out [H, R, d] and lse [H, R], float32; 0 and -inf where nothing counts.
    """
    heads, queries, count = logits_HRX.shape
    if count == 0:
        return AttentionState.empty((heads, queries), rows.head_dim, logits_HRX.device)
    whole = logits_HRX.logsumexp(-1)
    if elsewhere_HR is not None:
        whole = torch.logaddexp(whole, elsewhere_HR)
    base = whole.masked_fill(torch.isneginf(whole), 0.0)[..., None]
    total = torch.zeros_like(base)
    out = logits_HRX.new_zeros(heads, queries, rows.head_dim)
    for begin, stop in _tiles(rows, logits_HRX, -((rows.lead + first) % BLOCK), count):
        inside = slice(max(begin, 0), stop)
        shares = (logits_HRX[..., inside] - base).exp_()
        padded = pad(shares, (inside.start - begin, -(stop - begin) % BLOCK))
        runs = padded.view(heads, queries, -1, BLOCK)
        columns = torch.arange(begin, begin + padded.shape[-1], device=shares.device).view(-1, BLOCK)
        sizes = ((columns >= 0) & (columns < count)).sum(-1)
        light = runs.sum(-1) < NEGLIGIBLE / count * sizes
        left_out = light.repeat_interleave(BLOCK, -1)[..., inside.start - begin :]
        shares.masked_fill_(left_out[..., : stop - inside.start], 0.0)
        total += shares.sum(-1, keepdim=True)
        out += torch.bmm(shares, rows.decode_values(first + inside.start, first + stop))
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


def _tiles(rows: ScalarRows, beside_HRx: Tensor, first: int, end: int) -> list[tuple[int, int]]:
    """First and end of the rows that are decoded at a time; whole blocks, but for the last of them."""
    most = _TILE_BYTES if beside_HRx.device.type == "cpu" else _DEVICE_TILE_BYTES
    step = max(1, most // (4 * rows.head_dim * beside_HRx.shape[0] * BLOCK)) * BLOCK
    return [(begin, min(begin + step, end)) for begin in range(first, end, step)]
