"""Which layers have attention so flat that a few per cent of the keys cannot stand for all of them.

A method that drops what it did not select has to attend to everything there. The decision uses the context's
own late queries (and calibration queries) and the exact best selection, so it judges the layer and not an index.
Evidence for the rule: docs/prefill.md.

Shape legend: G query heads of one KV head, R sampled queries, N keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.attention.attention_state import PLAIN, LogitForm
from index_store.jobs.job_record import DENSE_ERROR, DENSE_KEEP
from index_store.store.stored_context import QuerySample
from prefill_worker.reading.query_sample import judged_rows

SINKS, RECENT = 8, 64
"""First and last keys that belong to every selection besides."""

_ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Selectivity:
    """How well the exact best few keys stand for a layer's whole attention, averaged over heads and queries.

    captured: share of the attention weight on the selected keys, sinks and recent window, 0 to 1.
    output_error: |o_selected - o_full| / |o_full|.
    """

    captured: float
    output_error: float


EXACT = Selectivity(captured=1.0, output_error=0.0)
"""Of a layer that is never cut: its queries see a sliding window."""


def measure_selectivity(
    kv_HN2D: Tensor,
    queries: QuerySample,
    form: LogitForm = PLAIN,
    keep: float = DENSE_KEEP,
    sinks: int = SINKS,
    recent: int = RECENT,
) -> Selectivity:
    """Compares attention to the best `keep` of the keys, sinks and recent window with full attention.

    The best keys of a KV head are those with the largest softmaxed scores summed over the group, among the keys
    between sinks and recent window. kv_HN2D: [H, N, 2, d] in any float dtype and on any device. Work and memory are
    linear in N: 48 queries, one KV head and 8 queries at a time.
    """
    rows = judged_rows(queries.positions_P)
    positions_R = queries.positions_P[rows].to(kv_HN2D.device)
    captured, errors = [], []
    for head, head_kv_N2D in enumerate(kv_HN2D):
        keys_ND, values_ND = head_kv_N2D.float().unbind(1)
        queries_RGD = queries.queries_HPGD[head, rows].to(keys_ND)
        for part in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(part, part + _ROWS_AT_ONCE)
            own = LogitForm(form.cap, None if form.sink_HG is None else form.sink_HG[head : head + 1])
            share, error = _compare(
                queries_RGD[some], keys_ND, values_ND, positions_R[some], own, keep, sinks, recent
            )
            captured.append(share)
            errors.append(error)
    return Selectivity(float(torch.cat(captured).mean()), float(torch.cat(errors).mean()))


def _compare(
    queries_RGD: Tensor,
    keys_ND: Tensor,
    values_ND: Tensor,
    positions_R: Tensor,
    form: LogitForm,
    keep: float,
    sinks: int,
    recent: int,
) -> tuple[Tensor, Tensor]:
    """(captured share, relative output error), each [R, G]; a sink's weight is always captured."""
    ids_N = torch.arange(len(keys_ND), device=keys_ND.device)
    logits_RGN = form.capped(queries_RGD @ keys_ND.T * keys_ND.shape[1] ** -0.5)
    logits_RGN.masked_fill_((ids_N > positions_R[:, None])[:, None], -torch.inf)
    lse_RG = logits_RGN.logsumexp(-1)
    if form.sink_HG is not None:
        lse_RG = torch.logaddexp(lse_RG, form.sink_HG[0])
    weights_RGN = torch.exp(logits_RGN - lse_RG[..., None])
    always_RN = (ids_N < sinks) | (ids_N > positions_R[:, None] - recent)
    scores_RN = weights_RGN.sum(1).masked_fill(always_RN, -1.0)
    best_RK = scores_RN.topk(max(1, round(keep * len(ids_N))), dim=-1).indices
    kept_RN = always_RN.scatter(1, best_RK, True)
    kept_weights_RGN = weights_RGN * kept_RN[:, None]
    share_RG = 1.0 - (weights_RGN.sum(-1) - kept_weights_RGN.sum(-1))
    full_RGD = weights_RGN @ values_ND
    kept_RGD = (kept_weights_RGN @ values_ND) / share_RG[..., None]
    return share_RG, (kept_RGD - full_RGD).norm(dim=-1) / full_RGD.norm(dim=-1).clamp_min(1e-12)


def choose_dense_layers(
    selectivities: Sequence[Selectivity], threshold: float = DENSE_ERROR
) -> tuple[int, ...]:
    """Layers whose output even the exact best keys reproduce with a relative error above the threshold."""
    return tuple(layer for layer, measured in enumerate(selectivities) if measured.output_error > threshold)
