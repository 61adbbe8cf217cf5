"""Lookup of clusters: attention to the mean of every cluster, whatever is selected.

Every program compares the queries with some centroids and attends to each cluster as N keys at its mean; with variances
the mean of exp() over the cluster counts to second order (`remainders.CENTRED`). That is an attention to
the whole context, read in one stream. What is attended exactly is taken out again later, so the lookup depends on no
selection. It leaves the logits, which selection and taking out need.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, S slots, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import (
    HEAD_TILE,
    LOG2E,
    add_weighted,
    grow,
    load_group,
    no_keys_yet,
    tile_logits,
    tile_options,
)
from decode_engine.kernels.attention.partials import Partials, store_partial
from decode_engine.kernels.attention.sparse_attention import ClusterScores
from decode_engine.kernels.families import KEY_CLUSTERS
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import (
    CLUSTERS,
    MEANS,
    SIZES,
    VALUE_MEANS,
    VARIANCES,
    aligned_pointer,
    field,
)

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
        scores.logits_RCG,
        scores.spreads_RCG,
        scores.taken_RC,
        scores.taken_logits_RCG,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        width,
        partials.peaks_RSG.shape[1],
        scale,
        scale * LOG2E,
        HEADS=rows // len(records_BF),
        GROUP=group,
        DIM=head_dim,
        PIECE=piece,
        SPREAD=scores.spreads_RCG is not None,
        ATTEND=attend,
        **tile_options(q_RGD.dtype, _TILE, 3),
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
    records_ptr: tl.tensor,
    row: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Means, mean values, sizes, variances and their units of a row's clusters."""
    b = row // HEADS
    clusters = field(records_ptr, b, CLUSTERS)
    before = (row % HEADS).to(tl.int64) * clusters
    sizes_ptr = field(records_ptr, b, SIZES).to(tl.pointer_type(tl.int32))
    units_ptr = (field(records_ptr, b, VARIANCES) + HEADS * clusters * DIM).to(tl.pointer_type(tl.float32))
    return (
        aligned_pointer(records_ptr, b, before * DIM, MEANS, ELEMENT),
        aligned_pointer(records_ptr, b, before * DIM, VALUE_MEANS, ELEMENT),
        sizes_ptr + before,
        aligned_pointer(records_ptr, b, before * DIM, VARIANCES, tl.int8),
        units_ptr + before,
    )


@triton.jit
def store_spreads(
    spreads: tl.tensor,
    spreads_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    into: tl.tensor,
    inside: tl.tensor,
    taken_ptrs: tl.tensor,
    exists: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Stores spreads, and that nothing has been taken out of their clusters."""
    tl.store(spreads_ptr + into, spreads, mask=inside)
    tl.store(taken_logits_ptr + into, tl.zeros([HEAD_TILE, TILE], tl.int64), mask=inside)
    tl.store(taken_ptrs, tl.zeros([TILE], tl.int32), mask=exists)


@triton.jit(do_not_specialize=["width", "slots"])
def lookup_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    spreads_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    scale: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    SPREAD: tl.constexpr,
    ATTEND: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (PIECE clusters, row)."""
    split = tl.program_id(0)
    row = tl.program_id(1)
    # Records and clusters were written long ago, the queries perhaps by the launch before.
    clusters = field(records_ptr, row // HEADS, CLUSTERS).to(tl.int32)
    means_ptr, values_ptr, sizes_ptr, numbers_ptr, units_ptr = cluster_pointers(
        records_ptr, row, HEADS, DIM, q_ptr.dtype.element_ty
    )
    dims = tl.arange(0, DIM)
    heads = tl.arange(0, HEAD_TILE)
    end = tl.minimum(split * PIECE + PIECE, clusters)
    wait_for_launch(CHAINED)
    q = load_group(q_ptr, row, GROUP, DIM)
    logits_ptr += row.to(tl.int64) * width * GROUP
    if SPREAD:
        upper, lower, unit = squares_in_bytes(q, scale)
        spreads_ptr += row.to(tl.int64) * width * GROUP
        taken_logits_ptr += row.to(tl.int64) * width * GROUP
        taken_ptr += row.to(tl.int64) * width
    peaks, totals, sums = no_keys_yet(DIM)
    for start in tl.range(split * PIECE, end, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        exists = at < clusters
        # Beyond the last cluster it is read again, and weighs nothing.
        offsets = tl.minimum(at, clusters - 1)[:, None] * DIM + dims[None, :]
        means = tl.load(means_ptr + offsets)
        sizes = tl.load(sizes_ptr + at, mask=exists, other=0)
        if SPREAD:
            numbers = tl.load(numbers_ptr + offsets)
            units = tl.load(units_ptr + at, mask=exists, other=0.0)
        if ATTEND:
            values = tl.load(values_ptr + offsets)
        logits = tile_logits(q, means, sizes > 0, scale_log2, PRECISION)
        into = at[None, :] * GROUP + heads[:, None]
        inside = (heads[:, None] < GROUP) & exists[None, :]
        tl.store(logits_ptr + into, logits, mask=inside)
        factors = sizes.to(tl.float32)[None, :]
        if SPREAD:
            spreads = spread_factors(upper, lower, unit, numbers, units)
            store_spreads(spreads, spreads_ptr, taken_logits_ptr, into, inside, taken_ptr + at, exists, TILE)
            factors = factors * spreads
        peaks, totals, shrink, weights = grow(peaks, totals, logits, factors, logits, False)
        if ATTEND:
            if values.dtype == tl.float16:
                weights = tl.minimum(weights, 60000.0)
            sums = add_weighted(sums * shrink[:, None], weights, values, SPREAD, PRECISION)
    store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, split, peaks, totals, sums, GROUP, DIM, ATTEND)
