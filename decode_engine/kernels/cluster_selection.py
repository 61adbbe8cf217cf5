"""Selection of clusters up to a token budget, as lists of key ids.

The threshold is the lowest bin of the histogram from which on all clusters fit into the budget, so a budget is never
exceeded and the lists' capacity is known beforehand; by how little it is missed is a matter of the bins, and the counts
say it. Where the clusters of the highest bin alone exceed the budget none is selected.

After a lookup that attended to all clusters as N keys at their mean, the same launch takes the share of what is now
attended exactly away again: N exp(q.c) with the mean value for a whole cluster, exp(q.c) with its own value for a
single key. That costs little accuracy: by Jensen's inequality the keys that replace a mean weigh at least as much.

Shape legend: B sequences, H KV heads, R = B * H rows, K listed keys, C clusters, P programs per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_parts import empty_state, list_members, take_shares
from decode_engine.kernels.cluster_tables import BINS, ClusterTables, Scores, table
from decode_engine.kernels.key_values import KeyValues
from decode_engine.kernels.partials import Partials, chained, wait_for_launch
from decode_engine.kernels.sparse_attention import head_rows, store_partial
from index_store.errors import InvalidArgumentError

_GONE = -(2**30)
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def select_clusters(
    scores: Scores,
    tables: ClusterTables,
    budgets_R: Tensor,
    capacity: int,
    away: tuple[KeyValues, Partials] | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids [R, capacity] int32 and counts [R] int32 of the keys that each row attends exactly.

    Keys outside the searched range come first, then the members of selected clusters inside it. budgets_R: [R] int32,
    keys of selected clusters at most. capacity: at least the budget and the keys outside the range together; what does
    not fit would be lost. away: partial attention that holds all clusters, to take the listed keys' share from; uses
    `selection_programs` slots after the lookup's.

    Counts are those of `scores`, and all listed keys are taken out of `scores.left_RC`. Within a row the order of the
    clusters changes from run to run.
    """
    rows, group, width = scores.logits_RGC.shape
    if budgets_R.dtype != torch.int32 or budgets_R.shape != (rows,):
        raise InvalidArgumentError(
            f"budgets are {budgets_R.dtype} of shape {tuple(budgets_R.shape)}, expected int32 of shape [{rows}]"
        )
    own = owned_clusters(rows, width)
    programs = triton.cdiv(width, own)
    ids = torch.empty(rows, capacity, dtype=torch.int32, device=budgets_R.device)
    chosen = torch.empty(rows, programs, own, dtype=torch.int32, device=budgets_R.device)
    kv, partials = (None, None) if away is None else away
    select_kernel[(programs + 1, rows)](
        scores.bins_RC,
        scores.histogram_RB,
        scores.left_RC,
        scores.logits_RGC,
        tables.addresses_BA,
        tables.shapes_BX,
        tables.ranges_BX,
        budgets_R,
        None if kv is None else kv.addresses_B,
        None if kv is None else kv.head_rows_B,
        chosen,
        ids,
        scores.counts_R,
        None if partials is None else partials.sums_RSGD,
        scores.peaks_RSG,
        scores.totals_RSG,
        width,
        capacity,
        scores.peaks_RSG.shape[1],
        scores.splits,
        HEADS=tables.heads,
        GROUP=group,
        DIM=tables.head_dim,
        OWN=own,
        AT_ONCE=16,
        MEMBERS=32,
        TILE=32,
        BINS=BINS,
        GONE=_GONE,
        AWAY=away is not None,
        VALUES=_TRITON_TYPES[tables.dtype],
        PRECISION="ieee" if tables.dtype == torch.float32 else "tf32",
        num_warps=4,
        maxnreg=96,  # The kernel waits more than it computes: more programs at a time are worth more than registers.
        **chained(ids.device),
    )
    return ids, scores.counts_R


def owned_clusters(rows: int, width: int) -> int:
    """Clusters per program."""
    return min(1024, max(16, int(triton.next_power_of_2(max(1, rows * width // 256)))))


def selection_programs(rows: int, width: int) -> int:
    """Programs per row, and slots that they fill."""
    return int(triton.cdiv(width, owned_clusters(rows, width))) + 1


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
            listed += [key for key in members if first <= key < end]
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
    assignment_ptr: tl.tensor,
    left_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    logits_ptrs: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    keys: tl.tensor,
    capacity: tl.tensor,
    threshold: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    AWAY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Lists the keys outside first..end-1; where their cluster is not selected they leave it one by one."""
    peaks, totals, sums = empty_state(DIM)
    count = first + tl.maximum(keys - end, 0)
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        ids = tl.where(entry < first, entry, end + entry - first)
        inside = entry < count
        tl.store(ids_ptr + entry, ids, mask=inside & (entry < capacity))
        cluster = tl.load(assignment_ptr + ids, mask=inside, other=-1)
        tl.atomic_add(left_ptr + cluster, -1, mask=cluster >= 0, sem="relaxed")
        if AWAY:
            bins = tl.load(bins_ptr + cluster, mask=cluster >= 0, other=32767).to(tl.int32)
            peaks, totals, sums = take_shares(
                cluster,
                bins < threshold,
                rows_ptr + ids * (2 * DIM) + DIM,
                tl.full([TILE], 1.0, tl.float32),
                logits_ptrs,
                peaks,
                totals,
                sums,
                GROUP,
                DIM,
                PRECISION,
            )
    return peaks, totals, sums


@triton.jit(do_not_specialize=["width", "capacity", "slots", "splits"])
def select_kernel(
    bins_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    left_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    row_addresses_ptr: tl.tensor,
    head_rows_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    capacity: tl.tensor,
    slots: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    OWN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    GONE: tl.constexpr,
    AWAY: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (OWN clusters, row), and one more per row, the first, for the keys outside the range.

    A program's clusters come in runs of 16 from all over the context, since selected ones come in neighbourhoods.
    """
    wait_for_launch(CHAINED)
    program = tl.program_id(0) - 1
    programs = tl.num_programs(0) - 1
    row = tl.program_id(1)
    sequence = row // HEADS
    head = (row % HEADS).to(tl.int64)
    keys = tl.load(shapes_ptr + sequence * 2 + 1)
    first = tl.load(ranges_ptr + sequence * 2)
    end = tl.load(ranges_ptr + sequence * 2 + 1)
    left_row = left_ptr + row.to(tl.int64) * width
    ids_row = ids_ptr + row.to(tl.int64) * capacity
    bins_row = bins_ptr + row.to(tl.int64) * width
    logits_ptrs = logits_ptr + (row.to(tl.int64) * GROUP + tl.arange(0, 16)) * width
    threshold = threshold_bin(histogram_ptr, row, tl.load(budgets_ptr + row), BINS)
    peaks, totals, sums = empty_state(DIM)
    if program < 0:
        rows_ptr = left_row
        if AWAY:
            rows_ptr = head_rows(row_addresses_ptr, head_rows_ptr, row, VALUES, HEADS, DIM)
        peaks, totals, sums = list_always(
            ids_row,
            table(addresses_ptr, sequence, 5, tl.int32) + head * keys,
            left_row,
            bins_row,
            rows_ptr,
            logits_ptrs,
            first,
            end,
            keys,
            capacity,
            threshold,
            GROUP,
            DIM,
            TILE,
            AWAY,
            PRECISION,
        )
    else:
        clusters = tl.load(shapes_ptr + sequence * 2)
        offsets_ptr = table(addresses_ptr, sequence, 3, tl.int32) + head * (clusters + 1)
        members_ptr = table(addresses_ptr, sequence, 4, tl.int32) + head * keys
        chosen_ptr += (row.to(tl.int64) * programs + program) * OWN
        lane = tl.arange(0, OWN)
        owned = ((lane // 16) * programs + program) * 16 + lane % 16
        bins = tl.load(bins_row + owned, mask=owned < width, other=-1).to(tl.int32)
        chosen = (bins >= threshold).to(tl.int32)
        tl.store(chosen_ptr + tl.cumsum(chosen, 0) - chosen, owned, mask=chosen > 0)
        number = tl.sum(chosen, 0)
        tl.debug_barrier()
        for some in range(0, number, AT_ONCE):
            place = some + tl.arange(0, AT_ONCE)
            valid = place < number
            cluster = tl.load(chosen_ptr + place, mask=valid, other=0)
            begin = tl.load(offsets_ptr + cluster, mask=valid, other=0)
            sizes = tl.load(offsets_ptr + cluster + 1, mask=valid, other=0) - begin
            tl.atomic_add(left_row + cluster, GONE, mask=valid, sem="relaxed")
            for skip in range(0, tl.max(sizes, 0), MEMBERS):
                list_members(
                    members_ptr,
                    ids_row,
                    counts_ptr + row,
                    begin,
                    sizes,
                    skip,
                    first,
                    end,
                    capacity,
                    AT_ONCE,
                    MEMBERS,
                )
            if AWAY:
                values_ptr = table(addresses_ptr, sequence, 1, VALUES) + head * clusters * DIM
                peaks, totals, sums = take_shares(
                    cluster,
                    valid,
                    values_ptr + cluster * DIM,
                    sizes.to(tl.float32),
                    logits_ptrs,
                    peaks,
                    totals,
                    sums,
                    GROUP,
                    DIM,
                    PRECISION,
                )
    if AWAY:
        slot = splits + program + 1
        store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, slot, peaks, totals, sums, GROUP, DIM, 16)
