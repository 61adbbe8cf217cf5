"""The query-table kernels' eager reference: same buffers, same sample, plain torch over a batch's sequences.

Shape legend: as in `tables.sizes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.attention.shared_attention import attend_dense_reference
from decode_engine.kernels.attention.sparse_attention import ListedSequence
from decode_engine.kernels.border import (
    draw_reference,
    passes_reference,
    sampled_cut_reference,
    sampled_run_reference,
)
from decode_engine.kernels.tables.sizes import (
    BIN_SHIFT,
    BINS,
    LEAST_BIN,
    MINI_KEYS,
    SAMPLE_KEYS,
    SAMPLE_RUN_KEYS,
    TableContext,
    TableSizes,
    TableWork,
)
from decode_engine.kernels.weight_bytes import rounded_reference


@dataclass(frozen=True, slots=True)
class TableSequence:
    """Where one sequence stands.

    Keys [0, first) of the context, [end, N) of the context and tail tokens [0, tail_keys) are attended exactly; keys
    [first, end) are searched and about `keep` of them attended. tail_HT2D: [H, capacity, 2, d] in the context's dtype.
    """

    context: TableContext
    tail_HT2D: Tensor
    first: int
    end: int
    tail_keys: int
    keep: int

    def fields(self) -> dict[int, int]:
        """Of its record."""
        rows = (self.context.kv_HN2D, self.tail_HT2D, self.tail_keys, self.first, self.end, self.keep)
        return self.context.fields() | ListedSequence(*rows).fields()


def table_attention_reference(
    q_BHGD: Tensor,
    sequences: Sequence[TableSequence | None],
    sizes: TableSizes,
    work: TableWork,
    counts_BHP: Tensor,
) -> tuple[Tensor, Tensor]:
    """What `table_attention` computes; None is an idle row. Fills what was picked and kept, and nothing else."""
    out_BHGD = torch.zeros_like(q_BHGD)
    lse_BHG = torch.full(q_BHGD.shape[:3], -torch.inf, device=q_BHGD.device)
    counts_BHP.zero_()
    for b, sequence in enumerate(sequences):
        if sequence is None:
            continue
        for h in range(sizes.kv_heads):
            q_GD = q_BHGD[b, h].float()
            kept = kept_keys(*picked_sums(q_GD, sequence, sizes, work, b, h), sequence, sizes, h)
            write_ids(kept, sizes, work.ids[b, h], counts_BHP[b, h])
            out, lse = attend_exactly(q_GD, sequence, kept, sizes.scale, h)
            out_BHGD[b, h], lse_BHG[b, h] = out.to(q_BHGD.dtype), lse.float()
    return out_BHGD, lse_BHG


def picked_sums(
    q_GD: Tensor, sequence: TableSequence, sizes: TableSizes, work: TableWork, b: int, h: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the picked rows [L, N] int64, their units [L] and reaches [L]; writes rows, weights and units."""
    context = sequence.context
    centroids_MCW, scales_M = context.centroids_HMCW[h], context.scales_HM[h]
    queries_LD = (q_GD.mean(0, keepdim=True) if sizes.pooled else q_GD) * sizes.scale
    subspaces, width = sizes.subspaces, sizes.head_dim // sizes.subspaces
    if sizes.strided:
        slices_LMW = queries_LD.view(-1, width, subspaces).transpose(1, 2)
    else:
        slices_LMW = queries_LD.view(-1, subspaces, width)
    best = torch.einsum("lmw,mcw->lmc", slices_LMW, centroids_MCW).max(-1)
    weights_LM = best.values.clamp(min=0) * scales_M
    largest_L = weights_LM.amax(-1, keepdim=True)
    factors = torch.where(largest_L > 0, 255.0 / largest_L, 0.0)
    small_LM = (weights_LM * factors + 0.5).floor().to(torch.int64)
    subspace_M = torch.arange(subspaces, device=q_GD.device)
    rows_LM = (h * subspaces + subspace_M) * sizes.centroids + best.indices
    blocks_LM = rows_LM * (context.tables_HMCN.stride(2) // MINI_KEYS)
    work.rows[b, h] = blocks_LM.repeat(1, sizes.picks // subspaces).to(torch.int32)
    padded_LM = torch.nn.functional.pad(small_LM, (0, sizes.picks - subspaces))
    shifted = padded_LM.view(len(small_LM), -1, 4) << torch.arange(0, 32, 8, device=q_GD.device)
    work.weights[b, h] = shifted.sum(-1).to(torch.int32)
    reach_L = 127.0 * small_LM.sum(-1).float()
    work.units[b, h] = torch.stack([largest_L[:, 0] / 255.0, reach_L], -1)
    table_MCN = context.tables_HMCN[h]
    picked_LMN = table_MCN[subspace_M, best.indices]
    sums_LN = (picked_LMN.to(torch.int64) * small_LM[..., None]).sum(1)
    return sums_LN, largest_L[:, 0] / 255.0, reach_L


def kept_keys(
    sums_LN: Tensor, units_L: Tensor, reach_L: Tensor, sequence: TableSequence, sizes: TableSizes, h: int
) -> Tensor:
    """Which keys of the context a KV head keeps, [N] bool."""
    count = sums_LN.shape[1]
    keys = torch.arange(count, device=sums_LN.device)
    searched = (keys >= sequence.first) & (keys < sequence.end)
    if sequence.keep >= sequence.end - sequence.first:
        return searched
    if sizes.pooled:
        bins = (sums_LN[0] >> max(0, int(reach_L[0]).bit_length() - BINS.bit_length() + 2)) + BINS // 2
        sample = sampled_keys(keys, sizes)
    else:
        logits_LN = (sums_LN.float() * (units_L * LOG2E)[:, None]).masked_fill(~searched, -torch.inf)
        bins = (merged_weights(logits_LN, sizes).view(torch.int32) >> BIN_SHIFT) - LEAST_BIN
        sample = spread_sample(keys, sizes)
    bins = bins.clamp(0, BINS - 1)
    drawn = draw_reference(keys // 4, h)  # the keys of a word together
    return passes_reference(bins, drawn, threshold(bins[searched & sample], sequence)) & searched


def merged_weights(logits_LN: Tensor, sizes: TableSizes) -> Tensor:
    """Sum over heads of the softmaxes, [N], with weights rounded as the kernels round them."""
    keys = torch.arange(logits_LN.shape[1], device=logits_LN.device)
    tile_N = tile_of(keys, sizes)[0]
    tiles = int(tile_N.max()) + 1
    peaks_LP = torch.full((len(logits_LN), tiles), -torch.inf, device=keys.device)
    peaks_LP.scatter_reduce_(1, tile_N.expand_as(logits_LN), logits_LN, "amax")
    base_LN = torch.where(torch.isneginf(peaks_LP), 0.0, peaks_LP)[:, tile_N]
    kept_LN = rounded_reference((logits_LN - base_LN).exp2())
    normalisers_L = torch.logsumexp(logits_LN.double() / LOG2E, 1) * LOG2E
    weights_LN: Tensor = kept_LN * (base_LN - normalisers_L[:, None]).exp2()
    return weights_LN.sum(0).float()


def tile_of(keys_N: Tensor, sizes: TableSizes) -> tuple[Tensor, Tensor, int]:
    """Tile of every key, its block's number inside the tile, and how many tiles there are."""
    blocks = -(-len(keys_N) // MINI_KEYS)
    tiles = -(-blocks // (sizes.shape.tile_keys // MINI_KEYS))
    block_N = keys_N // MINI_KEYS
    return block_N % tiles, block_N // tiles, tiles


def spread_sample(keys_N: Tensor, sizes: TableSizes) -> Tensor:
    """The keys that the threshold of the search per head is taken from, [N] bool."""
    tile_N, within_N, tiles = tile_of(keys_N, sizes)
    tile = sizes.shape.tile_keys
    apart = -(-tiles * tile // (sizes.samplers * SAMPLE_KEYS))
    run_N = (tile_N * tile + within_N * MINI_KEYS + keys_N % MINI_KEYS) // SAMPLE_RUN_KEYS
    turn_N = run_N // apart
    return run_N % apart == (turn_N + turn_N // apart) % apart


def sampled_keys(keys_N: Tensor, sizes: TableSizes) -> Tensor:
    """The keys that the threshold of the pooled search is taken from, [N] bool: spread runs."""
    runs = -(-len(keys_N) // SAMPLE_RUN_KEYS)
    sampled = sizes.shape.sample_programs * (SAMPLE_KEYS // SAMPLE_RUN_KEYS)
    if runs <= sampled:
        return torch.ones_like(keys_N, dtype=torch.bool)
    turns = torch.arange(sampled, device=keys_N.device)
    taken = torch.zeros(runs, dtype=torch.bool, device=keys_N.device)
    taken[sampled_run_reference(turns, sampled, runs)] = True
    return taken[keys_N // SAMPLE_RUN_KEYS]


def threshold(bins_S: Tensor, sequence: TableSequence) -> tuple[int, int, Tensor]:
    """The cut by a sample's bins."""
    searched, halvings = sequence.end - sequence.first, BINS.bit_length() - 1
    return sampled_cut_reference(bins_S, sequence.keep, searched, 0, BINS, halvings)


def write_ids(kept_N: Tensor, sizes: TableSizes, ids_PT: Tensor, counts_P: Tensor) -> None:
    """Kept ids by tile, as the kernels leave them."""
    tile_N, _, tiles = tile_of(torch.arange(len(kept_N), device=kept_N.device), sizes)
    for tile in range(tiles):
        ids = (kept_N & (tile_N == tile)).nonzero()[:, 0].to(torch.int32)
        ids_PT[tile, : len(ids)] = ids
        counts_P[tile] = len(ids)


def kept_mask(ids_PT: Tensor, counts_P: Tensor, keys: int) -> Tensor:
    """Which keys of the context the tiles' lists name, [keys] bool."""
    listed = torch.arange(ids_PT.shape[1], device=ids_PT.device) < counts_P[:, None]
    kept = torch.zeros(keys, dtype=torch.bool, device=ids_PT.device)
    kept[ids_PT[listed].long()] = True
    return kept


def attend_exactly(
    q_GD: Tensor, sequence: TableSequence, kept_N: Tensor, scale: float, h: int
) -> tuple[Tensor, Tensor]:
    """Attention to the kept keys, the sinks, the recent window and the tail: out [G, d], lse [G]."""
    always = torch.ones_like(kept_N)
    always[sequence.first : sequence.end] = False
    context_N2D = sequence.context.kv_HN2D[h][kept_N | always]
    kv_X2D = torch.cat([context_N2D, sequence.tail_HT2D[h, : sequence.tail_keys]])
    state = attend_dense_reference(q_GD[None], kv_X2D[None], scale)
    return state.out[0], state.lse[0]
