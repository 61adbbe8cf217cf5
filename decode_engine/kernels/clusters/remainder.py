"""The centred remainder: takes attended keys out of the clusters that a lookup attended to whole.

Of a cluster with N keys, n of which are attended exactly, N' = N - n are left, with the mean logit
mu' = (N q.k_c - sum of their logits) / N' and the weight w' = exp(mu') (1 + v / 2) each (`remainders.CENTRED`). A
lookup added N w, with the weight w of all keys; what has to be added is N' w' - N w to the denominator, and
w' (V_c - sum of their values) - w V_c to the numerator. Every attended key adds its n-th part of that, so no program
waits for another and clusters that nothing was attended of are not looked at again.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, S slots, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.key_lists import (
    KeyLists,
    context_entries,
    distance,
    entry_ids,
    listed_keys,
    located,
    share_of,
)
from decode_engine.kernels.attention.online_softmax import (
    HEAD_TILE,
    add_weighted,
    no_keys_yet,
    raise_peaks,
    tile_options,
)
from decode_engine.kernels.attention.partials import Partials, store_partial
from decode_engine.kernels.attention.row_planes import load_values, plane_pointers
from decode_engine.kernels.attention.sparse_attention import (
    LIST_TILE,
    ClusterScores,
    list_programs,
    one_list,
    taken_sums,
)
from decode_engine.kernels.clusters.lookup import cluster_pointers
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import ASSIGNMENT, KEYS, KV, SLOTS, field, head_rows


def correct_clusters(
    q_RGD: Tensor,
    records_BF: Tensor,
    lists: KeyLists,
    joined_RN: Tensor,
    scores: ClusterScores,
    partials: Partials,
    first_slot: int,
    locations_RN: Tensor | None = None,
    planes: bool = False,
) -> None:
    """Takes the listed keys, sinks and recent window out of their clusters, in as many slots as `attend_lists` fills.

    joined_RN: as `attend_lists` left it. locations_RN, planes: as for `attend_lists`. `scores` hold what that summed up
    over the same keys.
    """
    rows, group, head_dim = q_RGD.shape
    joined_RN = one_list(lists, joined_RN, locations_RN)
    correct_kernel[(list_programs(rows, lists), rows)](
        q_RGD,
        records_BF,
        lists.counts_RP,
        joined_RN,
        locations_RN,
        scores.logits_RCG,
        scores.spreads_RCG,
        scores.taken_RC,
        scores.taken_logits_RCG,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        lists.ids_RPW.shape[2],
        joined_RN.shape[1],
        scores.logits_RCG.shape[1],
        partials.peaks_RSG.shape[1],
        first_slot,
        HEADS=rows // len(records_BF),
        GROUP=group,
        DIM=head_dim,
        SEGMENTS=lists.ids_RPW.shape[1],
        SEGMENTS_TILE=triton.next_power_of_2(lists.ids_RPW.shape[1]),
        LOCATED=locations_RN is not None,
        PLANES=planes,
        **tile_options(q_RGD.dtype, LIST_TILE, 2),
        **chained(q_RGD.device),
    )


@triton.jit
def weigh_members(
    cluster: tl.tensor,
    sizes_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    spreads_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Of every key's cluster: mean logits [heads, keys] before and now, the factor of weights [heads, keys], and keys
    before, now and taken."""
    member = cluster >= 0
    heads = tl.arange(0, HEAD_TILE)
    sizes = tl.load(sizes_ptr + cluster, mask=member, other=1).to(tl.float32)
    taken = tl.load(taken_ptr + cluster, mask=member, other=1).to(tl.float32)
    at = cluster[None, :] * GROUP + heads[:, None]
    inside = (heads < GROUP)[:, None] & member[None, :]
    means = tl.load(logits_ptr + at, mask=inside, other=float("-inf"))
    spreads = tl.load(spreads_ptr + at, mask=inside, other=0.0)
    taken_logits = taken_sums(taken_logits_ptr, at, inside)
    left = sizes - taken
    mean_left = (means * sizes[None, :] - taken_logits) / tl.maximum(left, 1.0)[None, :]
    now = tl.where((left > 0.0)[None, :], mean_left, float("-inf"))
    return means, now, spreads, sizes, left, taken


@triton.jit(do_not_specialize=["width", "room", "cluster_width", "slots", "first_slot"])
def correct_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    spreads_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    cluster_width: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    LOCATED: tl.constexpr,
    PLANES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row)."""
    row = tl.program_id(1)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    element: tl.constexpr = q_ptr.dtype.element_ty
    stored: tl.constexpr = tl.uint32 if PLANES else element
    WIDTH: tl.constexpr = DIM // 8 if PLANES else DIM  # of a key as it is stored
    rows_ptr = head_rows(records_ptr, b, head, KV, stored)
    to_slots = distance(rows_ptr, head_rows(records_ptr, b, head, SLOTS, stored), stored)
    pointers = plane_pointers(records_ptr, b, head, PLANES, DIM)
    _, value_means_ptr, sizes_ptr, _, _ = cluster_pointers(records_ptr, row, HEADS, DIM, element)
    assignment_ptr = field(records_ptr, b, ASSIGNMENT).to(tl.pointer_type(tl.int32))
    assignment_ptr += head * field(records_ptr, b, KEYS)
    first, end, always = context_entries(records_ptr, b)
    logits_ptr += row.to(tl.int64) * cluster_width * GROUP
    spreads_ptr += row.to(tl.int64) * cluster_width * GROUP
    taken_ptr += row.to(tl.int64) * cluster_width
    taken_logits_ptr += row.to(tl.int64) * cluster_width * GROUP
    joined_ptr += row.to(tl.int64) * room
    dims = tl.arange(0, DIM)
    peaks, totals, sums = no_keys_yet(DIM)
    wait_alone(CHAINED)
    counts = listed_keys(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    listed = tl.minimum(tl.sum(counts, 0), room)
    begin, stop = share_of(listed + always, TILE)
    for at in tl.range(begin, stop, TILE, num_stages=STAGES):
        entry = at + tl.arange(0, TILE)
        ids = entry_ids(joined_ptr, entry, listed, stop, first, end)
        cluster = tl.load(assignment_ptr + ids, mask=ids >= 0, other=-1)
        member = cluster >= 0
        # A head's rows span less than 2^31 elements up to 2^22 keys.
        where = ids * (2 * WIDTH)
        place = row.to(tl.int64) * room + entry
        known = entry < tl.minimum(stop, room)
        where = located(where, locations_ptr, place, known, to_slots, LOCATED, WIDTH)
        values = load_values(rows_ptr, where, pointers, ids, member, PLANES, DIM, element)
        where = cluster[:, None] * DIM + dims[None, :]
        value_means = tl.load(value_means_ptr + where, mask=member[:, None], other=0.0)
        before, now, factors, sizes, left, taken = weigh_members(
            cluster, sizes_ptr, logits_ptr, spreads_ptr, taken_ptr, taken_logits_ptr, GROUP
        )
        peaks, base, shrink = raise_peaks(peaks, tl.maximum(tl.max(before, 1), tl.max(now, 1)))
        before = tl.exp2(before - base[:, None]) * factors
        now = tl.exp2(now - base[:, None]) * factors
        share = (1.0 / taken)[None, :]
        totals = totals * shrink + tl.sum((now * left[None, :] - before * sizes[None, :]) * share, 1)
        sums = add_weighted(sums * shrink[:, None], -now, values, False, PRECISION)
        whole = (now - before) * sizes[None, :] * share
        sums = add_weighted(sums, whole, value_means, True, PRECISION)
    store_partial(
        sums_ptr, peaks_ptr, totals_ptr, row, slots, first_slot + tl.program_id(0), peaks, totals, sums,
        GROUP, DIM, True,
    )  # fmt: skip
    let_next_begin(CHAINED)
