"""Decode attention over the keys that query tables select, in one launch after the search.

Every program but the first few of a KV head owns a tile of keys: it selects among them (`selection`), and attends
to those. Sinks, recent window and tail are shared out in runs of a fixed number of rows: to the programs without a tile
first, and what they cannot take in time to all. The group's query heads share one tile of the tensor cores. All leave
partial results, which `merge_partials` merges.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.key_lists import distance
from decode_engine.kernels.attention.online_softmax import (
    LOG2E,
    attend_tile,
    load_group,
    no_keys_yet,
)
from decode_engine.kernels.attention.partials import merge_partials, store_partial
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import KEYS, KV, TAIL, TAIL_KEYS, field, head_rows, searched_keys
from decode_engine.kernels.tables.device_functions import load_sequence
from decode_engine.kernels.tables.search import search
from decode_engine.kernels.tables.selection import found, keep_keys, selection_sizes
from decode_engine.kernels.tables.sizes import TableSizes, TableWork

NEAR_RUNS = tl.constexpr(8)  # runs of exact rows that a program without a tile takes before others help


@triton.jit
def attend_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    bh: tl.tensor,
    count: tl.tensor,
    scale_log2: tl.tensor,
    EXACT: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Attends to the `count` listed keys, and to this program's runs of BN rows of sinks, recent window and tail.

    Runs x, x + EXACT, ... go to the EXACT programs without a tile, NEAR_RUNS to each; of the others every program takes
    its turn. Returns peaks, totals and sums of `online_softmax`.
    """
    x = tl.program_id(0)
    b = bh // H
    d = tl.arange(0, D)
    n_keys = field(records_ptr, b, KEYS).to(tl.int32)
    first, end = searched_keys(records_ptr, b)
    in_context = first + n_keys - end
    exact = in_context + field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    runs = tl.cdiv(exact, BN)
    near = tl.where(x < EXACT, tl.minimum(tl.maximum(tl.cdiv(runs - x, EXACT), 0), NEAR_RUNS), 0)
    far = tl.maximum(tl.cdiv(runs - EXACT * NEAR_RUNS - x, tl.num_programs(0)), 0)
    listed = tl.cdiv(count, BN)
    element: tl.constexpr = q_ptr.dtype.element_ty
    kv_ptr = head_rows(records_ptr, b, bh % H, KV, element)
    # Key ids count on into the tail, whose rows are addressed relative to the context's.
    to_tail = distance(kv_ptr, head_rows(records_ptr, b, bh % H, TAIL, element), element)
    tail_offset = to_tail - n_keys.to(tl.int64) * (2 * D)
    q = load_group(q_ptr, bh, G, D)
    peaks, totals, sums = no_keys_yet(D)
    for turn in range(0, listed + near + far):
        own = turn - listed
        run = tl.where(own < near, x + own * EXACT, EXACT * NEAR_RUNS + x + (own - near) * tl.num_programs(0))
        n = tl.where(own < 0, turn, run) * BN + tl.arange(0, BN)
        there = n < tl.where(own < 0, count, exact)
        always = tl.where(n < first, n, tl.where(n < in_context, n - first + end, n - in_context + n_keys))
        key = tl.where(own < 0, tl.load(ids_ptr + n, mask=there & (own < 0), other=0), always)
        offset = key.to(tl.int64) * (2 * D) + tl.where(key < n_keys, 0, tail_offset)
        row_ptrs = kv_ptr + tl.multiple_of(offset, 8)[:, None] + d[None, :]
        k = tl.load(row_ptrs, mask=there[:, None], other=0.0)
        v = tl.load(row_ptrs + D, mask=there[:, None], other=0.0)
        peaks, totals, sums = attend_tile(q, k, v, there, peaks, totals, sums, scale_log2, PRECISION)
    return peaks, totals, sums


@triton.jit
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    normalisers_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    out_sums_ptr: tl.tensor,
    out_peaks_ptr: tl.tensor,
    out_totals_ptr: tl.tensor,
    scale_log2: tl.tensor,
    P: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    S: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    EXACT: tl.constexpr,
    POOLED: tl.constexpr,
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (x, bh): tile x - EXACT, and a share of what is attended exactly."""
    x = tl.program_id(0)
    bh = tl.program_id(1)
    tile = x - EXACT
    sequence = load_sequence(records_ptr, bh // H)
    wait_alone(CHAINED)
    tile_ids_ptr = ids_ptr + (bh.to(tl.int64) * P + tl.maximum(tile, 0)) * (4 * BW)
    count = keep_keys(
        sequence, rows_ptr, weights_ptr, units_ptr, logits_ptr, peaks_ptr, normalisers_ptr, histograms_ptr,
        limits_ptr, tile_ids_ptr, bh, bh % H, tile, P, L, J, S, BW, POOLED, EARLY, ASSEMBLY,
    )  # fmt: skip
    tl.store(counts_ptr + bh * P + tile, count, mask=tile >= 0)
    tl.debug_barrier()
    peaks, totals, sums = attend_rows(
        q_ptr, records_ptr, tile_ids_ptr, bh, count, scale_log2,
        EXACT, H, G, D, BN, PRECISION,
    )  # fmt: skip
    store_partial(
        out_sums_ptr,
        out_peaks_ptr,
        out_totals_ptr,
        bh,
        tl.num_programs(0),
        x,
        peaks,
        totals,
        sums,
        G,
        D,
        True,
    )
    # Not sooner: programs that come early take the place of those that still have work.
    let_next_begin(CHAINED)


def attend(
    q_BHGD: Tensor, records_BF: Tensor, sizes: TableSizes, work: TableWork, counts_BHP: Tensor
) -> None:
    """Launches selection and attention of one step after `search`: fills counts, ids and partials."""
    whole = q_BHGD.element_size() == 4
    partials = work.partials
    attend_kernel[(sizes.programs, q_BHGD.shape[0] * sizes.kv_heads)](
        q_BHGD, records_BF, *found(work), counts_BHP,
        partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG, sizes.scale * LOG2E, sizes.tiles,
        H=sizes.kv_heads, G=sizes.group, D=sizes.head_dim, BN=sizes.shape.rows,
        EXACT=sizes.shape.exact_programs, PRECISION="ieee" if whole else "tf32", **selection_sizes(q_BHGD, sizes),
        **sizes.shape.options(), **chained(q_BHGD.device),
    )  # fmt: skip


def table_attention(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: TableSizes,
    work: TableWork,
    counts_BHP: Tensor,
    sink_HG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one decode step to sinks, recent window, tail and the keys that the tables select.

    q_BHGD: [B, H, G, d] contiguous, in the dtype of keys and values, unscaled. records_BF: [B, F] int64. counts_BHP:
    [B, H, P] int32, gets the number of kept keys of every tile. sink_HG: see `merge_partials`. Returns out [B, H, G,
    d] in the queries' dtype and lse [B, H, G] float32; keys that are kept neither by the tables nor always are
    dropped. Does not wait for the device and may be captured in a CUDA graph.
    """
    search(q_BHGD, records_BF, sizes, work)
    attend(q_BHGD, records_BF, sizes, work, counts_BHP)
    out, lse = merge_partials(work.partials, q_BHGD.dtype, sink_HG)
    return out.view_as(q_BHGD), lse.view(q_BHGD.shape[:3])
