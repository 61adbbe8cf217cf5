"""Eager references of the kernels over clusters, and the sequences that they work on.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, N keys, C clusters, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels.attention.sparse_attention import KeyLists, ListedSequence, stacked
from decode_engine.kernels.border import draw_reference, halve_reference, passes_reference
from decode_engine.kernels.clusters.lookup import DeviceClusters
from decode_engine.kernels.clusters.selection import DRAW_TURNS, RANGE, TURNS, UNUSED
from index_store.attention.attention_state import AttentionState


@dataclass(frozen=True, slots=True)
class ClusteredSequence(ListedSequence):
    """A sequence whose keys are in clusters, or in none."""

    clusters: DeviceClusters | None = None

    def fields(self) -> dict[int, int]:
        return {**ListedSequence.fields(self), **({} if self.clusters is None else self.clusters.fields())}


def cluster_logits(q_GD: Tensor, clusters: DeviceClusters, head: int, scale: float) -> tuple[Tensor, Tensor]:
    """Natural logits [G, C] of the means, -inf for clusters without keys, and log(1 + v / 2) [G, C], 0 without v."""
    queries = q_GD.float() * scale
    logits = queries @ clusters.means_HCD[head].float().t()
    logits = logits.masked_fill(clusters.sizes_HC[head] == 0, -torch.inf)
    variances = clusters.variances_HCD()
    if variances is None:
        return logits, torch.zeros_like(logits)
    return logits, (0.5 * (queries.square() @ variances[head].t())).log1p()


def select_clusters_reference(q_GD: Tensor, sequence: ClusteredSequence, head: int, scale: float) -> Tensor:
    """The selected clusters of a row, ascending, [count] int64: whole ones from the heaviest on up to the budget.

    Only keys of the searched range count. Where equal weights would leave much of the budget unused, clusters that draw
    the least are selected.
    """
    clusters = sequence.clusters
    if clusters is None:
        return torch.empty(0, dtype=torch.int64)
    logits, _ = cluster_logits(q_GD, clusters, head, scale)
    sizes = clusters.sizes_HC[head].long()
    weights = ((logits + sizes.log()).softmax(-1) / sizes.clamp(min=1)).sum(0).view(torch.int32)
    ids = torch.arange(clusters.assignment_HN.shape[1], device=sizes.device)
    outside = clusters.assignment_HN[head, (ids < sequence.first) | (ids >= sequence.end)].long()
    counted = sizes - outside[outside >= 0].bincount(minlength=len(sizes))
    chosen = _within_budget(weights, counted, sequence.keep, head)
    return (chosen & (sizes > 0)).nonzero()[:, 0]


def _within_budget(weights: Tensor, counted: Tensor, keep: int, head: int) -> Tensor:
    """Which clusters are selected, [C] bool, by the bits of their weights and the keys that count."""
    drawn = draw_reference(torch.arange(len(weights), device=weights.device), head)

    def keys(least: int, above: int, draws: int) -> int:
        return int(counted[passes_reference(weights, drawn, (least, above, draws))].sum())

    lightest = int(weights.max()) + 1 - (RANGE << 23)
    least = halve_reference(lambda place: keys(place, place, 0) > keep, lightest, RANGE << 23, TURNS)
    above = least + (RANGE << 23 - TURNS)
    if least == lightest:
        least, above = 0, above if int(counted.sum()) > keep else 0
    draws = -(1 << 23)
    if above and (keep - keys(above, above, 0)) * UNUSED > keep:
        draws = halve_reference(
            lambda place: keys(least, above, place << 8) <= keep, draws, 1 << 24, DRAW_TURNS
        )
    return passes_reference(weights, drawn, (least, above, draws << 8))


def remainder_reference(
    q_RGD: Tensor, sequences: Sequence[ClusteredSequence | None], lists: KeyLists, scale: float, kind: str
) -> AttentionState:
    """The remainder alone, [R, G, d] float32; kind: `monopole` or `centred`."""
    heads = len(q_RGD) // len(sequences)
    states = []
    for row, q_GD in enumerate(q_RGD):
        sequence = sequences[row // heads]
        state = AttentionState.empty(q_GD.shape[:1], q_GD.shape[1], q_GD.device)
        if sequence is not None and sequence.clusters is not None:
            ids = torch.cat([sequence.always(), lists.of_row(row).cpu()]).to(q_RGD.device)
            state = _remainder_of_row(q_GD, sequence, sequence.clusters, row % heads, ids, scale, kind)
        states.append(state)
    return stacked(states, q_RGD.device)


def _remainder_of_row(
    q_GD: Tensor,
    sequence: ClusteredSequence,
    clusters: DeviceClusters,
    head: int,
    ids: Tensor,
    scale: float,
    kind: str,
) -> AttentionState:
    means, spreads = cluster_logits(q_GD, clusters, head, scale)
    sizes = clusters.sizes_HC[head].float()
    own = clusters.assignment_HN[head, ids].long()
    rows = sequence.kv_HN2D[head][ids[own >= 0]].float()
    own = own[own >= 0]
    left = sizes - torch.zeros_like(sizes).index_add_(0, own, torch.ones(len(own), device=own.device))
    logits = means
    if kind == "centred":
        exact = q_GD.float() @ rows[:, 0].t() * scale
        sums = torch.zeros_like(means).index_add_(1, own, exact)
        logits = (means.clamp(min=-1e30) * sizes - sums) / left.clamp(min=1) + spreads
    logits = torch.where(left > 0, logits, -torch.inf)
    base = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(logits - base)
    total = (weights * left).sum(-1)
    values = weights * sizes @ clusters.value_means_HCD[head].float() - weights[:, own] @ rows[:, 1]
    out = values / torch.where(total > 0, total, 1.0)[:, None]
    return AttentionState(out.masked_fill((total <= 0)[:, None], 0.0), base[:, 0] + total.log())
