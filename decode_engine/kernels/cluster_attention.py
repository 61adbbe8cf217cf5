"""Multipole Attention over key clusters in four launches: attend to all means, bin, exchange means for keys, merge.

The lookup reads mean keys and mean values together and attends to every cluster as N keys at its mean; that alone is an
attention to the whole context. What a budget selects is then exchanged: programs that each own some clusters take away
the share of those selected, N exp(q.c) with its mean value, and attend to their keys instead. So the clusters are read
in one stream, and the third launch touches selected keys only. Taking away costs no accuracy worth mentioning: by
Jensen's inequality the keys that replace a mean weigh at least as much as it did.

Keys outside the searched range are attended exactly; where their cluster was not selected each takes its share away.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, S slots, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_lookup import bin_weights, look_up, split_size
from decode_engine.kernels.cluster_selection import threshold_bin
from decode_engine.kernels.cluster_tables import BINS, ClusterTables, Scores, always_listed, table
from decode_engine.kernels.key_values import KeyValues, check_queries
from decode_engine.kernels.partials import LOG2E, Partials, chained, merge_partials, wait_for_launch
from decode_engine.kernels.sparse_attention import attend_piece, head_rows, load_group, store_partial
from index_store.errors import InvalidArgumentError

_AT_ONCE = 16
_MEMBERS = 64


def attend_clusters(
    q_RGD: Tensor,
    looked_up_RGD: Tensor,
    kv: KeyValues,
    tables: ClusterTables,
    budgets_R: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Scores]:
    """Attention to all keys: those of clusters up to a token budget exactly, the others as means of their clusters.

    q_RGD, looked_up_RGD: [B * H, G, d], queries as attended and as compared with the clusters, in the dtype of keys and
    clusters. budgets_R: [R] int32, keys of selected clusters at most; see `cluster_selection` for how they are cut.

    Returns out [R, G, d] float32, lse [R, G], and the scores, whose counts_R are the keys attended exactly.
    """
    rows, group, width = len(q_RGD), q_RGD.shape[1], tables.width
    check_queries(q_RGD, rows, kv.head_dim, tables.dtype)
    if budgets_R.dtype != torch.int32 or budgets_R.shape != (rows,) or rows != len(kv.tensors) * kv.heads:
        raise InvalidArgumentError(
            f"{rows} rows of queries and budgets {budgets_R.dtype} {tuple(budgets_R.shape)} for "
            f"{len(kv.tensors)} sequences of {kv.heads} KV heads"
        )
    splits = triton.cdiv(width, split_size(rows, width))
    own = owned_clusters(rows, width)
    programs = triton.cdiv(width, own)
    slots = splits + programs + 1
    scores = Scores.allocate(rows, group, width, splits, False, q_RGD.device, slots)
    sums = torch.empty(rows, slots, group, kv.head_dim, device=q_RGD.device)
    partials = Partials(sums, scores.peaks_RSG, scores.totals_RSG)
    look_up(looked_up_RGD, tables, scale, scores, sums)
    bin_weights(scores)
    chosen = torch.empty(rows, programs, own, dtype=torch.int32, device=q_RGD.device)
    ids = torch.empty(rows, programs, _AT_ONCE * _MEMBERS, dtype=torch.int32, device=q_RGD.device)
    whole = tables.dtype == torch.float32
    exchange_kernel[(programs + 1, rows)](
        q_RGD,
        kv.addresses_B,
        kv.head_rows_B,
        tables.addresses_BA,
        tables.shapes_BX,
        tables.ranges_BX,
        budgets_R,
        scores.logits_RGC,
        scores.bins_RC,
        scores.histogram_RB,
        scores.counts_R,
        chosen,
        ids,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        width,
        slots,
        splits,
        scale * LOG2E,
        HEADS=kv.heads,
        GROUP=group,
        DIM=kv.head_dim,
        OWN=own,
        AT_ONCE=_AT_ONCE,
        MEMBERS=_MEMBERS,
        BINS=BINS,
        TILE=64,
        STAGES=1 if whole else 3,
        PRECISION="ieee" if whole else "tf32",
        num_warps=4,
        **chained(q_RGD.device),
    )
    return *merge_partials(partials), scores


def owned_clusters(rows: int, width: int) -> int:
    """Clusters per program."""
    return min(256, max(16, int(triton.next_power_of_2(max(1, rows * width // 512)))))


@triton.jit
def exchange_always(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    assignment_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    logits_ptrs: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    count: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Attends to the keys outside first..end-1 and takes their share out of clusters that were not selected."""
    grouped = tl.arange(0, 16) < GROUP
    dims = tl.arange(0, DIM)
    peaks = tl.full([16], float("-inf"), tl.float32)
    totals = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        inside = entry < count
        ids = tl.where(entry < first, entry, end + entry - first)
        at = ids[:, None] * (2 * DIM) + dims[None, :]
        keys = tl.load(rows_ptr + at, mask=inside[:, None], other=0.0)
        values = tl.load(rows_ptr + DIM + at, mask=inside[:, None], other=0.0)
        cluster = tl.load(assignment_ptr + ids, mask=inside, other=-1)
        bins = tl.load(bins_ptr + cluster, mask=cluster >= 0, other=32767).to(tl.int32)
        stays = bins < threshold
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        logits = tl.where(inside[None, :], logits, float("-inf"))
        shared = tl.load(
            logits_ptrs[:, None] + cluster[None, :], mask=grouped[:, None] & stays[None, :], other=0.0
        )
        shared = tl.where(stays[None, :], shared * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(peaks, tl.maximum(tl.max(logits, 1), tl.max(shared, 1)))
        shrink = tl.exp2(peaks - higher)
        weights = tl.exp2(logits - higher[:, None]) - tl.exp2(shared - higher[:, None])
        totals = totals * shrink + tl.sum(weights, 1)
        added = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * shrink[:, None] + added
        peaks = higher
    return peaks, totals, sums


@triton.jit
def take_clusters(
    cluster: tl.tensor,
    valid: tl.tensor,
    sizes: tl.tensor,
    logits_ptrs: tl.tensor,
    values_ptr: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Takes whole clusters away from a running softmax."""
    grouped = tl.arange(0, 16) < GROUP
    dims = tl.arange(0, DIM)
    logits = tl.load(
        logits_ptrs[:, None] + cluster[None, :], mask=grouped[:, None] & valid[None, :], other=0.0
    )
    sized = logits * 1.4426950408889634 + tl.log2(tl.maximum(sizes, 1).to(tl.float32))[None, :]
    sized = tl.where(valid[None, :], sized, float("-inf"))
    values = tl.load(values_ptr + cluster[:, None] * DIM + dims[None, :], mask=valid[:, None], other=0.0)
    higher = tl.maximum(peaks, tl.max(sized, 1))
    shrink = tl.exp2(peaks - higher)
    weights = tl.exp2(sized - higher[:, None])
    totals = totals * shrink - tl.sum(weights, 1)
    taken = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return higher, totals, sums * shrink[:, None] - taken


@triton.jit
def list_members(
    members_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    begin: tl.tensor,
    sizes: tl.tensor,
    skip: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> tl.tensor:
    """Writes the members skip..skip+MEMBERS-1 of clusters that are keys first..end-1; returns how many."""
    member = skip + tl.arange(0, MEMBERS)
    ids = tl.load(
        members_ptr + begin[:, None] + member[None, :], mask=member[None, :] < sizes[:, None], other=-1
    )
    searched = (ids >= first) & (ids < end)
    flat = tl.reshape(searched.to(tl.int32), [AT_ONCE * MEMBERS])
    place = tl.cumsum(flat, 0) - flat
    tl.store(ids_ptr + place, tl.reshape(ids, [AT_ONCE * MEMBERS]), mask=flat > 0)
    return tl.sum(flat, 0)


@triton.jit
def exchange_chosen(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    number: tl.tensor,
    offsets_ptr: tl.tensor,
    members_ptr: tl.tensor,
    values_ptr: tl.tensor,
    logits_ptrs: tl.tensor,
    ids_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Takes listed clusters away and attends to their members; also returns how many those are."""
    peaks = tl.full([16], float("-inf"), tl.float32)
    totals = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, DIM], tl.float32)
    attended = 0
    for some in range(0, number, AT_ONCE):
        place = some + tl.arange(0, AT_ONCE)
        valid = place < number
        cluster = tl.load(chosen_ptr + place, mask=valid, other=0)
        begin = tl.load(offsets_ptr + cluster, mask=valid, other=0)
        sizes = tl.load(offsets_ptr + cluster + 1, mask=valid, other=0) - begin
        peaks, totals, sums = take_clusters(
            cluster,
            valid,
            sizes,
            logits_ptrs,
            values_ptr,
            peaks,
            totals,
            sums,
            GROUP,
            DIM,
            PRECISION,
        )
        for skip in range(0, tl.max(sizes, 0), MEMBERS):
            listed = list_members(members_ptr, ids_ptr, begin, sizes, skip, first, end, AT_ONCE, MEMBERS)
            tl.debug_barrier()
            more_peaks, more_totals, more_sums = attend_piece(
                q,
                rows_ptr,
                ids_ptr,
                0,
                listed,
                scale,
                ids_ptr,
                ids_ptr,
                ids_ptr,
                GROUP,
                DIM,
                16,
                False,
                TILE,
                STAGES,
                PRECISION,
            )
            tl.debug_barrier()
            attended += listed
            higher = tl.maximum(peaks, more_peaks)
            old, new = tl.exp2(peaks - higher), tl.exp2(more_peaks - higher)
            totals = totals * old + more_totals * new
            sums = sums * old[:, None] + more_sums * new[:, None]
            peaks = higher
    return peaks, totals, sums, attended


@triton.jit(do_not_specialize=["width", "slots", "splits"])
def exchange_kernel(
    q_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    head_rows_ptr: tl.tensor,
    cluster_addresses_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    ranges_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    bins_ptr: tl.tensor,
    histogram_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    splits: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    OWN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MEMBERS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
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
    clusters = tl.load(shapes_ptr + sequence * 2)
    keys = tl.load(shapes_ptr + sequence * 2 + 1)
    first = tl.load(ranges_ptr + sequence * 2)
    end = tl.load(ranges_ptr + sequence * 2 + 1)
    q = load_group(q_ptr, row, GROUP, DIM, 16)
    rows_ptr = head_rows(addresses_ptr, head_rows_ptr, row, q_ptr, HEADS, DIM)
    bins_row = bins_ptr + row.to(tl.int64) * width
    logits_ptrs = logits_ptr + (row.to(tl.int64) * GROUP + tl.arange(0, 16)) * width
    threshold = threshold_bin(histogram_ptr, row, tl.load(budgets_ptr + row), BINS)
    if program < 0:
        assignment_ptr = table(cluster_addresses_ptr, sequence, 5, tl.int32) + head * keys
        count = always_listed(shapes_ptr, ranges_ptr, sequence)
        peaks, totals, sums = exchange_always(
            q,
            rows_ptr,
            assignment_ptr,
            bins_row,
            logits_ptrs,
            first,
            end,
            count,
            threshold,
            scale,
            GROUP,
            DIM,
            TILE,
            PRECISION,
        )
    else:
        element: tl.constexpr = q_ptr.dtype.element_ty
        values_ptr = table(cluster_addresses_ptr, sequence, 1, element) + head * clusters * DIM
        offsets_ptr = table(cluster_addresses_ptr, sequence, 3, tl.int32) + head * (clusters + 1)
        members_ptr = table(cluster_addresses_ptr, sequence, 4, tl.int32) + head * keys
        scratch = row.to(tl.int64) * programs + program
        chosen_ptr += scratch * OWN
        ids_ptr += scratch * (AT_ONCE * MEMBERS)
        lane = tl.arange(0, OWN)
        owned = ((lane // 16) * programs + program) * 16 + lane % 16
        bins = tl.load(bins_row + owned, mask=owned < width, other=-1).to(tl.int32)
        chosen = (bins >= threshold).to(tl.int32)
        tl.store(chosen_ptr + tl.cumsum(chosen, 0) - chosen, owned, mask=chosen > 0)
        number = tl.sum(chosen, 0)
        tl.debug_barrier()
        peaks, totals, sums, attended = exchange_chosen(
            q,
            rows_ptr,
            chosen_ptr,
            number,
            offsets_ptr,
            members_ptr,
            values_ptr,
            logits_ptrs,
            ids_ptr,
            first,
            end,
            scale,
            GROUP,
            DIM,
            AT_ONCE,
            MEMBERS,
            TILE,
            STAGES,
            PRECISION,
        )
        tl.atomic_add(counts_ptr + row, attended, sem="relaxed")
    slot = splits + program + 1
    store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, slot, peaks, totals, sums, GROUP, DIM, 16)
