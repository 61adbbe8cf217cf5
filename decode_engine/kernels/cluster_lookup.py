"""Lookup of clusters: queries compared with mean keys, the softmax normaliser, and weights sorted into bins.

Two launches. The first is split over centroids: logits, each split's part of the normaliser, and everything that later
launches add to is reset. The second knows the normaliser, so it can average the attention weights of a group's heads,
S = mean over heads of exp(q.c) / sum_j N_j exp(q.c_j) (Squeezed Attention eq. 1, Multipole Attention section 3.2), and
counts keys per bin of log S. A token budget is then cut by a threshold without sorting.

Bins get finer towards the heaviest cluster a row can have: a bin is a step of the square root of the distance to it,
since flat heads have all their weights within one or two units of log2 and peaked ones within dozens.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, S splits, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_tables import BINS, ClusterTables, Scores, always_listed, table
from decode_engine.kernels.key_values import check_queries
from decode_engine.kernels.partials import LOG2E, chained, wait_for_launch
from decode_engine.kernels.sparse_attention import grow, load_group, store_partial

RANGE = 24.0
"""Distance from the heaviest possible cluster, in units of log2, from which on all weights share the lowest bin: what
is lighter by 2^-24 would not change a float32 sum. A budget that reaches down there is left unused."""


def score_clusters(q_RGD: Tensor, tables: ClusterTables, scale: float, rank: bool = True) -> Scores:
    """Logits of all clusters, and with `rank` their bins and the histogram that a selection is cut by.

    q_RGD: [B * H, G, d] contiguous, in the dtype of the means, as compared (moved where the clusters are windowed).
    Raises InvalidArgumentError for queries that do not fit.
    """
    rows, group, width = len(tables.contexts) * tables.heads, q_RGD.shape[1], tables.width
    splits = triton.cdiv(width, split_size(rows, width))
    spread = tables.contexts[0].variances_HCD is not None
    scores = Scores.allocate(rows, group, width, splits, spread, q_RGD.device)
    look_up(q_RGD, tables, scale, scores, None)
    if rank:
        bin_weights(scores)
    return scores


def look_up(
    q_RGD: Tensor, tables: ClusterTables, scale: float, scores: Scores, sums_RSGD: Tensor | None
) -> None:
    """First launch, into `scores`; with sums [R, S, G, d] also attention to the clusters' means, a slot per split.

    Those sums and the normaliser's parts are the partial attention to all keys, each as the mean of its cluster.
    """
    rows, slots = scores.peaks_RSG.shape[:2]
    check_queries(q_RGD, rows, tables.head_dim, tables.dtype)
    piece = split_size(rows, tables.width)
    whole = tables.dtype == torch.float32
    lookup_kernel[(scores.splits, rows)](
        q_RGD,
        tables.addresses_BA,
        tables.shapes_BX,
        tables.ranges_BX,
        scores.logits_RGC,
        scores.spreads_RGC,
        scores.left_RC,
        scores.taken_RGC,
        scores.peaks_RSG,
        scores.totals_RSG,
        sums_RSGD,
        scores.histogram_RB,
        scores.counts_R,
        tables.width,
        slots,
        scale,
        HEADS=tables.heads,
        GROUP=q_RGD.shape[1],
        DIM=tables.head_dim,
        PIECE=piece,
        TILE=64,
        BINS=BINS,
        SPREAD=scores.spreads_RGC is not None,
        ATTEND=sums_RSGD is not None,
        STAGES=1 if piece <= 64 or whole else 3,
        PRECISION="ieee" if whole else "tf32",
        num_warps=4,
        **chained(q_RGD.device),
    )


def split_size(rows: int, width: int) -> int:
    """Centroids per program."""
    wanted = rows * width // 256
    return min(512, max(64, int(triton.next_power_of_2(max(1, wanted)))))


def bin_weights(scores: Scores) -> None:
    """Second launch: bins of the clusters' weights and keys per bin, into `scores`."""
    rows, group, width = scores.logits_RGC.shape
    block = 512
    bin_kernel[(triton.cdiv(width, block), rows)](
        scores.logits_RGC,
        scores.left_RC,
        scores.peaks_RSG,
        scores.totals_RSG,
        scores.bins_RC,
        scores.histogram_RB,
        width,
        scores.splits,
        scores.peaks_RSG.shape[1],
        GROUP=group,
        BLOCK=block,
        SPLITS=triton.next_power_of_2(scores.splits),
        BINS=BINS,
        RANGE=RANGE,
        num_warps=4,
        **chained(scores.left_RC.device),
    )


def score_clusters_reference(q_RGD: Tensor, tables: ClusterTables, scale: float, rank: bool = True) -> Scores:
    """The same, eagerly; the normaliser in one part."""
    rows, group = q_RGD.shape[:2]
    spread = tables.contexts[0].variances_HCD is not None
    scores = Scores.allocate(rows, group, tables.width, 1, spread, q_RGD.device)
    scores.logits_RGC.fill_(-torch.inf)
    scores.left_RC.zero_()
    scores.bins_RC.fill_(-1)
    for row in range(rows):
        context, head = tables.of_row(row)
        sizes = context.sizes_HC[head]
        queries = q_RGD[row].float() * scale
        logits = queries @ context.means_HCD[head].float().t()
        scores.logits_RGC[row, :, : len(sizes)] = logits.masked_fill(sizes == 0, -torch.inf)
        scores.left_RC[row, : len(sizes)] = sizes
        first, end = tables.ranges_BX[row // tables.heads].tolist()
        scores.counts_R[row] = first + max(0, context.assignment_HN.shape[1] - end)
        if context.variances_HCD is not None and scores.spreads_RGC is not None:
            variances = queries.square() @ context.variances_HCD[head].float().t()
            scores.spreads_RGC[row, :, : len(sizes)] = (1 + 0.5 * variances).log2()
    if scores.taken_RGC is not None:
        scores.taken_RGC.zero_()
    sized = scores.logits_RGC * LOG2E + scores.left_RC.log2()[:, None]
    peaks = sized.amax(-1)
    scores.peaks_RSG[:, 0] = peaks
    scores.totals_RSG[:, 0] = torch.exp2(sized - peaks[..., None]).sum(-1)
    if rank:
        _bin_weights_reference(scores)
    return scores


def _bin_weights_reference(scores: Scores) -> None:
    peaks = scores.peaks_RSG.amax(1)
    normaliser = peaks + (scores.totals_RSG * torch.exp2(scores.peaks_RSG - peaks[:, None])).sum(1).log2()
    weights = torch.exp2(scores.logits_RGC * LOG2E - normaliser[..., None]).mean(1)
    highest = torch.exp2(peaks - normaliser).mean(1).log2()
    distance = (highest[:, None] - weights.log2()).clamp(0.0, RANGE)
    bins = (BINS - 1 - (distance / RANGE).sqrt() * (BINS - 1)).to(torch.int64)
    present = scores.left_RC > 0
    scores.bins_RC.copy_(torch.where(present, bins, -1))
    counts = torch.where(present, scores.left_RC, 0)
    scores.histogram_RB.zero_().scatter_add_(1, bins, counts)


@triton.jit
def reset_row(
    histogram_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    row: tl.tensor,
    sequence: tl.tensor,
    BINS: tl.constexpr,
) -> None:
    """Empties what later launches add to."""
    bins = tl.arange(0, BINS)
    tl.store(histogram_ptr + row * BINS + bins, tl.zeros([BINS], tl.int32))
    tl.store(counts_ptr + row, always_listed(shapes_ptr, ranges_ptr, sequence))


@triton.jit
def spread_logits(
    q: tl.tensor, variances_ptrs: tl.tensor, exists: tl.tensor, scale: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """log2(1 + v / 2) with the variance v of the logits of every cluster's keys."""
    variances = tl.load(variances_ptrs, mask=exists[:, None], other=0.0)
    scaled = q.to(tl.float32) * scale
    squares = (scaled * scaled).to(variances.dtype)
    return tl.log2(1.0 + 0.5 * tl.dot(squares, tl.trans(variances), input_precision=PRECISION))


@triton.jit
def add_weights(peaks: tl.tensor, totals: tl.tensor, logits: tl.tensor) -> tl.tensor:
    """A running softmax without values."""
    higher = tl.maximum(peaks, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, totals * tl.exp2(peaks - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)


@triton.jit(do_not_specialize=["width", "slots"])
def lookup_kernel(
    q_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    spreads_ptr: tl.tensor,
    left_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    SPREAD: tl.constexpr,
    ATTEND: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (PIECE centroids, row)."""
    wait_for_launch(CHAINED)
    split = tl.program_id(0)
    row = tl.program_id(1)
    sequence = row // HEADS
    clusters = tl.load(shapes_ptr + sequence * 2)
    before = (row % HEADS).to(tl.int64) * clusters
    element: tl.constexpr = q_ptr.dtype.element_ty
    means_ptr = table(addresses_ptr, sequence, 0, element) + before * DIM
    values_ptr = table(addresses_ptr, sequence, 1, element) + before * DIM
    sizes_ptr = table(addresses_ptr, sequence, 2, tl.int32) + before
    if split == 0:
        reset_row(histogram_ptr, counts_ptr, shapes_ptr, ranges_ptr, row, sequence, BINS)
    dims = tl.arange(0, DIM)
    heads = tl.arange(0, 16)
    q = load_group(q_ptr, row, GROUP, DIM, 16)
    logits_row = (row.to(tl.int64) * GROUP + heads)[:, None] * width
    peaks = tl.full([16], float("-inf"), tl.float32)
    totals = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    for start in tl.range(split * PIECE, split * PIECE + PIECE, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        exists = at < clusters
        offsets = at[:, None] * DIM + dims[None, :]
        means = tl.load(means_ptr + offsets, mask=exists[:, None], other=0.0)
        sizes = tl.load(sizes_ptr + at, mask=exists, other=0)
        logits = tl.dot(q, tl.trans(means), input_precision=PRECISION) * scale
        logits = tl.where((sizes > 0)[None, :], logits, float("-inf"))
        into = logits_row + at[None, :]
        inside = (heads[:, None] < GROUP) & (at[None, :] < width)
        tl.store(logits_ptr + into, logits, mask=inside)
        tl.store(left_ptr + row.to(tl.int64) * width + at, sizes, mask=at < width)
        if SPREAD:
            variances_ptr = table(addresses_ptr, sequence, 6, element) + before * DIM
            spreads = spread_logits(q, variances_ptr + offsets, exists, scale, PRECISION)
            tl.store(spreads_ptr + into, spreads, mask=inside)
            tl.store(taken_ptr + into, tl.zeros([16, TILE], tl.float32), mask=inside)
        sized = logits * 1.4426950408889634 + tl.log2(tl.maximum(sizes, 1).to(tl.float32))[None, :]
        if ATTEND:
            values = tl.load(values_ptr + offsets, mask=exists[:, None], other=0.0)
            peaks, totals, sums = grow(peaks, totals, sums, sized, values, PRECISION)
        else:
            peaks, totals = add_weights(peaks, totals, sized)
    if ATTEND:
        store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, split, peaks, totals, sums, GROUP, DIM, 16)
    else:
        at_split = (row * slots + split) * GROUP + heads
        tl.store(peaks_ptr + at_split, peaks, mask=heads < GROUP)
        tl.store(totals_ptr + at_split, totals, mask=heads < GROUP)


@triton.jit(do_not_specialize=["width", "splits", "slots"])
def bin_kernel(
    logits_ptr: tl.tensor,
    left_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    slots: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BINS: tl.constexpr,
    RANGE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (BLOCK clusters, row)."""
    wait_for_launch(CHAINED)
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    every = tl.arange(0, SPLITS)
    weights = tl.zeros([BLOCK], tl.float32)
    highest = 0.0
    for head in tl.static_range(GROUP):
        part = (row * slots + every) * GROUP + head
        peaks = tl.load(peaks_ptr + part, mask=every < splits, other=float("-inf"))
        totals = tl.load(totals_ptr + part, mask=every < splits, other=0.0)
        peak = tl.max(peaks, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(totals * tl.exp2(peaks - base), 0)
        normaliser = base + tl.log2(tl.where(total > 0.0, total, 1.0))
        from_ptr = logits_ptr + (row.to(tl.int64) * GROUP + head) * width
        logits = tl.load(from_ptr + at, mask=inside, other=float("-inf"))
        weights += tl.exp2(logits * 1.4426950408889634 - normaliser)
        highest += tl.exp2(peak - normaliser)
    left = tl.load(left_ptr + row.to(tl.int64) * width + at, mask=inside, other=0)
    distance = tl.log2(highest) - tl.log2(weights)
    distance = tl.minimum(tl.maximum(distance, 0.0), RANGE)
    bins = (BINS - 1 - tl.sqrt(distance / RANGE) * (BINS - 1)).to(tl.int32)
    present = left > 0
    bins = tl.where(present, bins, -1)
    tl.store(bins_ptr + row.to(tl.int64) * width + at, bins.to(tl.int16), mask=inside)
    tl.atomic_add(histogram_ptr + row * BINS + bins, left, mask=present, sem="relaxed")
