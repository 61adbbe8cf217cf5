"""The product-code search in plain torch: the same tables, the same sample, the same lists.

Shape legend: as in `code_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.code_batch import BLOCK, RUN, WORD_HEADS, CodePlan
from decode_engine.kernels.code_tables import make_tables_reference
from decode_engine.kernels.key_lists import KeyLists

_BINS, _BIN_BASE = 256, (127 - 29) * 8
_BYTE_SHIFT, _BYTE_BASE = 20, 768


@dataclass(frozen=True, slots=True)
class CodeSequence:
    """What a record says of a sequence's search. codes_HNM: uint8; codebooks_HMWE: float32; contiguous."""

    codes_HNM: Tensor
    codebooks_HMWE: Tensor
    first: int
    end: int
    keep: int

    def fields(self) -> dict[int, int]:
        """Of its record."""
        return {
            records.CODES: self.codes_HNM.data_ptr(),
            records.CODEBOOKS: self.codebooks_HMWE.data_ptr(),
            records.KEYS: self.codes_HNM.shape[1],
            records.FIRST: self.first,
            records.END: self.end,
            records.KEEP: self.keep,
        }


def search_codes_reference(
    q_BHGD: Tensor, sequences: Sequence[CodeSequence | None], plan: CodePlan, lists: KeyLists
) -> None:
    """What `search_codes` lists; None for an idle sequence."""
    lists.counts_RP.zero_()
    for b, sequence in enumerate(sequences):
        for h in range(plan.kv_heads):
            if sequence is not None and sequence.end > sequence.first:
                kept_N = kept_keys(q_BHGD[b, h], sequence, h, plan)
                _write(kept_N, sequence, plan, lists, b * plan.kv_heads + h)


def kept_keys(q_GD: Tensor, sequence: CodeSequence, h: int, plan: CodePlan) -> Tensor:
    """Which keys a row keeps, [N] bool."""
    logits_GN = estimated_logits(q_GD, sequence, h, plan)
    keys = torch.arange(logits_GN.shape[1], device=q_GD.device)
    searched = (keys >= sequence.first) & (keys < sequence.end)
    sample = _sample(sequence, plan).to(q_GD.device)
    inside = searched[sample]
    sampled_GS = logits_GN[:, sample].masked_fill(~inside, -torch.inf)
    normaliser_G = _normalisers(sampled_GS, int(inside.sum()), sequence, plan)
    weights_S = _rounded_weights(sampled_GS, normaliser_G, plan)
    bins = ((weights_S.view(torch.int32) >> _BYTE_SHIFT) - _BIN_BASE).clamp(0, _BINS - 1)
    counts = torch.bincount(bins[inside], minlength=_BINS)
    cut = _cut(counts, sequence)
    return (torch.exp2(logits_GN - normaliser_G[:, None]).sum(0) >= cut) & searched


def estimated_logits(q_GD: Tensor, sequence: CodeSequence, h: int, plan: CodePlan) -> Tensor:
    """In log2, from the rounded tables and up to a number for each head: [G, N] float32."""
    words, units_G = make_tables_reference(q_GD, sequence.codebooks_HMWE[h], plan)
    entries = sequence.codes_HNM[h].long() + torch.arange(plan.subspaces, device=q_GD.device) * plan.codewords
    rows = []
    for g in range(plan.group):
        levels = (words[g // WORD_HEADS] >> (8 * (g % WORD_HEADS))) & 255
        rows.append(levels[entries].sum(1).float() * units_G[g])
    return torch.stack(rows)


def _sample(sequence: CodeSequence, plan: CodePlan) -> Tensor:
    """Keys of the sample, padded runs included, [programs * keys] as the programs see them, those that exist only."""
    base = sequence.first // BLOCK * BLOCK
    runs, taken = -(-(sequence.end - base) // RUN), plan.shape.samplers * (plan.shape.sample_keys // RUN)
    turns = torch.arange(min(runs, taken))
    chosen = turns * runs // taken if runs > taken else turns
    keys = (base + chosen[:, None] * RUN + torch.arange(RUN)).flatten()
    return keys.clamp(max=sequence.codes_HNM.shape[1] - 1) if runs > taken else keys[keys < sequence.end]


def _rounded_weights(logits_GS: Tensor, normaliser_G: Tensor, plan: CodePlan) -> Tensor:
    """Sum over heads of the weights, rounded to bytes relative to the largest of each program's share: [S]."""
    weights = torch.zeros(logits_GS.shape[1], device=logits_GS.device)
    for start in range(0, logits_GS.shape[1], plan.shape.sample_keys):
        own = logits_GS[:, start : start + plan.shape.sample_keys]
        peaks = own.amax(1)
        base = torch.where(torch.isneginf(peaks), 0.0, peaks)
        bits = torch.exp2(own - base[:, None]).view(torch.int32) + (1 << (_BYTE_SHIFT - 1))
        byte = ((bits >> _BYTE_SHIFT) - _BYTE_BASE).clamp(min=0)
        rounded = ((byte + _BYTE_BASE) << _BYTE_SHIFT).view(torch.float32)
        weights[start : start + plan.shape.sample_keys] = (
            rounded * torch.exp2(peaks - normaliser_G)[:, None]
        ).sum(0)
    return weights


def _normalisers(logits_GS: Tensor, sampled: int, sequence: CodeSequence, plan: CodePlan) -> Tensor:
    """log2 of every head's sum of weights over all searched keys, estimated: see `code_search.find_cut`."""
    stands_for = (sequence.end - sequence.first) / sampled
    total = torch.zeros(len(logits_GS), dtype=torch.float64, device=logits_GS.device)
    highest = logits_GS.amax(1)
    for own in torch.split(logits_GS.double(), plan.shape.sample_keys, dim=1):
        weights = torch.exp2(own - highest[:, None])
        total += weights.amax(1) + (weights.sum(1) - weights.amax(1)) * stands_for
    return (highest + total.log2()).float()


def _cut(counts: Tensor, sequence: CodeSequence) -> float:
    """The least weight that is kept."""
    available = sequence.end - sequence.first
    if sequence.keep >= available:
        return -1.0
    if sequence.keep <= 0:
        return math.inf
    at_least = counts.flip(0).cumsum(0).flip(0)
    wanted = sequence.keep * int(counts.sum()) / available
    border = int((at_least >= wanted).sum()) - 1
    place = max(1.0, border + (int(at_least[border]) - wanted) / max(1, int(counts[border]))) + _BIN_BASE
    bits = torch.tensor(int(place * 2**_BYTE_SHIFT), dtype=torch.int32)
    return float(bits.view(torch.float32))


def _write(kept_N: Tensor, sequence: CodeSequence, plan: CodePlan, lists: KeyLists, row: int) -> None:
    """Lists kept keys by tile, as the kernels do."""
    base = sequence.first // BLOCK * BLOCK
    tiles = -(-(sequence.end - base) // plan.shape.tile_keys)
    keys = torch.arange(len(kept_N), device=kept_N.device)
    for tile in range(tiles):
        ids = keys[kept_N & ((keys - base) // BLOCK % tiles == tile)]
        lists.ids_RPW[row, tile, : len(ids)] = ids.to(torch.int32)
        lists.counts_RP[row, tile] = len(ids)
