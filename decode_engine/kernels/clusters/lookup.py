"""Clusters of keys on a device: attention to their means, whatever is selected, and what is taken out of it again.

A lookup compares the queries with all centroids and attends to each cluster as N keys at its mean; with variances the
mean of exp() over the cluster counts to second order (`remainders.CENTRED`). That is an attention to the whole context,
read in one stream. What is attended exactly is taken out again later, so the lookup depends on no selection. It leaves
the logits, which selection and taking out need.

Taking out, with variances: of a cluster with N keys, n of which are attended exactly, N' = N - n are left, with the
mean logit mu' = (N q.k_c - sum of their logits) / N' and the weight w' = exp(mu') (1 + v / 2) each. A lookup added N w,
with the weight w of all keys; what has to be added is N' w' - N w to the denominator, and w' (V_c - sum of their
values) - w V_c to the numerator. Every attended key adds its n-th part of that, so no program waits for another and
clusters that nothing was attended of are not looked at again.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, N keys, C clusters, S slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import (
    HEAD_TILE,
    LOG2E,
    AttendConstants,
    Partials,
    add_weighted,
    grow,
    load_group,
    no_keys_yet,
    raise_peaks,
    store_partial,
    tile_logits,
)
from decode_engine.kernels.attention.row_planes import load_part, plane_pointers
from decode_engine.kernels.attention.sparse_attention import (
    ClusterScores,
    KeyLists,
    context_entries,
    distance,
    entry_ids,
    list_constants,
    list_programs,
    listed_keys,
    located,
    one_list,
    share_of,
    taken_sums,
)
from decode_engine.kernels.families import KEY_CLUSTERS
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone, wait_for_launch
from decode_engine.kernels.record_fields import (
    ASSIGNMENT,
    CLUSTERS,
    KEYS,
    KV,
    MEANS,
    SIZES,
    SLOTS,
    VALUE_MEANS,
    VARIANCES,
    aligned_pointer,
    field,
    head_rows,
)

_STEPS = 127
"""Variances are stored as multiples of 1/127 of the largest of their cluster."""


@dataclass(frozen=True, slots=True)
class DeviceClusters:
    """Clusters of one context's layer.

    means_HCD, value_means_HCD: [H, C, d], means of the raw keys and of the values, in the dtype of the keys.
    sizes_HC: [H, C] int32. offsets_HC: [H, C + 1] and members_HN: [H, N] int32, the keys of each cluster.
    assignment_HN: [H, N] int32, the cluster of every key, -1 for keys in none. variances: bytes, [H, C, d] int8
    followed by the units [H, C] float32 that they count; None without. A byte per number is enough, since the sum over
    the dimensions weighs large variances most and these are the most precise: it is off by about 1e-3. unclustered: so
    many of the first keys are in no cluster.
    """

    means_HCD: Tensor
    value_means_HCD: Tensor
    sizes_HC: Tensor
    offsets_HC: Tensor
    members_HN: Tensor
    assignment_HN: Tensor
    variances: Tensor | None
    unclustered: int

    @staticmethod
    def of(
        arrays: Mapping[str, Tensor], sinks: int, dtype: torch.dtype, device: torch.device | str
    ) -> DeviceClusters:
        """Of the arrays of an index of kind `key_clusters`, which left so many sinks out.

        Vectors are rounded to `dtype`.
        """
        counts = arrays["counts"].to(device)
        variances = arrays.get("variances")
        return DeviceClusters(
            arrays["means"].to(device, dtype).contiguous(),
            (arrays["value_sums"].to(device) / counts.clamp(min=1.0)[..., None]).to(dtype).contiguous(),
            counts.to(torch.int32).contiguous(),
            arrays["offsets"].to(device).contiguous(),
            arrays["members"].to(device).contiguous(),
            arrays["assignment"].to(device).contiguous(),
            None if variances is None else _in_bytes(variances.to(device)),
            sinks,
        )

    def fields(self) -> dict[int, int]:
        """Of a record."""
        return {
            records.MEANS: self.means_HCD.data_ptr(),
            records.VALUE_MEANS: self.value_means_HCD.data_ptr(),
            records.SIZES: self.sizes_HC.data_ptr(),
            records.OFFSETS: self.offsets_HC.data_ptr(),
            records.MEMBERS: self.members_HN.data_ptr(),
            records.ASSIGNMENT: self.assignment_HN.data_ptr(),
            records.VARIANCES: 0 if self.variances is None else self.variances.data_ptr(),
            records.CLUSTERS: self.sizes_HC.shape[1],
            records.UNCLUSTERED: self.unclustered,
        }

    def variances_HCD(self) -> Tensor | None:
        """The variances as kernels see them, float32."""
        if self.variances is None:
            return None
        shape = self.means_HCD.shape
        count = shape.numel()
        units_HC = self.variances[count:].view(torch.float32).view(shape[:2])
        return self.variances[:count].view(shape).float() * units_HC[..., None]


def _in_bytes(variances_HCD: Tensor) -> Tensor:
    units_HC = variances_HCD.float().amax(-1).clamp(min=torch.finfo(torch.float32).tiny * 1024) / _STEPS
    numbers = (variances_HCD.float() / units_HC[..., None]).round().clamp(max=_STEPS).to(torch.int8)
    return torch.cat([numbers.flatten(), units_HC.flatten().view(torch.int8)])


def most_clusters(max_keys: int, keys_per_cluster: int, block: int) -> int:
    """Clusters per head of contexts of up to max_keys, as `divide_keys` makes them."""
    whole = -(-max_keys // keys_per_cluster)
    # A block of another size may end in a cluster that is not full.
    return whole + (max_keys // block + 1 if block % keys_per_cluster else 0) if block else whole


_TILE = 64


def look_up(
    q_RGD: Tensor,
    records_BF: Tensor,
    scores: ClusterScores,
    partials: Partials,
    scale: float,
    *,
    attend: bool = True,
) -> int:
    """Fills `scores`, and the first slots of `partials`: one per piece of the clusters; returns their number.

    q_RGD: [R, G, d] contiguous, in the dtype of the clusters. With attend=False the slots' sums are not written: peaks
    and totals are the softmax normaliser of all clusters.
    Raises InvalidArgumentError for sizes that kernels do not take.
    """
    rows, group, head_dim = q_RGD.shape
    KEY_CLUSTERS.check(group, head_dim)
    width = scores.logits_RCG.shape[1]
    piece = piece_size(rows, width)
    splits = lookup_slots(rows, width)
    lookup_kernel[(splits, rows)](
        q_RGD,
        records_BF,
        scores,
        partials,
        width,
        partials.peaks_RSG.shape[1],
        scale,
        scale * LOG2E,
        K=AttendConstants.of(q_RGD, rows // len(records_BF), _TILE, 3),
        PIECE=piece,
        ATTEND=attend,
        **chained(q_RGD.device),
    )
    return splits


def piece_size(rows: int, width: int) -> int:
    """Clusters per program."""
    wanted = rows * width // 256
    return min(1024, max(_TILE, int(triton.next_power_of_2(max(1, wanted)))))


def lookup_slots(rows: int, width: int) -> int:
    """Slots that a lookup fills."""
    return int(triton.cdiv(width, piece_size(rows, width)))


@triton.jit
def squares_in_bytes(q: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Squares of scaled queries [rows, d] as 128 upper + lower, both int8, times a unit [rows]."""
    scaled = q.to(tl.float32) * scale
    squares = scaled * scaled
    unit = tl.maximum(tl.max(squares, 1), 1e-30) / 16255.0
    steps = (squares / unit[:, None] + 0.5).to(tl.int32)
    upper = steps // 128
    return upper.to(tl.int8), (steps - upper * 128).to(tl.int8), unit


@triton.jit
def spread_factors(
    upper: tl.tensor, lower: tl.tensor, unit: tl.tensor, numbers: tl.tensor, units: tl.tensor
) -> tl.tensor:
    """1 + v / 2 [rows, clusters] with the variance v of the logits of every cluster's keys, by integers."""
    products = tl.dot(upper, tl.trans(numbers)) * 128 + tl.dot(lower, tl.trans(numbers))
    return 1.0 + products.to(tl.float32) * (0.5 * unit[:, None] * units[None, :])


@triton.jit
def cluster_pointers(
    records_ptr: tl.tensor, row: tl.tensor, K: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Means, mean values, sizes, variances and their units of a row's clusters."""
    b = row // K.HEADS
    clusters = field(records_ptr, b, CLUSTERS)
    before = (row % K.HEADS).to(tl.int64) * clusters
    sizes_ptr = field(records_ptr, b, SIZES).to(tl.pointer_type(tl.int32))
    units_ptr = (field(records_ptr, b, VARIANCES) + K.HEADS * clusters * K.DIM).to(
        tl.pointer_type(tl.float32)
    )
    return (
        aligned_pointer(records_ptr, b, before * K.DIM, MEANS, ELEMENT),
        aligned_pointer(records_ptr, b, before * K.DIM, VALUE_MEANS, ELEMENT),
        sizes_ptr + before,
        aligned_pointer(records_ptr, b, before * K.DIM, VARIANCES, tl.int8),
        units_ptr + before,
    )


@triton.jit(do_not_specialize=["width", "slots"])
def lookup_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    scores: tl.tensor,
    partials: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    scale: tl.tensor,
    scale_log2: tl.tensor,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    ATTEND: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (PIECE clusters, row)."""
    logits_ptr, spreads_ptr, taken_ptr, taken_logits_ptr = scores
    SPREAD: tl.constexpr = spreads_ptr is not None
    split = tl.program_id(0)
    row = tl.program_id(1)
    # Records and clusters were written long ago, the queries perhaps by the launch before.
    clusters = field(records_ptr, row // K.HEADS, CLUSTERS).to(tl.int32)
    means_ptr, values_ptr, sizes_ptr, numbers_ptr, units_ptr = cluster_pointers(
        records_ptr, row, K, q_ptr.dtype.element_ty
    )
    dims = tl.arange(0, K.DIM)
    heads = tl.arange(0, HEAD_TILE)
    end = tl.minimum(split * PIECE + PIECE, clusters)
    wait_for_launch(CHAINED)
    q = load_group(q_ptr, row, K)
    logits_ptr += row.to(tl.int64) * width * K.GROUP
    if SPREAD:
        upper, lower, unit = squares_in_bytes(q, scale)
        spreads_ptr += row.to(tl.int64) * width * K.GROUP
        taken_logits_ptr += row.to(tl.int64) * width * K.GROUP
        taken_ptr += row.to(tl.int64) * width
    peaks, totals, sums = no_keys_yet(K)
    for start in tl.range(split * PIECE, end, K.TILE, num_stages=K.STAGES):
        at = start + tl.arange(0, K.TILE)
        exists = at < clusters
        # Beyond the last cluster it is read again, and weighs nothing.
        offsets = tl.minimum(at, clusters - 1)[:, None] * K.DIM + dims[None, :]
        means = tl.load(means_ptr + offsets)
        sizes = tl.load(sizes_ptr + at, mask=exists, other=0)
        if SPREAD:
            numbers = tl.load(numbers_ptr + offsets)
            units = tl.load(units_ptr + at, mask=exists, other=0.0)
        if ATTEND:
            values = tl.load(values_ptr + offsets)
        logits = tile_logits((q,), (means,), sizes > 0, scale_log2, K)
        into = at[None, :] * K.GROUP + heads[:, None]
        inside = (heads[:, None] < K.GROUP) & exists[None, :]
        tl.store(logits_ptr + into, logits, mask=inside)
        factors = sizes.to(tl.float32)[None, :]
        if SPREAD:
            spreads = spread_factors(upper, lower, unit, numbers, units)
            tl.store(spreads_ptr + into, spreads, mask=inside)
            # Nothing has been taken out of these clusters.
            tl.store(taken_logits_ptr + into, tl.zeros([HEAD_TILE, K.TILE], tl.int64), mask=inside)
            tl.store(taken_ptr + at, tl.zeros([K.TILE], tl.int32), mask=exists)
            factors = factors * spreads
        peaks, totals, shrink, weights = grow(peaks, totals, logits, factors, logits, False)
        if ATTEND:
            if values.dtype == tl.float16:
                weights = tl.minimum(weights, 60000.0)
            sums = add_weighted(sums * shrink[:, None], weights, values, SPREAD, K)
    store_partial(partials, row, slots, split, (peaks, totals, sums), K, ATTEND)


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
    rows = len(q_RGD)
    joined_RN = one_list(lists, joined_RN, locations_RN)
    correct_kernel[(list_programs(rows, lists), rows)](
        q_RGD,
        records_BF,
        (lists.counts_RP, joined_RN, locations_RN),
        scores,
        partials,
        lists.ids_RPW.shape[2],
        joined_RN.shape[1],
        scores.logits_RCG.shape[1],
        partials.peaks_RSG.shape[1],
        first_slot,
        K=list_constants(q_RGD, records_BF, lists, locations_RN, planes, 2),
        **chained(q_RGD.device),
    )


@triton.jit
def weigh_members(cluster: tl.tensor, sizes_ptr: tl.tensor, scores: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Of every key's cluster: mean logits [heads, keys] before and now, the factor of weights [heads, keys], and keys
    before, now and taken."""
    logits_ptr, spreads_ptr, taken_ptr, taken_logits_ptr = scores
    member = cluster >= 0
    heads = tl.arange(0, HEAD_TILE)
    sizes = tl.load(sizes_ptr + cluster, mask=member, other=1).to(tl.float32)
    taken = tl.load(taken_ptr + cluster, mask=member, other=1).to(tl.float32)
    at = cluster[None, :] * K.GROUP + heads[:, None]
    inside = (heads < K.GROUP)[:, None] & member[None, :]
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
    lists: tl.tensor,
    scores: tl.tensor,
    partials: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    cluster_width: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row)."""
    counts_ptr, joined_ptr, locations_ptr = lists
    logits_ptr, spreads_ptr, taken_ptr, taken_logits_ptr = scores
    row = tl.program_id(1)
    b = row // K.HEADS
    head = (row % K.HEADS).to(tl.int64)
    element: tl.constexpr = q_ptr.dtype.element_ty
    stored: tl.constexpr = tl.uint32 if K.PLANES else element
    rows_ptr = head_rows(records_ptr, b, head, KV, stored)
    to_slots = distance(rows_ptr, head_rows(records_ptr, b, head, SLOTS, stored), stored)
    pointers = plane_pointers(records_ptr, b, head, K)
    _, value_means_ptr, sizes_ptr, _, _ = cluster_pointers(records_ptr, row, K, element)
    assignment_ptr = field(records_ptr, b, ASSIGNMENT).to(tl.pointer_type(tl.int32))
    assignment_ptr += head * field(records_ptr, b, KEYS)
    first, end, always = context_entries(records_ptr, b)
    logits_ptr += row.to(tl.int64) * cluster_width * K.GROUP
    spreads_ptr += row.to(tl.int64) * cluster_width * K.GROUP
    taken_ptr += row.to(tl.int64) * cluster_width
    taken_logits_ptr += row.to(tl.int64) * cluster_width * K.GROUP
    joined_ptr += row.to(tl.int64) * room
    dims = tl.arange(0, K.DIM)
    peaks, totals, sums = no_keys_yet(K)
    wait_alone(CHAINED)
    counts = listed_keys(counts_ptr, row, width, K)
    listed = tl.minimum(tl.sum(counts, 0), room)
    begin, stop = share_of(listed + always, K)
    for at in tl.range(begin, stop, K.TILE, num_stages=K.STAGES):
        entry = at + tl.arange(0, K.TILE)
        ids = entry_ids(joined_ptr, entry, listed, stop, first, end)
        cluster = tl.load(assignment_ptr + ids, mask=ids >= 0, other=-1)
        member = cluster >= 0
        # A head's rows span less than 2^31 elements up to 2^22 keys.
        where = ids * (2 * K.WIDTH)
        place = row.to(tl.int64) * room + entry
        known = entry < tl.minimum(stop, room)
        where = located(where, locations_ptr, place, known, to_slots, K)
        values = load_part(rows_ptr, where, pointers, ids, member, True, K, element)
        where = cluster[:, None] * K.DIM + dims[None, :]
        value_means = tl.load(value_means_ptr + where, mask=member[:, None], other=0.0)
        before, now, factors, sizes, left, taken = weigh_members(
            cluster, sizes_ptr, (logits_ptr, spreads_ptr, taken_ptr, taken_logits_ptr), K
        )
        peaks, base, shrink = raise_peaks(peaks, tl.maximum(tl.max(before, 1), tl.max(now, 1)))
        before = tl.exp2(before - base[:, None]) * factors
        now = tl.exp2(now - base[:, None]) * factors
        share = (1.0 / taken)[None, :]
        totals = totals * shrink + tl.sum((now * left[None, :] - before * sizes[None, :]) * share, 1)
        sums = add_weighted(sums * shrink[:, None], -now, values, False, K)
        whole = (now - before) * sizes[None, :] * share
        sums = add_weighted(sums, whole, value_means, True, K)
    store_partial(partials, row, slots, first_slot + tl.program_id(0), (peaks, totals, sums), K, True)
    let_next_begin(CHAINED)
