"""The product-code search in plain torch: the same tables, the same sample, the same keys.

Shape legend: as in `codes.search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.border import (
    cut_reference,
    moved_reference,
    passes_reference,
    stretch_of_reference,
)
from decode_engine.kernels.codes.search import BLOCK, RUN, WORD_HEADS, CodeSizes, make_tables_reference
from decode_engine.kernels.weight_bytes import rounded_half_reference


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
    q_BHGD: Tensor, sequences: Sequence[CodeSequence | None], sizes: CodeSizes, lists: KeyLists
) -> None:
    """What `search_codes` lists, in ascending order; None for an idle sequence."""
    lists.counts_RP.zero_()
    for b, sequence in enumerate(sequences):
        for h in range(sizes.kv_heads):
            if sequence is not None and sequence.end > sequence.first:
                ids = kept_keys(q_BHGD[b, h], sequence, h, sizes).nonzero()[:, 0]
                row = b * sizes.kv_heads + h
                lists.ids_RPW[row, 0, : len(ids)] = ids.to(torch.int32)
                lists.counts_RP[row, 0] = len(ids)


def kept_keys(q_GD: Tensor, sequence: CodeSequence, h: int, sizes: CodeSizes) -> Tensor:
    """Which keys a row keeps, [N] bool."""
    logits_GN = estimated_logits(q_GD, sequence, h, sizes)
    keys = torch.arange(logits_GN.shape[1], device=q_GD.device)
    searched = (keys >= sequence.first) & (keys < sequence.end)
    sample_SK = _sample(sequence, sizes).to(q_GD.device)
    sampled_GSK = logits_GN[:, sample_SK.clamp(max=len(keys) - 1)]
    there_SK = (sample_SK >= sequence.first) & (sample_SK < sequence.end)
    sampled_GSK.masked_fill_(~there_SK, -torch.inf)
    normaliser_G = _normalisers(sampled_GSK, int(there_SK.sum()), sequence)
    half = sizes.shape.sample_keys // 2
    weights_SK = _rounded_weights(sampled_GSK, normaliser_G)[:, :half][there_SK[:, :half]]
    weights_N = torch.exp2(logits_GN - normaliser_G[:, None]).sum(0)
    cut = cut_reference(weights_SK, sequence.keep, sequence.end - sequence.first)
    return passes_reference(weights_N, h, cut) & searched


def estimated_logits(q_GD: Tensor, sequence: CodeSequence, h: int, sizes: CodeSizes) -> Tensor:
    """In log2, from the rounded tables and up to a number for each head: [G, N] float32."""
    words, units_G = make_tables_reference(q_GD, sequence.codebooks_HMWE[h], sizes)
    entries = (
        sequence.codes_HNM[h].long() + torch.arange(sizes.subspaces, device=q_GD.device) * sizes.codewords
    )
    rows = []
    for g in range(sizes.group):
        levels = (words[g // WORD_HEADS] >> (8 * (g % WORD_HEADS))) & 255
        rows.append(levels[entries].sum(1).float() * units_G[g])
    return torch.stack(rows)


def _sample(sequence: CodeSequence, sizes: CodeSizes) -> Tensor:
    """[S, K]: keys that each sampling program looks at; those from `end` on do not exist."""
    shape = sizes.shape
    base = sequence.first // BLOCK * BLOCK
    half = shape.sample_keys // RUN // 2
    runs, taken = -(-(sequence.end - base) // RUN), 2 * shape.samplers * half
    own = torch.arange(2 * half)
    slots = torch.arange(shape.samplers)[:, None] * half + own % half
    spread = runs > taken // 2
    stretches = stretch_of_reference(slots, taken // 2)
    other = (own // half + stretches) % 2
    turns = 2 * slots + other if spread else slots + own // half * (taken // 2)
    chosen = moved_reference(turns, taken, runs, stretches) if runs > taken else turns
    return (base + chosen[..., None] * RUN + torch.arange(RUN)).flatten(1)


def _normalisers(logits_GSK: Tensor, sampled: int, sequence: CodeSequence) -> Tensor:
    """log2 of every head's sum of weights over all searched keys, estimated: see `search.find_cut`."""
    highest_G = logits_GSK.amax((1, 2))
    weights = torch.exp2(logits_GSK.double() - highest_G[:, None, None])
    others = (weights.sum(2) - weights.amax(2)) * ((sequence.end - sequence.first) / sampled)
    return (highest_G + (weights.amax(2) + others).sum(1).log2()).float()


def _rounded_weights(logits_GSK: Tensor, normaliser_G: Tensor) -> Tensor:
    """Sum over heads of the weights, rounded to 16 bits relative to the largest of each program: [S, K]."""
    peaks_GS = logits_GSK.amax(2)
    base_GS = torch.where(torch.isneginf(peaks_GS), 0.0, peaks_GS)
    rounded = rounded_half_reference(torch.exp2(logits_GSK - base_GS[..., None]))
    weights: Tensor = (rounded * torch.exp2(peaks_GS - normaliser_G[:, None])[..., None]).sum(0)
    return weights
