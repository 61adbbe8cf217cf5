"""The kernels over coarse copies in plain torch: the same sample, the same cut, the same keys; codes are decoded.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import border, records
from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.coarse.sizes import CHUNKS, CUT_PLACES, RUN, CoarseSizes, CoarseWork
from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows


@dataclass(frozen=True, slots=True)
class CoarseSequence:
    """What a record says of a sequence's coarse copy; rows are those of a context, contiguous."""

    rows: ScalarRows
    first: int
    end: int
    keep: int

    def fields(self) -> dict[int, int]:
        """Of its record."""
        rows = self.rows
        codes, scales = (
            (rows.key_codes_HNC, rows.value_codes_HNC),
            (rows.key_scales_HBD, rows.key_offsets_HBD),
        )
        arrays = (*codes, *scales, rows.value_scales_HNV, rows.value_offsets_HNV)
        fields = (records.KEYS, records.FIRST, records.END, records.KEEP)
        counts = dict(zip(fields, (rows.count, self.first, self.end, self.keep), strict=True))
        return dict(zip(records.COARSE_COPY, (each.data_ptr() for each in arrays), strict=True)) | counts

    def logits(self, q_GD: Tensor, head: int) -> Tensor:
        """Estimated logits [G, N] of all keys in units of log2, float32."""
        keys_ND = self.rows.heads(slice(head, head + 1)).decode_keys(0, self.rows.count)[0]
        logits: Tensor = (q_GD.float() * (q_GD.shape[1] ** -0.5 * LOG2E)) @ keys_ND.t()
        return logits


def find_cuts_reference(
    q_BHGD: Tensor, sequences: Sequence[CoarseSequence | None], sizes: CoarseSizes, work: CoarseWork
) -> None:
    """What `find_cuts` leaves in `work`: normalisers and cuts; None for an idle sequence."""
    for row, sequence, h, q_GD in _searching(q_BHGD, sequences):
        sample_M = _sample(sequence, sizes).to(q_GD.device)
        logits_GM = sequence.logits(q_GD, h)[:, sample_M.clamp(max=sequence.rows.count - 1)]
        there_M = (sample_M >= sequence.first) & (sample_M < sequence.end)
        logits_GM.masked_fill_(~there_M, -torch.inf)
        searched = sequence.end - sequence.first
        normaliser_G = _normalisers(logits_GM, searched / int(there_M.sum()))
        weights_M = torch.exp2(logits_GM - normaliser_G[:, None]).sum(0)
        work.normalisers_RG[row] = normaliser_G
        bits_M = weights_M[there_M].view(torch.int32)
        if 0 < sequence.keep < searched:
            cut = border.sampled_cut_reference(bits_M, sequence.keep, searched, *CUT_PLACES)
            work.cuts_RX[row] = torch.tensor([int(number) for number in cut])
        else:
            work.cuts_RX[row] = border.NONE if sequence.keep < searched else border.EVERY


def weigh_keys_reference(
    q_BHGD: Tensor,
    sequences: Sequence[CoarseSequence | None],
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
) -> None:
    """What `weigh_keys` lists by the cuts in `work`."""
    lists.counts_RP.zero_()
    segments = lists.counts_RP.shape[1]
    for row, sequence, h, q_GD in _searching(q_BHGD, sequences):
        weights_N = torch.exp2(sequence.logits(q_GD, h) - work.normalisers_RG[row][:, None]).sum(0)
        drawn_N = border.draw_reference(torch.arange(len(weights_N), device=weights_N.device), h)
        kept_N = border.passes_reference(weights_N.view(torch.int32), drawn_N, work.cuts_RX[row].unbind())
        kept_N[: sequence.first] = False
        kept_N[sequence.end :] = False
        base = sequence.first // BLOCK
        share = -(-(-(-sequence.end // BLOCK) - base) // segments)
        ids = kept_N.nonzero()[:, 0]
        for segment in range(segments):
            own = ids[(ids // BLOCK - base) // share == segment]
            lists.ids_RPW[row, segment, : len(own)] = own.to(torch.int32)
            lists.counts_RP[row, segment] = len(own)


def attend_others_reference(
    q_BHGD: Tensor, sequences: Sequence[CoarseSequence | None], lists: KeyLists
) -> AttentionState:
    """Coarse attention [B * H, G, d] to all searched keys that are not listed, float32."""
    rows, group, head_dim = q_BHGD.flatten(0, 1).shape
    state = AttentionState.empty((rows, group), head_dim, q_BHGD.device)
    for row, sequence, h, q_GD in _searching(q_BHGD, sequences):
        left_N = torch.zeros(sequence.rows.count, dtype=torch.bool, device=q_GD.device)
        left_N[sequence.first : sequence.end] = True
        left_N[lists.of_row(row)] = False
        if left_N.any():
            logits = sequence.logits(q_GD, h)[:, left_N].double() / LOG2E
            values = sequence.rows.heads(slice(h, h + 1)).decode_values(0, len(left_N))[0, left_N]
            state.out[row] = (logits.softmax(-1) @ values.double()).float()
            state.lse[row] = logits.logsumexp(-1).float()
    return state


def _searching(
    q_BHGD: Tensor, sequences: Sequence[CoarseSequence | None]
) -> Iterator[tuple[int, CoarseSequence, int, Tensor]]:
    """Rows that search: their number, sequence, KV head and queries."""
    heads = q_BHGD.shape[1]
    for b, sequence in enumerate(sequences):
        if sequence is not None and sequence.end > sequence.first:
            yield from ((b * heads + h, sequence, h, q_BHGD[b, h]) for h in range(heads))


def _sample(sequence: CoarseSequence, sizes: CoarseSizes) -> Tensor:
    """[M]: keys of the sample; those outside of the searched range do not count."""
    base = sequence.first // RUN * RUN
    runs, taken = -(-(sequence.end - base) // RUN), sizes.shape.samplers * sizes.shape.runs
    chosen = border.sampled_run_reference(torch.arange(taken), taken, runs)
    return (base + chosen[:, None] * RUN + torch.arange(RUN)).flatten()


def _normalisers(logits_GM: Tensor, stands_for: float) -> Tensor:
    """log2 of every head's sum of weights over all searched keys, estimated: see `search.cut_kernel`."""
    logits_GCM = logits_GM.double().view(len(logits_GM), CHUNKS, -1)
    highest_G = logits_GCM.amax((1, 2))
    weights_GCM = torch.exp2(logits_GCM - highest_G[:, None, None])
    largest_GC = weights_GCM.amax(2)
    others_GC = (weights_GCM.sum(2) - largest_GC) * stands_for
    normaliser_G: Tensor = highest_G + (largest_GC + others_GC).sum(1).log2()
    return normaliser_G.float()
