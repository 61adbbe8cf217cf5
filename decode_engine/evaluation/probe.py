"""Looks into searching layers while they decode: which keys they chose, how far their output is from exact attention.

Exact attention is computed in float32 for a few query positions, whose queries are those that the method's own decoding
arrived at; so errors here are those of one layer by itself, not what earlier layers added.

Shape legend: H KV heads, T observed query positions, G group heads, K kept keys, R searched keys, X all keys visible to
the last observed position, N context tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from index_store.indexes.coarse_rows.two_planes import TwoPlanes

_BLOCK_BYTES = 4 * 2**20  # keys and values in float32 at a time


@dataclass(frozen=True, slots=True)
class LayerSample:
    """What was seen of one layer at T positions.

    recall_HT: of the searched keys with the largest softmax over the searched range, summed over the group, as many as
        were selected: the share that was selected; nan where nothing was. mass_HTG: attention weight of all keys
        attended exactly: selection, sinks, recent window, tail. error_T: |o - o_full| / |o_full| over all heads, with
        the remainder in o. vectors_T: vectors of the index compared, per KV head. search_bytes_T, exact_bytes_T,
        remainder_bytes_T: of index, keys and values that were read for all KV heads. full_bytes_T: of all keys and
        values. tokens_T: of context and tail.
    """

    layer: int
    recall_HT: Tensor
    mass_HTG: Tensor
    error_T: Tensor
    vectors_T: Tensor
    search_bytes_T: Tensor
    exact_bytes_T: Tensor
    remainder_bytes_T: Tensor
    full_bytes_T: Tensor
    tokens_T: Tensor

    @property
    def bytes_T(self) -> Tensor:
        return self.search_bytes_T + self.exact_bytes_T + self.remainder_bytes_T

    def on_host(self) -> LayerSample:
        """The same in host memory, so that samples of a GPU do not wait there to be summarised."""
        measured = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "layer"}
        return LayerSample(self.layer, **{name: figure.cpu() for name, figure in measured.items()})


class Probe:
    """Collects samples of a session's searching layers at some positions.

    positions: absolute ones, the context's tokens included. Positions without a searched range leave no sample.
    """

    def __init__(self, positions: Collection[int]) -> None:
        self._positions = frozenset(positions)
        self.samples: list[LayerSample] = []

    def attach(self, session: Session) -> None:
        for number, layer in enumerate(session.layers):
            if isinstance(layer, SparseLayer):
                layer.observer = partial(self._observe, number)

    def _observe(self, layer: int, seen: Observation) -> None:
        count = seen.q_HTGD.shape[1]
        rows = [t for t in range(count) if seen.position + t in self._positions]
        if rows:
            self.samples.append(sample_layer(layer, seen, torch.tensor(rows)).on_host())


def sample_layer(layer: int, seen: Observation, rows_T: Tensor) -> LayerSample:
    """Compares an observation with exact attention at some of its rows, on the device of its queries."""
    device = seen.q_HTGD.device
    rows_T = rows_T.to(device)
    q_HTGD = seen.q_HTGD[:, rows_T].float()
    positions_T = seen.position + rows_T
    weights_HTGX, full_HTGD = _attend_all(seen, q_HTGD, positions_T)
    kept_HTR, counts_HT = _kept(seen, rows_T)
    searched_HTGR = weights_HTGX[..., seen.sinks : seen.search_end]
    outside_HTG = 1.0 - searched_HTGR.sum(-1)  # a learnt sink's weight is never missed
    mass_HTG = outside_HTG + (searched_HTGR * kept_HTR.unsqueeze(2)).sum(-1)
    difference_HTGD = seen.out_HTGD[:, rows_T].float() - full_HTGD
    heads, _, _, head_dim = q_HTGD.shape
    row_bytes = 2 * head_dim * seen.rows.context_HN2D.element_size()
    # An index that does not say how many bytes it read compares float32 vectors.
    index_bytes = seen.bytes_read or seen.vectors_read * head_dim * 4
    exact_T = heads * (seen.sinks + positions_T + 1 - seen.search_end)
    everywhere = torch.ones(len(rows_T), dtype=torch.float64, device=device)
    return LayerSample(
        layer,
        _recall((searched_HTGR / searched_HTGR.sum(-1, keepdim=True)).nansum(2), kept_HTR, counts_HT),
        mass_HTG.clamp_(max=1.0),
        _norms(difference_HTGD) / _norms(full_HTGD).clamp_(min=torch.finfo(torch.float32).tiny),
        everywhere * seen.vectors_read,
        everywhere * heads * index_bytes,
        (counts_HT.sum(0) + exact_T).double() * row_bytes,
        everywhere * heads * seen.remainder_bytes,
        (heads * (positions_T + 1) * row_bytes).double(),
        (positions_T + 1).double(),
    )


def _norms(out_HTGD: Tensor) -> Tensor:
    """[T], over heads and dimensions."""
    norms_T: Tensor = torch.linalg.vector_norm(out_HTGD, dim=(0, 2, 3))
    return norms_T


def _attend_all(seen: Observation, q_HTGD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights [H, T, G, X] and outputs [H, T, G, d] over every visible key."""
    context, tail = seen.rows.context_HN2D, seen.rows.tail_Ht2D
    count = context.shape[1]
    visible = int(positions_T.max()) + 1
    if isinstance(context, TwoPlanes):
        context = context.decode(0, min(visible, count))
    parts = [*_blocks(context[:, :visible]), *_blocks(tail[:, : max(visible - count, 0)])]
    device = q_HTGD.device  # keys and values of the context may be in host memory
    logits = torch.cat(
        [q_HTGD @ part[:, None, :, 0].to(device).float().transpose(-1, -2) for part in parts], dim=-1
    )
    hidden_TX = torch.arange(visible, device=logits.device) > positions_T[:, None]
    logits = seen.form.capped(logits).masked_fill_(hidden_TX[:, None], -torch.inf)
    lse_HTG = logits.logsumexp(-1)
    if seen.form.sink_HG is not None:
        lse_HTG = torch.logaddexp(lse_HTG, seen.form.sink_HG[:, None])
    weights = torch.exp(logits - lse_HTG[..., None])
    out, first = torch.zeros_like(q_HTGD), 0
    for part in parts:
        last = first + part.shape[1]
        out += weights[..., first:last] @ part[:, None, :, 1].to(device).float()
        first = last
    return weights, out


def _blocks(kv_HX2D: Tensor) -> tuple[Tensor, ...]:
    heads, count, _, head_dim = kv_HX2D.shape
    return torch.split(kv_HX2D, max(1, _BLOCK_BYTES // (heads * 2 * head_dim * 4)), dim=1) if count else ()


def _kept(seen: Observation, rows_T: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys of the searched range are selected, [H, T, R] bool, and how many."""
    ids, counts = seen.selection.ids_HTK, seen.selection.counts_HT
    if ids.shape[1] > 1:  # otherwise one selection for all positions
        ids, counts = ids[:, rows_T], counts[:, rows_T]
    valid = torch.arange(ids.shape[2], device=ids.device) < counts.unsqueeze(-1)
    places = torch.where(valid, ids.long() - seen.sinks, 0)
    searched = seen.search_end - seen.sinks
    kept = torch.zeros(*ids.shape[:2], searched, dtype=torch.uint8, device=ids.device)
    kept.scatter_reduce_(2, places, valid.to(torch.uint8), "amax")
    positions = len(rows_T)
    return kept.bool().expand(-1, positions, -1), counts.expand(-1, positions)


def _recall(weights_HTR: Tensor, kept_HTR: Tensor, counts_HT: Tensor) -> Tensor:
    most = int(counts_HT.max())
    if most == 0:
        return torch.full(counts_HT.shape, torch.nan, device=counts_HT.device)
    best = weights_HTR.topk(most, dim=-1).indices
    wanted = torch.arange(most, device=counts_HT.device) < counts_HT.unsqueeze(-1)
    hits = (kept_HTR.gather(2, best) & wanted).sum(-1)
    return hits / counts_HT.where(counts_HT > 0, torch.nan)
