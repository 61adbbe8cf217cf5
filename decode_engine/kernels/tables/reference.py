"""The query-table kernels' eager reference: same buffers, same sample, plain torch over a batch's sequences.

Shape legend: as in `tables.sizes` and `table_context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.dense_attention import attend_dense_reference
from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.tables.sizes import (
    BINS,
    MINI_KEYS,
    SAMPLE_KEYS,
    SAMPLE_RUN_KEYS,
    TableSizes,
    TableWork,
)
from decode_engine.kernels.tables.table_context import TableContext
from decode_engine.kernels.weight_bytes import rounded_reference
from index_store.errors import InvalidArgumentError

_BIN_STEPS, _BIN_FLOOR = 8.0, 29.0


@dataclass(frozen=True, slots=True)
class TableSequence:
    """Where one sequence stands.

    Keys [0, first) of the context, [end, N) of the context and tail tokens [0, tail_keys) are attended exactly; keys
    [first, end) are searched and about `keep` of them attended. tail_HT2D: [H, capacity, 2, d] in the context's dtype.
    Raises InvalidArgumentError where that cannot be.
    """

    context: TableContext
    tail_HT2D: Tensor
    first: int
    end: int
    tail_keys: int
    keep: int

    def __post_init__(self) -> None:
        heads, keys, _, head_dim = self.context.kv_HN2D.shape
        if not 0 <= self.first <= self.end <= keys:
            raise InvalidArgumentError(
                f"searched keys [{self.first}, {self.end}) of a context of {keys} keys; expected "
                "0 <= first <= end <= keys"
            )
        tail = self.tail_HT2D
        if not 0 <= self.tail_keys <= tail.shape[1] or self.keep < 0:
            raise InvalidArgumentError(
                f"{self.tail_keys} tail tokens of {tail.shape[1]} and {self.keep} keys to keep; expected "
                "counts from 0 that the tail's memory holds"
            )
        if tail.dtype != self.context.kv_HN2D.dtype or not tail.is_contiguous():
            raise InvalidArgumentError(f"the tail is {tail.dtype}, expected the context's dtype, contiguous")
        if (tail.shape[0], tail.shape[2], tail.shape[3]) != (heads, 2, head_dim):
            raise InvalidArgumentError(
                f"the tail is {tuple(tail.shape)}, expected [{heads}, any, 2, {head_dim}]"
            )

    def fields(self) -> dict[int, int]:
        """Of its record."""
        kv, tail = self.context.kv_HN2D, self.tail_HT2D
        return self.context.fields() | {
            records.KV: kv.data_ptr(),
            records.KV_HEAD: kv.stride(0) * kv.element_size(),
            records.TAIL: tail.data_ptr(),
            records.TAIL_HEAD: tail.stride(0) * tail.element_size(),
            records.KEYS: kv.shape[1],
            records.FIRST: self.first,
            records.END: self.end,
            records.TAIL_KEYS: self.tail_keys,
            records.KEEP: self.keep,
        }


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
            kept = kept_keys(*picked_sums(q_GD, sequence, sizes, work, b, h), sequence, sizes)
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
    sums_LN: Tensor, units_L: Tensor, reach_L: Tensor, sequence: TableSequence, sizes: TableSizes
) -> Tensor:
    """Which keys of the context are kept, [N] bool."""
    count = sums_LN.shape[1]
    keys = torch.arange(count, device=sums_LN.device)
    searched = (keys >= sequence.first) & (keys < sequence.end)
    if sequence.keep >= sequence.end - sequence.first:
        return searched
    if sizes.pooled:
        reach = reach_L[0].clamp(min=1.0)
        positions = (sums_LN[0].float() + reach) * (BINS / (2.0 * reach))
        limit = threshold(positions, searched & sampled_keys(keys, sizes), sequence)
        return (sums_LN[0] >= torch.ceil(limit * (2.0 * reach / BINS) - reach)) & searched
    logits_LN = (sums_LN.float() * (units_L * LOG2E)[:, None]).masked_fill(~searched, -torch.inf)
    weights_N = merged_weights(logits_LN, sizes)
    positions = (weights_N.clamp(min=1e-30).log2() + _BIN_FLOOR) * _BIN_STEPS
    limit = threshold(positions, searched & spread_sample(keys, sizes), sequence)
    return (weights_N >= math.exp2(limit / _BIN_STEPS - _BIN_FLOOR)) & searched


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
    """The keys that the threshold of the search per head is taken from: evenly spread runs of every tile."""
    tile_N, within_N, _ = tile_of(keys_N, sizes)
    run_N = (within_N * MINI_KEYS + keys_N % MINI_KEYS) // SAMPLE_RUN_KEYS
    apart = sizes.shape.tile_keys // MINI_KEYS
    return run_N % apart == tile_N % apart


def sampled_keys(keys_N: Tensor, sizes: TableSizes) -> Tensor:
    """The keys that the threshold of the pooled search is taken from, [N] bool: evenly spread runs."""
    runs = -(-len(keys_N) // SAMPLE_RUN_KEYS)
    sampled = sizes.shape.sample_programs * (SAMPLE_KEYS // SAMPLE_RUN_KEYS)
    if runs <= sampled:
        return torch.ones_like(keys_N, dtype=torch.bool)
    taken = torch.zeros(runs, dtype=torch.bool, device=keys_N.device)
    taken[torch.arange(sampled, device=keys_N.device) * runs // sampled] = True
    return taken[keys_N // SAMPLE_RUN_KEYS]


def threshold(positions_N: Tensor, sample_N: Tensor, sequence: TableSequence) -> float:
    """Where among the bins the sample's share of `keep` begins, by linear interpolation inside a bin; above bin 0."""
    bins = positions_N[sample_N].clamp(0, BINS - 1).to(torch.int64)
    counts = torch.bincount(bins, minlength=BINS)
    at_least = counts.flip(0).cumsum(0).flip(0)
    available = torch.tensor(float(sequence.end - sequence.first))
    wanted = float(torch.tensor(float(sequence.keep)) * int(counts.sum()) / available)
    if wanted <= 0:
        return 2.0 * BINS
    border = int((at_least >= wanted).sum()) - 1
    return max(1.0, border + (int(at_least[border]) - wanted) / max(1, int(counts[border])))


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
