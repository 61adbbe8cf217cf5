"""Selection of clusters up to a token budget, as lists of key ids.

The threshold is the lowest bin of the histogram from which on all clusters fit into the budget, so a budget is never
exceeded and the lists' capacity is known beforehand; by how little it is missed is a matter of the bins, and the counts
say it. Where the clusters of the highest bin alone exceed the budget none is selected.

Shape legend: B sequences, H KV heads, R = B * H rows, K listed keys, C clusters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_tables import BINS, ClusterTables, Scores, table
from decode_engine.kernels.partials import chained, wait_for_launch
from index_store.errors import InvalidArgumentError

_GONE = -(2**30)


def select_clusters(
    scores: Scores, tables: ClusterTables, budgets_R: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """Ids [R, capacity] int32 and counts [R] int32 of the keys that each row attends exactly.

    Keys outside the searched range come first, then the members of selected clusters inside it; entries of -1 count for
    nothing. budgets_R: [R] int32, keys of selected clusters at most. capacity: at least the budget and the keys outside
    the range together; what does not fit would be lost.

    Counts are those of `scores`, and all listed keys are taken out of `scores.left_RC`. Within a row the order of the
    clusters changes from run to run.
    """
    rows, width = scores.bins_RC.shape
    if budgets_R.dtype != torch.int32 or budgets_R.shape != (rows,):
        raise InvalidArgumentError(
            f"budgets are {budgets_R.dtype} of shape {tuple(budgets_R.shape)}, expected int32 of shape [{rows}]"
        )
    ids = torch.empty(rows, capacity, dtype=torch.int32, device=scores.bins_RC.device)
    piece = 64 if rows * width <= 2**17 else 512
    select_kernel[(triton.cdiv(width, piece) + 1, rows)](
        scores.bins_RC,
        scores.histogram_RB,
        scores.left_RC,
        tables.addresses_BA,
        tables.shapes_BX,
        tables.ranges_BX,
        budgets_R,
        ids,
        scores.counts_R,
        width,
        capacity,
        HEADS=tables.heads,
        PIECE=piece,
        TILE=64,
        MEMBERS=32,
        BINS=BINS,
        GONE=_GONE,
        num_warps=4,
        **chained(ids.device),
    )
    return ids, scores.counts_R


def select_clusters_reference(
    scores: Scores, tables: ClusterTables, budgets_R: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """The same, eagerly; clusters in ascending order."""
    rows = len(scores.bins_RC)
    ids = torch.full((rows, capacity), -1, dtype=torch.int32, device=scores.bins_RC.device)
    at_least_RB = scores.histogram_RB.flip(1).cumsum(1).flip(1)
    for row in range(rows):
        context, head = tables.of_row(row)
        first, end = tables.ranges_BX[row // tables.heads].tolist()
        fits = at_least_RB[row] <= budgets_R[row]
        threshold = int(fits.int().argmax()) if bool(fits.any()) else BINS
        chosen = (scores.bins_RC[row].int() >= threshold).nonzero()[:, 0].tolist()
        always = [*range(first), *range(end, context.assignment_HN.shape[1])]
        for cluster in context.assignment_HN[head, always].tolist():
            if cluster >= 0:
                scores.left_RC[row, cluster] -= 1
        scores.left_RC[row, chosen] += _GONE
        listed = list(always)
        for cluster in chosen:
            begin, stop = context.offsets_HC[head, cluster : cluster + 2].tolist()
            members = context.members_HN[head, begin:stop].tolist()
            listed += [key if first <= key < end else -1 for key in members]
        ids[row, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
        scores.counts_R[row] = len(listed)
    return ids, scores.counts_R


@triton.jit
def threshold_bin(
    histogram_ptr: tl.tensor, row: tl.tensor, budget: tl.tensor, BINS: tl.constexpr
) -> tl.tensor:
    """The lowest bin from which on at most `budget` keys are counted; BINS when there is none."""
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram_ptr + row * BINS + bins)
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    return tl.min(tl.where(at_least <= budget, bins, BINS), 0)


@triton.jit
def list_always(
    ids_ptr: tl.tensor,
    left_ptr: tl.tensor,
    assignment_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    keys: tl.tensor,
    capacity: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Lists the keys outside first..end-1 and takes them out of their clusters."""
    count = first + tl.maximum(keys - end, 0)
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        ids = tl.where(entry < first, entry, end + entry - first)
        inside = entry < count
        tl.store(ids_ptr + entry, ids, mask=inside & (entry < capacity))
        cluster = tl.load(assignment_ptr + ids, mask=inside, other=-1)
        tl.atomic_add(left_ptr + cluster, -1, mask=cluster >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["width", "capacity"])
def select_kernel(
    bins_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    left_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    width: tl.tensor,
    capacity: tl.tensor,
    HEADS: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    MEMBERS: tl.constexpr,
    BINS: tl.constexpr,
    GONE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (PIECE clusters, row), and one more per row, the first, for the keys outside the range."""
    wait_for_launch(CHAINED)
    piece = tl.program_id(0) - 1
    row = tl.program_id(1)
    sequence = row // HEADS
    head = (row % HEADS).to(tl.int64)
    clusters = tl.load(shapes_ptr + sequence * 2)
    keys = tl.load(shapes_ptr + sequence * 2 + 1)
    first_key = tl.load(ranges_ptr + sequence * 2)
    end_key = tl.load(ranges_ptr + sequence * 2 + 1)
    left_row = left_ptr + row.to(tl.int64) * width
    ids_row = ids_ptr + row.to(tl.int64) * capacity
    if piece < 0:
        assignment_ptr = table(addresses_ptr, sequence, 5, tl.int32) + head * keys
        list_always(ids_row, left_row, assignment_ptr, first_key, end_key, keys, capacity, TILE)
    else:
        threshold = threshold_bin(histogram_ptr, row, tl.load(budgets_ptr + row), BINS)
        offsets_ptr = table(addresses_ptr, sequence, 3, tl.int32) + head * (clusters + 1)
        members_ptr = table(addresses_ptr, sequence, 4, tl.int32) + head * keys
        for start in range(piece * PIECE, piece * PIECE + PIECE, TILE):
            at = start + tl.arange(0, TILE)
            bins = tl.load(bins_ptr + row.to(tl.int64) * width + at, mask=at < width, other=-1)
            chosen = bins.to(tl.int32) >= threshold
            begin = tl.load(offsets_ptr + at, mask=chosen, other=0)
            sizes = tl.load(offsets_ptr + at + 1, mask=chosen, other=0) - begin
            total = tl.sum(sizes, 0)
            if total > 0:
                place = tl.atomic_add(counts_ptr + row, total, sem="relaxed")
                place += tl.cumsum(sizes, 0) - sizes
                tl.atomic_add(left_row + at, GONE, mask=chosen, sem="relaxed")
                for begin_member in range(0, tl.max(sizes, 0), MEMBERS):
                    member = begin_member + tl.arange(0, MEMBERS)
                    inside = member[None, :] < sizes[:, None]
                    ids = tl.load(members_ptr + begin[:, None] + member[None, :], mask=inside, other=-1)
                    searched = (ids >= first_key) & (ids < end_key)
                    into = place[:, None] + member[None, :]
                    tl.store(ids_row + into, tl.where(searched, ids, -1), mask=inside & (into < capacity))
